"""Falcon-Mamba, which llama.cpp has as mamba: dt, B and C are normalized without a weight."""

from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architectures import mamba

# The epsilon of these norms has no key. Files are read with the family's, 1e-6; llama.cpp takes that of the others.
ARCHITECTURE = replace(
    mamba.ARCHITECTURE, model_type="falcon_mamba", written_types=("falcon_mamba",), reads=lambda header, experts: True
)
