"""Test interleaved and partial rotary embeddings against complex numbers, and which tables a pass may reuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.layers.rope import Rope, frequencies, rotate
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import RopeKind, RopeScaling, RopeSpec
from tests.support.published import published

CPU = torch.device("cpu")


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by angles [tokens, dim / 2], each pair as a complex number."""
    dim = 2 * angles.shape[1]
    out = x.double().clone()
    for token in range(x.shape[0]):
        for pair in range(dim // 2):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
            number = torch.complex(out[token, :, first], out[token, :, second])
            number = number * torch.exp(1j * angles[token, pair].double())
            out[token, :, first], out[token, :, second] = number.real, number.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("dim", [16, 12, 2], ids=lambda dim: f"turned{dim}of16")
def test_queries_and_keys_meet_as_they_should(dim: int, interleaved: bool) -> None:
    """Compare dot products only: pairs may be in another order if queries and keys agree."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 5, 3, 16, generator=generator) for _ in range(2))
    angles = torch.rand(5, dim // 2, generator=generator) * 6
    ours = [rotate(x, angles.cos(), angles.sin(), interleaved)[0].double() for x in (query, key)]
    theirs = [turned(x[0], angles, interleaved) for x in (query, key)]
    found, expected = (torch.einsum("ihd,jhd->hij", *pair) for pair in (ours, theirs))
    assert (found - expected).abs().max() < 1e-5
    if not interleaved:
        assert (ours[0] - theirs[0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Llama-3.1-8B", 1),
        ("Phi-4-mini", 1),
        ("gemma-3-4b", 2),
        ("gemma-4-E2B", 2),
        ("GLM-4-9B-0414", 1),
        ("Ministral-3-3B", 1),
    ],
    ids=str,
)
def test_tables_of_published_models(name: str, kinds: int) -> None:
    config: ModelConfig = published(name)
    rope = Rope(config, 32, CPU, torch.float32)
    assert len(rope.tables(3, 4)) == kinds
    every = rope.every(32)
    assert every is not None and set(every) == set(rope.tables(3, 4))
    for spec, tables in rope.tables(3, 4).items():
        assert tables.cos.shape == (4, spec.dim // 2)


@pytest.mark.parametrize("kind", ["none", "dynamic"])
def test_tables_are_computed_once_up_to_the_end_of_the_cache(kind: str) -> None:
    """With dynamic scaling they depend on the length of a sequence past the trained context."""
    config = published("Phi-3.5-mini")
    scaling = RopeScaling("dynamic", 4.0, 16) if kind == "dynamic" else RopeScaling()
    rope = Rope(replace(config, rope_scaling=scaling), 32, CPU, torch.float32)
    fixed = 16 if kind == "dynamic" else 32
    whole = rope.every(fixed)
    assert whole is not None
    ((spec, tables),) = whole.items()
    assert rope.tables(fixed - 3, 3)[spec].cos.data_ptr() == tables.cos[fixed - 3 :].data_ptr()
    if kind == "dynamic":
        assert rope.every(17) is None
        assert not torch.equal(rope.tables(14, 3)[spec].cos[:2], tables.cos[14:])


def test_the_short_factors_are_those_of_a_short_context() -> None:
    """The text length so far does not matter: keys keep their rotation."""
    from dataclasses import replace

    from mycli.runtime.models.part_spec import RopeScaling

    pairs = 64
    scaling = RopeScaling("longrope", 4.0, 16, short_factors=(1.0,) * pairs, long_factors=(2.0,) * pairs)
    config = replace(published("Phi-3.5-mini"), rope_scaling=scaling, rotary_dim=2 * pairs, head_dim=2 * pairs)
    short, long = (Rope(config, capacity, CPU, torch.float64) for capacity in (16, 17))
    (near,), (far,) = short.tables(2, 1).values(), long.tables(1, 1).values()
    assert not torch.allclose(near.cos, far.cos)
    (twice,) = long.tables(4, 1).values()
    assert torch.allclose(near.cos, twice.cos), "twice the position at half the frequency"


def test_frequencies_of_llama3_are_blended_between_two_wavelengths() -> None:
    """Below a wavelength of 8192 / 4 they stay, above 8192 they are divided by 8."""
    spec = RopeSpec(500_000.0, 128, RopeScaling())
    plain = frequencies(spec, 1, 1, CPU)
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    share = plain / frequencies(replace(spec, scaling=scaling), 1, 1, CPU)
    lengths = 2 * torch.pi / plain
    assert torch.allclose(share[lengths < 2048], torch.tensor(1.0)) and torch.allclose(
        share[lengths > 8192], torch.tensor(8.0)
    )
    between = (lengths > 2048) & (lengths < 8192)
    smooth = (8192 / lengths[between] - 1) / 3
    assert between.any() and torch.allclose(1 / share[between], smooth + (1 - smooth) / 8)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """Pair 20 turns 32 times or more within 4,096 tokens, pair 46 at most once; between them the share is linear."""
    spec = RopeSpec(10_000.0, 128, RopeScaling("yarn", factor=4.0, original_context=4096))
    pair = torch.arange(64, dtype=torch.float64)
    plain = 10_000.0 ** (-pair / 64)
    share = ((pair - 20) / 26).clamp(0, 1)
    expected = plain / 4 * share + plain * (1 - share)
    torch.testing.assert_close(frequencies(spec, 1, 1, CPU).double(), expected, rtol=1e-5, atol=0)


PAIRS = 32
SHORT, LONG_FACTORS = [1.0 + 0.01 * pair for pair in range(PAIRS)], [2.0 + 0.1 * pair for pair in range(PAIRS)]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("llama3", {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}),  # Llama 4 Scout
        ("yarn", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "beta_fast": 900.0, "beta_slow": 0.01, "truncate": False}),
        ("yarn", {"factor": 4.0, "beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}),
        ("yarn", {"factor": 4.0, "beta_fast": 40000.0, "beta_slow": 1e-7}),
        ("longrope", {"factor": 4.0, "short_factor": SHORT, "long_factor": LONG_FACTORS}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("length", [512, 1024, 1025, 3000])
def test_frequencies_are_those_of_transformers(kind: RopeKind, fields: dict[str, Any], length: int) -> None:
    context, theta = 1024, 10_000.0
    dims = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2 * PAIRS}
    theirs = LlamaConfig(
        **dims,
        max_position_embeddings=context if kind == "dynamic" else 4 * context,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": theta,
            "original_max_position_embeddings": context,
            **fields,
        },
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, CPU, seq_len=length)
    names = {"short_factor": "short_factors", "long_factor": "long_factors"}
    scaling = RopeScaling(
        kind,
        original_context=context,
        attention_factor=factor,
        **{names.get(key, key): tuple(value) if isinstance(value, list) else value for key, value in fields.items()},
    )
    found = frequencies(RopeSpec(theta, 2 * PAIRS, scaling), length, length, CPU)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


def test_a_share_of_the_pairs_rotates_where_the_others_stand_still() -> None:
    plain = frequencies(RopeSpec(1e6, 64, RopeScaling()), 1, 1, CPU)
    found = frequencies(RopeSpec(1e6, 64, RopeScaling("proportional", 2.0, partial_factor=0.25)), 1, 1, CPU)
    assert torch.equal(found[:8], plain[:8] / 2) and not found[8:].any()


def test_tables_have_the_factors_of_their_rule() -> None:
    """Attention factor, clockwise rotation, and the factor of queries (Llama 4)."""
    scaling = RopeScaling(original_context=8, attention_factor=1.5, query_beta=0.1, query_offset=1)
    config = replace(published("Llama-3.1-8B"), rope_scaling=scaling)
    (spec,) = config.distinct_ropes
    rope = Rope(config, 32, CPU, torch.float32)
    (tables,) = rope.tables(5, 12).values()
    positions = torch.arange(5, 17)
    angles = positions[:, None] * frequencies(spec, 1, 1, CPU)
    torch.testing.assert_close(tables.cos, 1.5 * angles.cos(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tables.sin, 1.5 * angles.sin(), rtol=1e-5, atol=1e-5)
    steps = torch.tensor([(position + 1) // 8 for position in range(5, 17)])
    assert tables.query_scale is not None
    torch.testing.assert_close(tables.query_scale, 1 + 0.1 * torch.log(1.0 + steps))
    turned_back = rope._table(replace(spec, clockwise=True), 17)
    assert torch.equal(turned_back.sin[5:], -tables.sin) and torch.equal(turned_back.cos[5:], tables.cos)
    (both,) = rope.rows([Chunk([1] * 3, 2, (0,), 0), Chunk([1] * 2, 9, (1,), 0)]).values()
    assert torch.equal(both.cos, torch.cat((rope.tables(2, 3)[spec].cos, rope.tables(9, 2)[spec].cos)))
    assert both.query_scale is not None and both.query_scale.shape == (5,)


def test_dynamic_tables_of_exactly_the_trained_context_are_those_that_all_share() -> None:
    config = replace(published("Phi-3.5-mini"), rope_scaling=RopeScaling("dynamic", 4.0, 16))
    rope = Rope(config, 32, CPU, torch.float32)
    ((spec, tables),) = rope.tables(13, 3).items()
    shared = rope.every(16)
    assert shared is not None and tables.cos.data_ptr() == shared[spec].cos[13:].data_ptr()
    (longer,) = rope.tables(13, 4).values()
    angles = torch.arange(13, 17)[:, None] * frequencies(spec, 17, 32, CPU)
    torch.testing.assert_close(longer.cos, angles.cos())
