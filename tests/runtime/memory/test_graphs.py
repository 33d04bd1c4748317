"""Test which shapes of captured passes have graphs, that every pass is padded to one of them, and what they hold."""

from dataclasses import replace

import pytest

from mycli.runtime.memory.estimate import captured_bytes, estimate
from mycli.runtime.memory.graphs import (
    DRAFT_ROWS,
    MOST_GRAPHS,
    TOKEN_BUCKETS,
    decode_shapes,
    padded_sequences,
    padded_tokens,
)
from mycli.runtime.quantization.scheme import Packing
from tests.support.published import plan, published

INT4 = Packing(4, 128)


def test_captured_passes_are_padded_to_powers_of_two() -> None:
    for count in range(1, 257):
        power = 1 << (count - 1).bit_length()
        assert padded_sequences(count) == power
        assert padded_tokens((1, count), drafts=False) == (max(power, 8), True) or count == 1
    assert padded_sequences(257) is None and padded_tokens((1, 257), drafts=False) == (384, True)


def test_drafts_of_several_sequences_are_padded_to_few_shapes_that_all_have_graphs() -> None:
    counts = [(first, second) for first in range(1, DRAFT_ROWS + 1) for second in range(1, DRAFT_ROWS + 1)]
    padded = {padded_tokens(pair, drafts=True) for pair in counts}
    assert padded == {(1, False), (2, True), (4, True), (8, True)}
    assert [padded_tokens((count,), drafts=True) for count in (1, 3, 8, 9)] == [
        (1, False),
        (3, False),
        (8, False),
        (16, True),
    ]
    for sequences in (1, 5, 256):
        shapes = decode_shapes(sequences, True)
        assert len({*shapes}) == len(shapes) and max(rows * new for rows, new in shapes) <= 256
        assert len(shapes) + len(TOKEN_BUCKETS) <= MOST_GRAPHS
        assert set(decode_shapes(sequences, False)) <= set(shapes)


def test_captured_passes_hold_their_logits_and_share_a_pool() -> None:
    """The sizes are written out for Llama-3.1-8B: logits of 128,256 bf16; the pool fits the widest pass.

    That is a prompt of 256 tokens with logits of one row, or a decode pass that also samples. Six lengths of prompts
    are captured, and in a pool of their own four longer ones.
    """
    one = plan("Llama-3.1-8B", INT4, gpu=True)
    row, values = 128256 * 2, (2 * 4096 + 4 * 14336 + 4096) * 2
    parts = 12 << 20  # of one wave of programs, less than gate and up have
    prompt, longer = 256 * values + row, 1024 * values + 4 * row
    parts += longer
    assert captured_bytes(one) == (1 + 6) * row + prompt + parts
    assert captured_bytes(replace(one, batch=3)) == (1 + 2 + 4 + 6) * row + prompt + parts, "padded to 4"
    assert captured_bytes(replace(one, batch=2, running=3)) == captured_bytes(replace(one, batch=3))
    many = captured_bytes(replace(one, batch=100))
    assert many == (255 + 6) * row + 128 * (values + row) + parts
    most = captured_bytes(replace(one, batch=300))
    assert most == (511 + 6) * row + 256 * (values + row) + parts, "of at most 256 rows"
    drafted, alone = replace(one, draft=plan("Llama-3.2-1B")), sum(range(2, 9))
    assert captured_bytes(drafted) == (1 + alone + 6) * row + prompt + parts
    several = (256 - 2) * 2 + (128 - 2) * 4 + (64 - 2) * 8
    assert (
        captured_bytes(replace(drafted, batch=256)) == (511 + alone + several + 6) * row + 256 * (values + row) + parts
    )
    ngrams = replace(one, drafts_without_model=True)
    assert captured_bytes(ngrams) == captured_bytes(drafted), "so are drafts without a model"
    head = replace(drafted, draft=replace(one, config=replace(one.config, is_mtp=True)))
    rows = 1 + alone + sum((8, 16, 32, 64, 128, 256))
    assert captured_bytes(head) == captured_bytes(drafted) - longer + rows * 4096 * 2, "hidden states of short prompts"
    assert captured_bytes(replace(one, kv="int4")) == captured_bytes(one)
    odd = replace(one, kv="int4", config=replace(one.config, head_dim=96))
    for without in (replace(one, gpu=False), odd):
        assert captured_bytes(without) == 0
    dense = plan("Llama-3.1-8B", gpu=True)
    assert captured_bytes(dense) == (1 + 6) * row + prompt + longer, "by the captured plain pass, without partial sums"
    assert estimate(one).workspace.graphs == captured_bytes(one)


def test_captured_passes_hold_the_partial_sums_of_experts() -> None:
    """The sizes are written out for Qwen3-30B-A3B: 8 of 128 experts per token, whose products are one launch."""
    one = plan("Qwen3-30B-A3B", INT4, gpu=True)
    row = 151936 * 2
    values = (2 * 2048 + 2 * 128 + 8 * (768 + 2048) + 2048) * 2
    longer = 1024 * values + 4 * row
    prompt, experts = 256 * values + row, (12 << 20) + longer
    assert captured_bytes(one) == (1 + 6) * row + prompt + experts
    drafted = replace(one, draft=plan("Qwen3-0.6B"))
    assert captured_bytes(drafted) == (1 + sum(range(2, 9)) + 6) * row + prompt + experts
    assert captured_bytes(replace(one, batch=16)) == (31 + 6) * row + prompt + experts
    assert captured_bytes(replace(one, batch=17)) == (63 + 6) * row + prompt + experts


def test_partial_sums_are_at_most_those_of_the_largest_weight() -> None:
    small, dense = (plan("SmolLM2-135M", packing, gpu=True) for packing in (Packing(4, 64), None))
    assert captured_bytes(small) - captured_bytes(dense) == Packing(4, 64).bytes(2 * 1536, 576), "gate and up"


def test_captured_passes_of_layers_that_differ() -> None:
    """The largest layer of Nemotron-H is an MLP; some of Kimi Linear have latents, which no kernel reads in int4."""
    row, values = 131072 * 2, (2 * 4096 + 4 * 21504 + 4096) * 2
    assert captured_bytes(plan("Nemotron-H-8B", gpu=True)) == (1 + 6 + 1 + 4) * row + (256 + 1024) * values
    latent = plan("Kimi-Linear-48B", gpu=True)
    assert captured_bytes(replace(latent, kv="int4")) == 0 < captured_bytes(latent)


@pytest.mark.parametrize(("running", "rows", "logits"), [(1, 8, 35), (4, 32, 35 + 2 * 6 + 4 * 6 + 8 * 6)])
def test_drafts_of_recurrent_models_hold_what_advances_their_states(running: int, rows: int, logits: int) -> None:
    """24 of 32 layers of Qwen3.5-9B have states; a token advances them by 8192 + 4096 projected values and 2 x 32."""
    with_drafts = replace(plan("Qwen3.5-9B", gpu=True), running=running, drafts_without_model=True)
    more = captured_bytes(with_drafts) - captured_bytes(replace(with_drafts, drafts_without_model=False))
    assert more == logits * 248320 * 2 + rows * 24 * (8192 + 4096 + 2 * 32) * 2


@pytest.mark.parametrize("name", ["Qwen3.5-9B", "Kimi-Linear-48B", "LFM2-1.2B", "Bamba-9B", "Falcon-H1-7B"])
def test_values_that_drafts_hold_are_part_of_a_pass(name: str) -> None:
    specs = [spec.recurrent for spec in published(name).layer_specs if spec.recurrent is not None]
    assert specs and all(0 < spec.draft_values() < spec.forward_values() for spec in specs)
