"""A layer's experts by our own code on the CPU, whole: what they are made of, and which it takes.

Knows modules and structures; whether all experts are in memory is told by who makes them ready.
"""

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass

from torch import Tensor

from mycli.runtime.kernels.cpu.experts import DENSE_WEIGHTS, PACKED_WEIGHTS, TABLE_WEIGHTS, c_choice
from mycli.runtime.kernels.cpu.layer import CExpertProduct, CExpertsPart, CFeedForward, CLinear, Fetch
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.native.parts import feed, gate_type
from mycli.runtime.layers.native.tensors import Around, NotNative, bias_address, c_linear, c_norm, c_residual, vectors
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.models.experts_spec import ExpertsSpec


@dataclass(frozen=True)
class ExpertModules:
    """What a layer's experts are made of; `shared`: gate and up, and down, of one that all tokens go through.

    `norms`: in the order of `ExpertsSpec.inner_norms`, that of a shared expert or None; `scales` and
    `correction`: fp32 [experts]; `fetch`: what makes experts ready, where not all are in memory.
    """

    norms: tuple[RMSNorm | None, ...]
    router: Linear
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    shared: tuple[Linear, Linear] | None
    shared_gate: Linear | None
    scales: Tensor | None
    correction: Tensor | None
    fetch: Fetch | None = None


@dataclass(frozen=True)
class _Operand:
    """Where the weights of an expert lie, and its bias; in `form` experts of one product must be alike."""

    address: int
    bias: int | None
    stored: int
    outputs: int
    inputs: int
    form: object


def _operand(linear: Linear) -> _Operand:
    matmul, bias = linear.matmul, bias_address(linear)
    if isinstance(matmul, TableMatmul):
        return _Operand(matmul.address, bias, TABLE_WEIGHTS, *matmul.shape, (TABLE_WEIGHTS, matmul.form, bias is None))
    found = c_linear(linear)
    if found.count > 1:
        raise NotNative("takes experts whose products have one part")
    (first, *_), packed = found.parts, isinstance(matmul, CpuMatmul)
    form = matmul.form if isinstance(matmul, CpuMatmul) else (first.outputs, first.inputs)
    stored, address = (PACKED_WEIGHTS, first.packed) if packed else (DENSE_WEIGHTS, first.dense)
    return _Operand(address, bias, stored, first.outputs, first.inputs, (stored, form, bias is None))


def put_expert(product: CExpertProduct, expert: int, linear: Linear) -> None:
    """Have `product` multiply by what `linear` does, for one expert. Raises NotNative."""
    _put(product, expert, _operand(linear))


def _put(product: CExpertProduct, expert: int, found: _Operand) -> None:
    product.weights[expert], product.biases[expert] = found.address, found.bias


def _product(linears: Sequence[Linear], fetched: bool) -> CExpertProduct:
    """Of all that are in memory; of others too where they are `fetched`, and alike."""
    there = [expert for expert, linear in enumerate(linears) if linear.matmuls or not fetched]
    found = [_operand(linears[expert]) for expert in there]
    if len({each.form for each in found}) > 1:
        raise NotNative("takes experts of one shape and group, all with a bias or none")
    first = found[0]
    weights, biases = ((c_void_p * len(linears))() for _ in range(2))
    product = CExpertProduct(weights, biases, first.outputs, first.inputs, first.stored)
    for expert, each in zip(there, found, strict=True):
        _put(product, expert, each)
    return product


def experts_part(spec: ExpertsSpec, around: Around, own: ExpertModules) -> CExpertsPart:
    """Experts as experts_part.h has them. Raises NotNative."""
    part = CExpertsPart(
        c_norm(around.norm),
        *(c_norm(norm) for norm in own.norms),
        c_linear(own.router),
        _product(own.gate_up, own.fetch is not None),
        _product(own.down, own.fetch is not None),
        CFeedForward() if spec.shared is None or own.shared is None else feed(spec.shared.mlp, *own.shared),
        CLinear() if own.shared_gate is None else c_linear(own.shared_gate),
        c_residual(around),
        None if own.scales is None else own.scales.data_ptr(),
        c_choice(spec.routing, own.correction),
        len(spec.experts),
        vectors(spec.size, "an expert"),
        gate_type(spec),
    )
    if own.fetch is not None:
        part.fetch, part.fetcher = own.fetch.function, own.fetch
    return part
