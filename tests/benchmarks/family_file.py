"""Writes a GGUF file of random weights in Q4_0, 3 B parameters of which a token uses 0.5 B, to measure two programs on.

python -m tests.benchmarks.family_file glm4_moe_lite|nemotron_h FILE.gguf
python -m tests.benchmarks.llama_bench FILE.gguf FILE.gguf --llama-bench PATH --rounds 1
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.packed_folder import write_packed
from tests.support.paths import PICO

COMMON = {
    "hidden_size": 2048,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The proportions of GLM-4.7-Flash and Nemotron 3 Nano.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "num_hidden_layers": 15,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "intermediate_size": 8192,
        "moe_intermediate_size": 512,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    "nemotron_h": {
        "num_hidden_layers": 23,
        "hybrid_override_pattern": "MEMEM*EMEMEMEM*EMEMEMEE",
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 928,
        "moe_intermediate_size": 928,
        "moe_shared_expert_intermediate_size": 1856,
        "num_experts_per_tok": 6,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    },
}


def main() -> None:
    """Write the file, and print its size and numbers of parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    fields = {"model_type": given.family, **COMMON, **FAMILIES[given.family]}
    config = parse_config(Fields(fields, "a random shape"))
    with tempfile.TemporaryDirectory(dir=given.file.parent) as place:
        # llama.cpp stores kv_b transposed, head by head, so its groups would not survive.
        folder = write_packed(Path(place) / "packed", fields, {"kv_b_proj": 0, "": 4})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PICO / name, folder / name)
        command = [
            sys.executable,
            "-m",
            "mycli.cli",
            "export",
            str(folder),
            "--to",
            "gguf",
            "-o",
            str(given.file),
            "-q",
        ]
        subprocess.run(command, check=True)
    every, active = config.parameters() / 1e9, config.active_parameters() / 1e9
    print(f"{given.family}: {every:.2f} B parameters, {active:.2f} B active, {given.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
