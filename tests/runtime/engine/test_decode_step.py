"""The fused pass against the plain model, in the interpreter; how many kernels it launches; what it does not take."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import StaticCache
from mycli.runtime.kernels.triton.linear import TritonMatmul
from mycli.runtime.kernels.triton.tiles import Chip
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import ModelConfig, RopeScaling
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support.random_tensors import generator
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine.decode_step import DecodeStep  # noqa: E402  (only where Triton is)

__all__ = ["interpret"]

CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=160,
    vocab_size=72,
    max_context=256,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope=RopeScaling(),
    tie_embeddings=False,
    dtype="float16",
)
CAPACITY, PREFIX = 96, 70
# No powers of two, but for the layers.
SEVEN = {"layers": 1, "hidden_size": 224, "heads": 7, "kv_heads": 1, "head_dim": 32, "intermediate_size": 352}
LAYER = {"multiply_kernel": 4, "attend_kernel": 1}  # launches


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any] = field(default_factory=dict)
    bits: int = 4
    packed_head: bool = False
    sequences: int = 1
    new: int = 1
    int8: bool = False
    bias: bool = False

    def __str__(self) -> str:
        options = "-".join(f"{key}{value}" for key, value in self.changes.items())
        flags = "-head" * self.packed_head + "-int8kv" * self.int8 + "-bias" * self.bias
        return f"int{self.bits}-{self.sequences}x{self.new}{flags}-{options}"


def packed(rows: int, columns: int, bits: int, generator: torch.Generator) -> PackedWeight:
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, columns // 32, generator=generator) * columns**-0.5 * 2 ** (3 - bits) + 1e-3
    return PackedWeight(pack(codes, bits), scales.half(), Packing(bits, 32), columns)


def models(case: Case, device: str = "cpu", chip: Chip | None = None) -> tuple[Transformer, Transformer]:
    """Of the same weights, multiplied by Triton and dense."""
    config = replace(CONFIG, **case.changes)
    drawing = generator()
    fused, plain = Transformer(config), Transformer(config)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=drawing).half().to(device)
    for model in (fused, plain):
        model.embedding = embedding
    for (_, ours), (_, theirs) in zip(fused.named_modules(), plain.named_modules(), strict=True):
        if isinstance(ours, RMSNorm) and isinstance(theirs, RMSNorm):
            ours.weight = theirs.weight = (
                (1 + 0.2 * torch.randn(ours.weight.shape, generator=drawing)).half().to(device)
            )
        elif isinstance(ours, Linear) and isinstance(theirs, Linear):
            weight = packed(ours.out_features, ours.in_features, case.bits, drawing)
            weight = replace(weight, packed=weight.packed.to(device), scales=weight.scales.to(device))
            theirs.replace(dequantize(weight))
            ours.replace(TritonMatmul(weight, chip or Chip((9, 0), 4)))
            if ours is fused.head and not case.packed_head:
                ours.replace(theirs.weight())
            if case.bias and ours.specs[0].name.endswith("q_proj"):
                ours.bias = theirs.bias = torch.randn(ours.out_features, generator=drawing).half().to(device)
    return fused, plain


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def compare(case: Case) -> tuple[float, float, dict[str, int]]:
    """Of the logits, and of the cache afterwards; launches."""
    import triton

    fused, plain = models(case)
    config = plain.config
    tokens = torch.randint(0, config.vocab_size, (case.sequences, PREFIX + case.new))
    kind = torch.int8 if case.int8 else torch.float16
    caches = [StaticCache(config, CAPACITY, plain.device, kind, case.sequences) for _ in range(2)]
    rope = Rope(config, CAPACITY, plain.device, torch.float16)
    for cache in caches:
        plain(Batch(tokens[:, :PREFIX], 0, "none"), rope, cache)
    new = tokens[:, PREFIX:]
    expected = plain(Batch(new, PREFIX, "all"), rope, caches[0])
    assert expected is not None
    step = DecodeStep.make(fused)
    assert isinstance(step, DecodeStep) and step.takes(case.sequences, case.new)
    tables = rope.fixed(CAPACITY)
    assert tables is not None
    counts: Counter[str] = Counter()
    launch = triton.runtime.interpreter.GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        counts[self.fn.__name__] += 1
        return launch(self, *arguments, **options)

    triton.runtime.interpreter.GridExecutor.__call__ = counted
    try:
        lengths = torch.full((case.sequences,), PREFIX + case.new, dtype=torch.int32)
        found = step(new, lengths, tables, caches[1], last=False)
        last = step(new, lengths, tables, caches[1], last=True)
    finally:
        triton.runtime.interpreter.GridExecutor.__call__ = launch
    assert not step._counters.any(), "a captured pass could not be replayed"
    assert torch.equal(last[:, 0], found[:, -1]) or not case.packed_head, "the same bits again"
    worst = 0.0
    for layer in range(config.layers):
        for ours, theirs in zip(caches[1].all(layer), caches[0].all(layer), strict=True):
            worst = max(worst, difference(ours.dense(torch.float16), theirs.dense(torch.float16)))
    return difference(found, expected), worst, {name: count // 2 for name, count in counts.items()}


CASES = [
    Case(),
    Case(packed_head=True, new=3),
    Case({"qk_norm": True, "heads": 6, "kv_heads": 1}, bits=3),
    Case({"tie_embeddings": True, "hidden_size": 96}, bits=8, bias=True, sequences=2),
    Case({"windows": (20, None), "kv_heads": 4}, new=4, sequences=2),
    Case(int8=True, new=2),
    Case(SEVEN, bias=True, int8=True, new=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_is_the_plain_models(case: Case, interpret: Interpret) -> None:
    logits, cache, launches = interpret(compare, case)  # type: ignore[misc]  # the pool carries any result
    assert logits < 1e-2 and cache < (2e-2 if case.int8 else 5e-3)
    launches.pop("reduce_kernel", None)
    layers = case.changes.get("layers", CONFIG.layers)
    expected = {name: layers * count for name, count in LAYER.items()}
    expected["multiply_kernel"] += case.packed_head
    assert launches == {"embed_kernel": 1} | expected, "launches a token"


def early() -> set[tuple[str, bool, bool]]:
    """Of a pass on a chip where launches overlap: kernel, whether launched so, whether each of its programs waited."""
    import triton

    from mycli.runtime.kernels.triton import attention as triton_attention
    from mycli.runtime.kernels.triton import gemm as triton_matmul
    from mycli.runtime.kernels.triton import residual as triton_residual

    fused, plain = models(Case(packed_head=True), chip=Chip((9, 0), 4, pdl=True))
    cache = StaticCache(plain.config, CAPACITY, plain.device, torch.float16, 1)
    tables = Rope(plain.config, CAPACITY, plain.device, torch.float16).fixed(CAPACITY)
    step = DecodeStep.make(fused)
    assert isinstance(step, DecodeStep) and tables is not None
    waits, seen = Counter[str](), set()
    launch = triton.runtime.interpreter.GridExecutor.__call__

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        waits.clear()
        launch(self, *arguments, **options)
        programs = torch.Size(self.grid).numel()
        seen.add((self.fn.__name__, options.get("launch_pdl", False), waits["pdl_wait"] == programs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.interpreter.GridExecutor, "__call__", watched)
        patch.setattr(triton_matmul, "prefetch_weights", lambda *_: None)  # the interpreter knows no PTX
        for module in (triton_attention, triton_residual, triton_matmul):
            patch.setattr(module, "pdl_wait", lambda: waits.update(["pdl_wait"]))
        step(torch.zeros((1, 1), dtype=torch.int64), torch.ones(1, dtype=torch.int32), tables, cache, last=True)
    return seen


def test_launches_that_begin_early_wait(interpret: Interpret) -> None:
    waiting = {(name, True, True) for name in ("embed_kernel", *LAYER)}
    assert interpret(early) in (waiting, waiting | {("reduce_kernel", False, False)})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda model: setattr(next(model.layers()).products["o"], "bias", torch.zeros(1)), "o_proj has a bias"),
        (
            lambda model: next(model.layers()).products["down"].replace(model.head.matmul),
            "down_proj is not one packed",
        ),
        (lambda model: setattr(model, "embedding", model.embedding.float()), "float32"),
    ],
    ids=["bias", "dense", "fp32"],
)
def test_says_what_it_cannot_do(spoil: Callable[[Transformer], None], reason: str) -> None:
    fused, _ = models(Case())
    assert isinstance(DecodeStep.make(fused), DecodeStep)
    spoil(fused)
    assert reason in str(DecodeStep.make(fused))


def test_takes_few_tokens() -> None:
    fused, _ = models(Case())
    step = DecodeStep.make(fused)
    assert isinstance(step, DecodeStep)
    assert step.takes(1, 8) and step.takes(8, 1) and not step.takes(3, 3)
    wide, _ = models(Case({"heads": 16, "kv_heads": 1}))
    step = DecodeStep.make(wide)
    assert isinstance(step, DecodeStep)
    assert step.takes(8, 1) and step.takes(1, 4) and not step.takes(1, 5)
