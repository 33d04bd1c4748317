"""Test what a plan of a quantization decides before a tensor is read."""

from dataclasses import replace

from mycli.quant.planning.plan import plan_quantization
from mycli.quant.recipe import Recipe
from mycli.runtime.hub.resolve import resolve
from tests.support.quantizing import UNMEASURED


def test_bits_of_a_head_are_chosen_if_it_is_packed_and_none_are_given() -> None:
    tied = plan_quantization(resolve("pico", offline=True), Recipe(head="auto"), UNMEASURED)
    assert not tied.chooses_head
    packing = next(iter(tied.packings.values()))
    packed = replace(tied, packings={**tied.packings, tied.config.head().name: packing})
    assert packed.chooses_head
    assert not replace(packed, recipe=Recipe(head="int8")).chooses_head
