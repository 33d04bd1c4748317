"""Reads from a model's card, the weights and the processor how CPU kernels round activations."""

import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.hub.activation_record import recorded_kl
from mycli.runtime.hub.store import MAX_RECORD_BYTES, RECORD
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.quantization.activations import (
    ActivationChoice,
    ActivationKl,
    choose_activations,
    choose_by_file,
    read_activation_kl,
)
from mycli.runtime.utils.json_fields import read_object


def card_activation_kl(folder: ModelFolder) -> ActivationKl | None:
    """Return what the card of a model says about both precisions; None if it says nothing, or cannot be read."""
    record = folder.path / RECORD
    try:
        return read_activation_kl(read_object(record, MAX_RECORD_BYTES) if record.is_file() else None)
    except ModelError:  # `mycli verify` reports a damaged card; it does not keep a model from running
        return None


def activation_choice(folder: ModelFolder, placement: Placement) -> ActivationChoice | None:
    """Return how activations are rounded; None where they are not: on a GPU, in fp32, and without packed weights."""
    if placement.device.type != "cpu" or placement.dtype != torch.bfloat16 or not folder.packings:
        return None
    library = native()
    if isinstance(library, Declined):
        return None
    # With portable bits the processor must not choose. A measurement would, near its limit.
    tiles = library.isa == "amx" and not placement.portable
    if placement.portable and placement.activations == "auto" and folder.path.is_file():
        return ActivationChoice(16, 8, Declined("activations-portable"))
    if placement.activations == "auto" and folder.path.is_file() and not tiles:  # a GGUF file has no card
        return choose_by_file(recorded_kl(folder.path))
    return choose_activations(placement.activations, card_activation_kl(folder), tiles=tiles)
