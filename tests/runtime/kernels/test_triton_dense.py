"""Test products of 16-bit weights between the packed products of a fused pass, in the interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.triton.product.dense import DenseProduct, decline_dense
from mycli.runtime.kernels.triton.product.tiles import Chip
from tests.support.grids import chosen
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, backwards, interpret

pytest.importorskip("triton")

from tests.support.triton_products import difference  # noqa: E402  (only where Triton is)

__all__ = ["interpret"]

# The interpreter truncates to bf16 where a GPU rounds, at each of a few steps.
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@dataclass(frozen=True)
class Mlp:
    """Describes an MLP over `rows` rows of `size` numbers; large: a stream whose product with the gain is no fp16."""

    rows: int
    size: int
    wide: int
    dtype: torch.dtype = torch.bfloat16
    processors: int = 1
    large: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.rows}x{self.size}x{self.wide}-{kind}-{self.processors}{'-large' * self.large}"


CASES = [
    Mlp(1, 256, 192, processors=16),
    Mlp(3, 96, 160, torch.float16, processors=4),
    Mlp(12, 192, 96, processors=8),
    Mlp(1, 128, 64, torch.float16, large=True),
    Mlp(33, 64, 320, torch.float16),
    Mlp(130, 96, 64),
]
QUICK = [CASES[0], CASES[2], CASES[3]]


def computed(case: Mlp) -> tuple[float, float, bool]:
    """Return the errors of the stream after an MLP, and of a product of its norm, and whether order matters."""
    from mycli.runtime.kernels.triton.gated_silu import activate
    from mycli.runtime.kernels.triton.residual import Norm, add, embed

    chip = Chip((9, 0), case.processors)
    shapes = ((2 * case.wide, case.size), (case.size, case.wide), (48, case.size))
    factor = 300 if case.large else 1
    weights = [normal(*shape, seed=seed) / shape[1] ** 0.5 for seed, shape in enumerate(shapes)]
    weights = [(weights[0] / factor).to(case.dtype), *(weight.to(case.dtype) for weight in weights[1:])]
    gate_up, down, head = (DenseProduct(weight, chip) for weight in weights)
    gains = [(1 + normal(case.size, seed=seed) / 5).to(case.dtype) * factor for seed in (5, 6)]
    embedding = (normal(7, case.size, seed=7) * factor).to(case.dtype)
    tokens = torch.arange(case.rows) % 7

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        counters = torch.zeros(512, dtype=torch.int32)
        stream, x = embed(tokens, embedding, Norm(gains[0], 1e-5, gate_up))
        active = activate(x, gate_up, case.dtype, down, counters)
        normed = add(active, down, stream, Norm(gains[1], 1e-5, head), counters)
        assert normed is not None and not counters.any()
        return stream, head.partial(normed).sum(0)

    stream, found = run()
    with backwards():
        again = run()
    same = torch.equal(stream, again[0]) and torch.equal(found, again[1])
    first = embedding[tokens].double()
    gate, up = (functional.rms_norm(first, (case.size,), gains[0].double(), 1e-5) @ weights[0].double().t()).chunk(
        2, -1
    )
    expected = first + (functional.silu(gate) * up) @ weights[1].double().t()
    normed = functional.rms_norm(stream.double(), (case.size,), gains[1].double(), 1e-5)
    return difference(stream, expected), difference(found, normed @ weights[2].double().t()), same


@pytest.mark.parametrize("case", chosen(CASES, QUICK), ids=str)
def test_an_mlp_of_dense_products(case: Mlp, interpret: Interpret) -> None:
    stream, product, same = interpret(computed, case)  # type: ignore[misc]  # the pool carries any result
    assert stream < TOLERANCE[case.dtype] and product < TOLERANCE[case.dtype] and same


@pytest.mark.parametrize(("columns", "dtype"), [(48, torch.bfloat16), (64, torch.float32)])
def test_other_weights_are_declined(columns: int, dtype: torch.dtype) -> None:
    weight = torch.zeros(16, columns, dtype=dtype)
    assert isinstance(decline_dense(weight), Declined)
    with pytest.raises(ValueError, match=str(columns)):
        DenseProduct(weight, Chip((9, 0), 1))
    assert isinstance(decline_dense(torch.zeros(64, 16).bfloat16().t()), Declined)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33, 256])
def test_tiles_fit_shared_memory(rows: int, capability: tuple[int, int]) -> None:
    chip = Chip(capability, 100)
    tile = DenseProduct(torch.zeros(128, 256, dtype=torch.bfloat16), chip).tile(rows)
    assert tile.stages * 2 * tile.block_k * (tile.block_n + tile.block_m) <= chip.shared
