"""Test recurrent layers on their own; tests/runtime/engine/test_recurrent.py tests their states in the engine."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.layers.block import Recurrent
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.recurrent import Advance, PromptStates, Rows, make_mixer
from mycli.runtime.models.recurrent_spec import KimiDeltaSpec, RecurrentSpec
from tests.support.families import CASES, make
from tests.support.published import published


@pytest.mark.parametrize("case", ["kimi_linear-8top3", "bailing_hybrid-8top3"])
def test_the_memory_model_counts_the_operands_of_kimi_delta_attention(case: str, tmp_path: Path) -> None:
    """Besides the outputs of products and the rows: queries, keys and decays in fp32, what is read, and gated."""
    make(tmp_path, *CASES[case])
    specs = (spec.recurrent for spec in open_model_folder(tmp_path).config.layer_specs)
    spec = next(spec for spec in specs if isinstance(spec, KimiDeltaSpec))
    part = make_mixer(spec, 0)
    outputs = sum(linear.out_features for linear in part.modules() if isinstance(linear, Linear))
    assert spec.forward_values() == outputs + sum(part.widths) + (2 * 3 + 1 + 1) * spec.width


# Values per token: of a pass, of a drafted token until it is accepted, and of a forward and backward pass. Per line of
# a pass: projected, convolved, in fp32, read and gated, projected.
COUNTS = {
    "Qwen3.5-9B": (
        (8192 + 4096 + 2 * 32) + 8192 + 2 * (2 * 16 * 128) + 2 * 4096 + 4096,
        8192 + 4096 + 2 * 32,
        6 * 32 * (64 + 3 * 128) + 2 * 4 * 8192,
    ),
    "Qwen3-Next-80B-A3B": (  # reordered after the projection
        2 * (12288 + 64) + 8192 + 2 * (2 * 16 * 128) + 2 * 4096 + 2048,
        12288 + 64,
        6 * 32 * (64 + 3 * 128) + 2 * 4 * 8192,
    ),
    "Kimi-Linear-48B": (
        (3 * 4096 + 32 + 2 * 128 + 2 * 4096) + 32 + 4096 + 3 * 4096 + 2 * (3 * 4096) + 2 * 4096 + 2304,
        3 * 4096 + 32 + 4096,
        6 * 32 * (16 + 3 * 128) + 4 * 16 * 4096 + 2 * 4 * 3 * 4096,
    ),
    "Falcon3-Mamba-7B": (  # steps in fp32
        2 * 8192 + 8192 + 2 * (256 + 2 * 16) + 2 * (2 * 8192) + 2 * 8192 + 4096,
        2 * 8192,
        2 * 4 * 16 * 8192 + 2 * 4 * 8192,
    ),
    "LFM2-1.2B": (3 * 2048 + 3 * 2048 + 2048, 2048, 2 * 3 * 2048),
    "Nemotron-H-8B": (
        18560 + 10240 + 2 * (2 * 8 * 128 + 2 * 128) + 2 * 8192 + 4096,
        18560,
        4 * 128 * (64 + 2 * 128 + 64) + 2 * 4 * 10240,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_memory_model_counts_the_values_of_published_layers(name: str) -> None:
    spec = next(layer.recurrent for layer in published(name).layer_specs if layer.recurrent is not None)
    forward, draft, backward = COUNTS[name]
    assert (spec.forward_values(), spec.draft_values()) == (forward, draft)
    assert spec.training_values() == 2 * forward + backward


class RecordedWidths(PromptStates):
    """Records the widths of the rows by which states advance."""

    def __init__(self) -> None:
        self.widths: list[tuple[int, ...]] = []

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        self.widths.append(tuple(tensor.flatten(2).shape[-1] for tensor in rows))
        return super().advance(layer, spec, rows, step)


@pytest.mark.parametrize(
    "case",
    [
        *("qwen3_5-odd-heads-tied", "kimi_linear-8top3", "lfm2-untied-biases", "bamba-2-groups"),
        *("falcon_h1-multipliers", "jamba-odd-sizes-biases-every-third"),
    ],
)
def test_states_advance_by_rows_of_the_declared_widths(case: str, tmp_path: Path) -> None:
    """Native code writes the rows of drafted tokens by these widths, and only the rows of accepted tokens count."""
    make(tmp_path, *CASES[case])
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    states, declared = RecordedWidths(), []
    for mixer in (part.mixer for part in model.modules() if isinstance(part, Recurrent)):
        x = torch.zeros(1, 2, model.config.hidden_size)
        mixer(x, torch.zeros(1, 2, mixer.projection.out_features), states)
        declared.append(mixer.widths)
        assert mixer.nbytes == sum(4 * math.prod(shape) for _, shape in mixer.spec.tensors())
    assert declared and states.widths == declared
