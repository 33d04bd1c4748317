"""Test when 8-bit activations are used: on request, or next to narrow weights if the model card allows it."""

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.activations import (
    MAX_ADDED_KL,
    MAX_MOVED_KL,
    UNMEASURED_FILE,
    ActivationKl,
    Activations,
    choose_activations,
    choose_by_file,
    read_activation_kl,
)
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

LITTLE, MUCH = ActivationKl(0.0136, 0.0138), ActivationKl(0.0001, 0.0002)
WIDTHS = {f"int{bits}": Packing(bits, 64) for bits in (8, 6, 4, 2)}


@pytest.mark.parametrize(
    "requested, measured, tiles, bits, code",
    [
        ("auto", None, False, 16, "activations-not-measured"),
        ("auto", LITTLE, False, 8, "activations-add"),
        ("auto", LITTLE, True, 16, "activations-in-tiles"),
        ("auto", MUCH, False, 16, "activations-add"),
        ("16", LITTLE, False, 16, "activations-requested"),
        ("8", MUCH, True, 8, "activations-requested"),
    ],
)
def test_choice(requested: Activations, measured: ActivationKl | None, tiles: bool, bits: int, code: str) -> None:
    choice = choose_activations(requested, measured, tiles=tiles)
    assert (choice.bits, choice.reason.code) == (bits, code)


def test_limit_is_three_percent_of_the_divergence() -> None:
    assert MAX_ADDED_KL == 0.03
    assert choose_activations("auto", ActivationKl(1.0, 1.0299), tiles=False).bits == 8
    assert choose_activations("auto", ActivationKl(1.0, 1.03), tiles=False).bits == 16
    assert ActivationKl(0.0, 0.0).added == 0.0


def test_auto_leaves_wide_weights_at_16_bits() -> None:
    auto, requested = (choose_activations(kind, LITTLE, tiles=False).packings(WIDTHS) for kind in ("auto", "8"))
    assert [packing.activations for packing in auto.values()] == [16, 8, 8, 8]
    assert {packing.activations for packing in requested.values()} == {8}
    assert choose_activations("16", LITTLE, tiles=False).packings(WIDTHS) is WIDTHS


def test_stored_packings_are_found_with_any_activations() -> None:
    """The file layouts are compared by packing, and files do not specify activations."""
    eight = choose_activations("8", None, tiles=False).packings(WIDTHS)
    assert eight == WIDTHS and len({*eight.values(), *WIDTHS.values()}) == len(WIDTHS)


def test_card() -> None:
    assert read_activation_kl(None) is None
    assert read_activation_kl(Fields({"card": {"perplexity": 1}}, "mycli.json")) is None
    assert read_activation_kl(Fields({"card": {"activations": None}}, "mycli.json")) is None
    assert read_activation_kl(Fields({"card": {"activations": LITTLE.record}}, "mycli.json")) == LITTLE
    with pytest.raises(ModelError, match="card: activations: 8 must be a number"):
        read_activation_kl(Fields({"card": {"activations": {"16": 1, "8": "x"}}}, "mycli.json"))


def test_a_file_without_a_card_has_a_limit_of_its_own() -> None:
    assert choose_by_file(None) is UNMEASURED_FILE and UNMEASURED_FILE.bits == 16
    below, at = choose_by_file(MAX_MOVED_KL * 0.99), choose_by_file(MAX_MOVED_KL)
    assert (below.bits, at.bits) == (8, 16) and below.reason.code == "activations-move"
    assert {packing.activations for packing in below.packings(WIDTHS).values()} == {8}, "of all widths"
    assert at.packings(WIDTHS) is WIDTHS


def test_the_added_share_is_relative() -> None:
    assert ActivationKl(0.5, 0.75).added == 0.5 and ActivationKl(0.5, 0.25).added == -0.5
