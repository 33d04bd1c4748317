"""Test that the tensors of a GGUF file have the names and shapes that llama.cpp's converter gives them."""

from collections.abc import Sequence

import pytest

from mycli.quant.ggml.file import _plan, gguf_place
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.rope import ROPE_TENSORS
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.gguf_facts import FACTS

# llama.cpp reads gate and up of all experts in one tensor as well, and its converter leaves them joined here.
JOINED = ("granitemoe_swa-window7-shared", "mistral4-beyond")
_JOINED_TENSORS = (".ffn_gate_exps.weight", ".ffn_up_exps.weight", ".ffn_gate_up_exps.weight")


def _axes(shape: Sequence[int]) -> tuple[int, ...]:
    # Without those of length one at the end, which ggml adds up to four.
    count = next((axis for axis in range(len(shape), 1, -1) if shape[axis - 1] != 1), 1)
    return tuple(shape[:count])


@pytest.mark.parametrize("name", FACTS)
def test_tensors_have_the_shapes_of_the_converter(name: str) -> None:
    config = parse_config(Fields(FACTS[name]["config"], "config.json"))
    architecture = written_architecture(config, "")
    places = {tensor: gguf_place(architecture, tensor) for tensor, _ in config.tensors()}
    written = {tensor: _axes(shape[::-1]) for tensor, _, shape in _plan(config, places, dict.fromkeys(places, "F32"))}
    expected = {tensor: _axes(shape) for tensor, shape in FACTS[name]["tensors"].items() if tensor not in ROPE_TENSORS}
    if name in JOINED:
        for tensors in (written, expected):
            for tensor in [tensor for tensor in tensors if tensor.endswith(_JOINED_TENSORS)]:
                del tensors[tensor]
    assert written == expected
