"""Test the fused pass against the plain model in the interpreter, its number of kernels, and what it declines."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import PACKED, KVCache
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import padded_sequences
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import RoutingSpec, SharedExpertSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec, NormSpec
from mycli.runtime.quantization.low_rank import LowRankMatmul, LowRankUpdate
from tests.support.fused_launches import launches_of_layer
from tests.support.random_tensors import generator
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine.passes.fused import FusedStep  # noqa: E402  (only where Triton is)
from mycli.runtime.engine.passes.fused_models import decline_config  # noqa: E402  (as above)
from mycli.runtime.kernels.triton.product.matmul import TritonMatmul  # noqa: E402  (as above)
from tests.support.decode_models import (
    CAPACITY,
    CASES,
    CONFIG,
    FAMILIES,
    MIXED,
    PADDED,
    TABLES,
    WIDE,
    Case,
    config_of,
    models,
)  # noqa: E402  (as above)
from tests.support.grids import chosen  # noqa: E402  (as above)
from tests.support.triton_products import difference  # noqa: E402  (as above)

__all__ = ["interpret"]

PREFIX = 70
NORM = NormSpec("norm", 128, 1e-5)


def linears(model: Transformer) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def compare(case: Case) -> tuple[float, float, dict[str, int]]:
    """Return the errors of logits and cache, and the number of launches."""
    import triton

    fused, plain = models(case)
    config = plain.config
    tokens = torch.randint(0, config.vocab_size, (case.sequences, PREFIX + case.new), generator=generator(1))
    kind = torch.int8 if case.int8 else PACKED if case.int4 else torch.float16
    block = min(case.block, CAPACITY) if CAPACITY % case.block == 0 else CAPACITY
    pages, size = CAPACITY // block, case.sequences
    windows = 0 if config.longest_window is None else size * pages + 1
    caches = [KVCache(config, size * pages, block, plain.device, kind, window_blocks=windows) for _ in range(2)]
    tables_of = [list(reversed(range(place, size * pages, size))) for place in range(size)]  # blocks in shuffled order
    windows_of = [tuple(place + 1 for place in table[::-1]) if windows else None for table in tables_of]
    rope = Rope(config, CAPACITY, plain.device, torch.float16)

    hidden = list[torch.Tensor]()

    def run(cache: KVCache, start: int, rows: torch.Tensor, logits: int) -> torch.Tensor:
        chunks = [
            Chunk(row, start, tuple(tables_of[place]), logits, window_blocks=windows_of[place])
            for place, row in enumerate(rows.tolist())
        ]
        found: torch.Tensor = plain(Batch.of(chunks, block, plain.device), rope, cache, hidden.append)
        return found

    for cache in caches:
        run(cache, 0, tokens[:, :PREFIX], 0)
    new = tokens[:, PREFIX:]
    expected = run(caches[0], PREFIX, new, case.new).view(case.sequences, case.new, -1)
    step = FusedStep.compile(fused)
    padded = padded_sequences(case.sequences)
    assert isinstance(step, FusedStep) and padded is not None and step.takes(padded, case.new + case.padding)
    rows = case.new + case.padding
    inputs = StepInput.zeros(padded, rows, pages, plain.device, case.padding > 0, hidden=True, windowed=windows > 0)
    last_chunks = [
        Chunk(row, PREFIX, tuple(tables_of[place]), 1, window_blocks=windows_of[place])
        for place, row in enumerate(new.tolist())
    ]
    inputs.fill(last_chunks)
    counts: Counter[str] = Counter()
    launch = triton.runtime.interpreter.GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        counts[self.fn.__name__] += 1
        return launch(self, *arguments, **options)

    triton.runtime.interpreter.GridExecutor.__call__ = counted
    try:
        found = step(inputs, rope, caches[1], last=False)[:size]
        last = step(inputs, rope, caches[1], last=True)[:size]
    finally:
        triton.runtime.interpreter.GridExecutor.__call__ = launch
    assert not step._counters.any(), "a captured pass could not be replayed"
    found = found[:, : case.new]
    assert inputs.hidden is not None and inputs.hidden.rows is not None
    ours = inputs.hidden.rows[:size, : case.new]
    assert difference(ours, hidden[-1].view(ours.shape)) < 1e-2, "hidden states"
    assert torch.equal(last[:, 0], found[:, -1]) or not case.packed_head, "the same bits again"
    worst = 0.0
    for layer in range(config.layers):
        for ours, theirs in zip(caches[1].all(layer), caches[0].all(layer), strict=True):
            worst = max(worst, difference(ours.dense(torch.float16), theirs.dense(torch.float16)))
    return difference(found, expected), worst, {name: count // 2 for name, count in counts.items()}


# Without cases that others include, single-token cases, packed heads and plain int8 caches.
QUICK = [
    *CASES[2:5],
    *CASES[6:],
    MIXED[1],
    MIXED[4],
    FAMILIES[0],
    FAMILIES[4],
    FAMILIES[6],
    FAMILIES[-3],
    PADDED[0],
]


def launches_of(case: Case) -> dict[str, int]:
    """Return the number of launches of each kernel in a pass, independent of the route."""
    expected = Counter({"embed_kernel": 1, "multiply_kernel": int(case.packed_head)})
    rows = (padded_sequences(case.sequences) or 0) * (case.new + case.padding)
    for spec in config_of(case).layer_specs:
        layer = launches_of_layer(spec, rows)
        dense = sum(case.dense in linears[0].name for linears in spec.products().values()) if case.dense else 0
        layer.update({"multiply_kernel": -dense, "dense_kernel": dense})
        layer["embed_kernel"] += int("shared_expert." in (case.eight, case.dense))  # its operand
        expected.update(layer)
    return dict(+expected)


@pytest.mark.parametrize("case", chosen([*CASES, *WIDE, *TABLES, *MIXED, *FAMILIES, *PADDED], QUICK), ids=str)
def test_a_pass_is_the_plain_models(case: Case, interpret: Interpret) -> None:
    logits, cache, launches = interpret(compare, case)  # type: ignore[misc]  # the pool carries any result
    # A value rounded differently before storing can be off by one code: a step of 1/127, or of 1/8.
    assert logits < 1e-2 and cache < (2e-2 if case.int4 or case.int8 else 5e-3)
    launches.pop("reduce_kernel", None)
    assert launches == launches_of(case), "launches a token"


def early(case: Case) -> set[tuple[str, bool, bool]]:
    """Return per kernel, on a chip where launches overlap: name, whether launched early, whether all programs wait."""
    import triton

    from mycli.runtime.kernels.triton import attention_kernel, mixture, residual, routing, split_k
    from mycli.runtime.kernels.triton.product import gemm

    fused, plain = models(case, chip=Chip((9, 0), 4, pdl=True))
    cache = KVCache(plain.config, 1, CAPACITY, plain.device, torch.float16)
    rope = Rope(plain.config, CAPACITY, plain.device, torch.float16)
    step = FusedStep.compile(fused)
    assert isinstance(step, FusedStep)
    waits, seen, first = Counter[str](), set(), [False]
    launch = triton.runtime.interpreter.GridExecutor.__call__

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        waits.clear()
        if self.fn.__name__ == "attend_kernel":
            assert not first[-1], "attention loads lengths before its wait, so the launch before it waits first"
        first.append(options.get("NEXT_FIRST", False))
        launch(self, *arguments, **options)
        programs = torch.Size(self.grid).numel()
        seen.add((self.fn.__name__, options.get("launch_pdl", False), waits["pdl_wait"] == programs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.interpreter.GridExecutor, "__call__", watched)
        patch.setattr(gemm, "prefetch_weights", lambda *_: None)  # the interpreter does not run PTX
        patch.setattr(attention_kernel, "prefetch_run", lambda *_: None)
        for module in (attention_kernel, residual, gemm, split_k, mixture, routing):
            patch.setattr(module, "pdl_wait", lambda *_: waits.update(["pdl_wait"]))
        inputs = StepInput.zeros(1, 1, 1, plain.device)
        inputs.fill([Chunk([0], 0, (0,), 1)])
        step(inputs, rope, cache, last=True)
    assert any(first)
    return seen


@pytest.mark.parametrize("case", [Case(packed_head=True), replace(MIXED[0], packed_head=True)], ids=str)
def test_launches_that_begin_early_wait(case: Case, interpret: Interpret) -> None:
    waiting = {(name, True, True) for name in launches_of(case)}
    assert interpret(early, case) in (waiting, waiting | {("reduce_kernel", False, False)})


def adapt(linear: Linear) -> None:
    """Compute an adapter next to the weight of `linear`."""
    assert linear.matmul is not None
    update = LowRankUpdate(torch.ones(2, linear.in_features), torch.ones(linear.out_features, 2), 1.0)
    rows = slice(0, linear.out_features)
    linear.replace(LowRankMatmul(linear.matmul, [(rows, update)], DenseMatmul, torch.float16))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda model: next(model.layers()).products["down"].replace(torch.zeros(128, 40).half()),
            "dense-product-shape",
        ),
        (lambda model: next(model.layers()).products["down"].replace(None), "not-one-product"),
        (lambda model: adapt(next(model.layers()).products["down"]), "adapted-product"),
        (lambda model: [linear.replace(torch.zeros(1, 128).half()) for linear in linears(model)], "no-packed-product"),
        (lambda model: setattr(model, "embedding", model.embedding.float()), "float32"),
    ],
    ids=["columns", "none", "adapter", "dense", "fp32"],
)
def test_says_what_it_cannot_do(spoil: Callable[[Transformer], None], reason: str) -> None:
    fused, _ = models(Case())
    assert isinstance(FusedStep.compile(fused), FusedStep)
    spoil(fused)
    assert reason in str(FusedStep.compile(fused))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"shared": SharedExpertSpec(MlpSpec(32, NORM, (), LinearSpec("shared", 128, 32)))}, "shared-expert-norms"),
        ({"routing": RoutingSpec(2, normalize=True, scoring="sparse_mixer")}, "routing-kind"),
        ({"expert_scales": "scales"}, "router-bias"),
        ({"expert_output_norm": NORM}, "expert-norms"),
        ({"norm": None}, "no-input-norm"),
        ({"output_norm": NORM}, "output-norm"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_says_what_of_experts_it_does_not_do(changed: dict[str, Any], reason: str) -> None:
    """Change one property of a supported expert layer and check the reason for declining."""
    config = replace(CONFIG, build_layer=MIXED[0].experts)
    assert decline_config(config) is None

    def declare(config: ModelConfig, index: int) -> LayerSpec:
        layer = MIXED[0].experts(config, index)
        return replace(layer, mlp=replace(layer.mlp, **changed))

    assert reason in str(decline_config(replace(config, build_layer=declare)))


def test_an_int4_cache_needs_heads_that_are_rotated_whole_or_not_at_all() -> None:
    assert decline_config(CONFIG, "int4") is None
    partial = config_of(Case({"partial_rotary_factor": 0.5}, family="GLM-4-9B-0414"))
    assert decline_config(partial) is None and "int4-partial-rotation" in str(decline_config(partial, "int4"))
    some = config_of(Case({"no_rope_layers": [1, 0]}, family="SmolLM3-3B"))
    assert decline_config(some, "int4") is None


def test_a_scale_of_queries_that_are_not_rotated_is_the_plain_models() -> None:
    """The table of such a layer, as in Llama 4, is that of a rotation of no dimensions."""

    def declare(config: ModelConfig, index: int) -> LayerSpec:
        layer = CONFIG.build_layer(config, index)
        assert layer.attention.rope is not None
        return replace(layer, mixer=replace(layer.attention, rope=replace(layer.attention.rope, dim=0)))

    assert decline_config(replace(CONFIG, build_layer=declare)) == Declined("query-scale")


def test_experts_that_are_not_all_there_or_unlike_are_the_plain_models() -> None:
    for spoil, reason in (
        (lambda mlp: mlp.router.replace(mlp.products[0].matmul), "packed-router"),
        (lambda mlp: mlp.products[3].replace(torch.zeros(128, 64)), "mixed-experts"),
    ):
        fused, _ = models(MIXED[2])
        assert isinstance(FusedStep.compile(fused), FusedStep)
        spoil(next(fused.layers()).mlp)
        assert reason in str(FusedStep.compile(fused))


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables_of_integers_take_the_fused_pass_in_4_bits(case: Case) -> None:
    fused, _ = models(case)
    assert isinstance(FusedStep.compile(fused), FusedStep)
    products = [linear.matmul for linear in linears(fused) if isinstance(linear.matmul, TritonMatmul)]
    assert {(product.packing.codes, product.bits) for product in products} == {(case.codes, 4)}


def test_takes_few_tokens() -> None:
    fused, _ = models(Case())
    step = FusedStep.compile(fused)
    assert isinstance(step, FusedStep)
    assert step.takes(1, 64) and step.takes(256, 1) and step.takes(4, 3) and not step.takes(16, 17)
    wide, _ = models(Case({"heads": 16, "kv_heads": 1}))
    step = FusedStep.compile(wide)
    assert isinstance(step, FusedStep)
    assert step.takes(8, 1) and step.takes(1, 5), "queries that no program has columns for are split"
    crowded, _ = models(Case({"heads": 65, "kv_heads": 1}))
    step = FusedStep.compile(crowded)
    assert isinstance(step, FusedStep) and not step.takes(1, 1)
