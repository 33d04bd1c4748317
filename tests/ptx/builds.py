"""List every Triton kernel with its compilation arguments, as the runtime launches it, for `report`.

Needs no GPU. Shapes are those of Llama-3.1-8B where a kernel depends on them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton.language as tl

from mycli.runtime.kernels.triton.attention import BLOCK_K, LEAST_TURNS, attend_stages, attend_warps, combination
from mycli.runtime.kernels.triton.attention_kernel import attend_kernel
from mycli.runtime.kernels.triton.gated_silu import SiluArguments, silu_epilogue
from mycli.runtime.kernels.triton.mixture import combine_kernel, score_kernel
from mycli.runtime.kernels.triton.product import activation as triton_activation
from mycli.runtime.kernels.triton.product import gemm as triton_matmul
from mycli.runtime.kernels.triton.product import tiles as triton_tiles
from mycli.runtime.kernels.triton.product.activation import Operand
from mycli.runtime.kernels.triton.product.grouped import Routed
from mycli.runtime.kernels.triton.product.matmul import constants, dequantize_warps
from mycli.runtime.kernels.triton.product.tiles import Chip, Tile
from mycli.runtime.kernels.triton.product.weight_layout import layout_of, tile_k, unpacked_k
from mycli.runtime.kernels.triton.product_sum import SumArguments, sum_epilogue
from mycli.runtime.kernels.triton.prompt_attention import PromptArguments, attend_prompt_kernel, prompt_tile
from mycli.runtime.kernels.triton.residual import ResidualArguments, add_epilogue, embed_kernel, norm_add_kernel
from mycli.runtime.kernels.triton.rope import RopeArguments, rope_epilogue
from mycli.runtime.kernels.triton.routing import choose_kernel, place_kernel, weighted_sum_kernel
from mycli.runtime.kernels.triton.sample import VOCABULARY_BLOCK, mass_kernel, peak_kernel, sample_kernel
from mycli.runtime.kernels.triton.split_k import Epilogue, epilogue_kernel, reduce_kernel
from mycli.runtime.kernels.triton.top_k_top_p import NARROW_WARPS, Limit, LogitSource, narrow_kernel
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from tests.ptx.build import Build
from tests.ptx.dense_builds import dense_builds
from tests.ptx.state_builds import latent_builds, recurrent_builds

TILE_ROWS = (8, 16, 32, 64)  # activation rows of a tile: the MMA's columns

# Suffix of the name, type of codes, type of scales.
_CACHES = (("", "*bf16", None), (" int8", "*i8", "*fp32"), (" int4", "*u8", "*bf16"))
_RMS = triton_matmul.RmsScale("*fp32", "i32", "i32", "fp32", 32)
_OPERAND = triton_activation.Operand("*fp16", "*fp32", "i32", "i32", 128, True)
_ROTATED = RopeArguments(
    *(None,) * 4, "*bf16", "*bf16", None, "*i32", None, "*i32", "*bf16", "*bf16", "*bf16", None, None, None, "i32",
    *("i32",) * 7, "fp32", 64, 64, 1, 64, False, False, 1, False,
)  # fmt: skip


def _multiply(
    capability: int,
    packing: Packing,
    shape: Tile,
    after: str = "",
    rms: bool = False,
    epilogue: Epilogue | None = None,
    routed: Routed | None = None,
) -> Build:
    columns = tile_k(packing)
    offsets = "*fp32" if packing.offsets else None
    pointers = {"codes": "*i16", "scales": "*i32", "offsets": offsets, "x": "*fp16", "sums": "*fp32", "y": "*fp32"}
    sizes = dict.fromkeys(("rows", "n", "n_padded", "k_padded", "rows_padded", "tiles_per_part"), "i32")
    unroll = max(1, shape.block_k // columns)
    return Build(
        name=f"multiply {packing.name} rows {shape.block_m}{after}",
        kernel=triton_matmul.multiply_kernel,
        types={**pointers, **sizes, "rms": _RMS if rms else None, "epilogue": epilogue, "routed": routed},
        constants={
            **constants(packing, torch.bfloat16, ptx=True),
            "BLOCK_N": shape.block_n,
            "BLOCK_M": shape.block_m,
            "WARPS": shape.warps,
            "UNROLL": unroll,
            "PERMUTED": shape.permuted,
            "PDL": capability >= 90,
            "NEXT_FIRST": epilogue is not None and epilogue.function is not rope_epilogue,
            "EPILOGUE": epilogue is not None,
            "ROUTED": routed is not None,
        },
        warps=shape.warps,
        stages=shape.stages,
        weights=shape.block_n * columns * unroll,
        unaligned=("rows", "rows_padded", "tiles_per_part", "tokens", "heads", "kv_heads", "pieces", "table_width"),
    )


def multiply_builds(capability: int) -> Iterator[Build]:
    """Yield the packed product for every packing and number of rows, as `product.matmul` launches it."""
    chip = Chip(divmod(capability, 10), 132)
    for bits in BITS:
        for group in (*GROUP_SIZES, None):
            packing = Packing(bits, group)
            for shape in dict.fromkeys(triton_tiles.tile(chip, packing, rows) for rows in TILE_ROWS):
                yield _multiply(capability, packing, shape)


FOREIGN = (  # layouts of other programs: zero points, 8-bit floats, MXFP4, NF4 and FP4, groups of 16, ggml's codebooks
    Packing(4, 128, offsets=True),
    Packing(4, 32, offsets=True),
    Packing(8, None, codes="e4m3"),
    Packing(8, 128, codes="e4m3"),
    Packing(8, 128, codes="e5m2"),
    Packing(4, 32, codes="e2m1"),
    Packing(4, 64, codes="nf4"),
    Packing(4, 64, codes="fp4"),
    Packing(8, 16),
    Packing(4, 16, offsets=True),
    Packing(8, 16, offsets=True),
    Packing(4, 16, codes="e2m1"),
    Packing(4, 32, codes="iq4"),
    Packing(4, 32, codes="iq3_s"),
    Packing(4, 16, codes="iq2"),
)


def foreign_builds(capability: int) -> Iterator[Build]:
    """Yield the product of layouts that are read but not written, for few rows and for 16."""
    chip = Chip(divmod(capability, 10), 132)
    for packing in FOREIGN:
        for rows in TILE_ROWS[:2]:
            yield _multiply(capability, packing, triton_tiles.tile(chip, packing, rows))


def _dequantize(packing: Packing) -> Build:
    warps = dequantize_warps(packing)
    sizes = dict.fromkeys(("first", "n", "k", "n_padded", "k_padded"), "i32")
    return Build(
        name=f"dequantize {packing.name}",
        kernel=triton_matmul.dequantize_kernel,
        types={"codes": "*i16", "scales": "*i32", "offsets": None, "y": "*bf16", **sizes},
        constants={
            **constants(packing, torch.bfloat16, ptx=True),
            "BLOCK_N": layout_of(packing).chunk_n * warps,
            "WARPS": warps,
        },
        warps=warps,
        weights=layout_of(packing).chunk_n * warps * unpacked_k(packing),
    )


def matmul_builds(capability: int) -> Iterator[Build]:
    """Yield all builds of `product.gemm`."""
    yield from multiply_builds(capability)
    for bits in BITS:
        yield _dequantize(Packing(bits, 128))
    yield _dequantize(Packing(8, 16))
    into = {"x": "*bf16", "into": _OPERAND, "k": "i32", "x_stride": "i32"}
    yield Build("prepare", triton_activation.prepare_kernel, into, {"TILES": 8}, unaligned=("rows_padded",))
    sums = {"parts": "*fp32", "y": "*bf16", "count": "i32", "size": "i32"}
    yield Build("reduce", reduce_kernel, sums, {"BLOCK": 1024}, unaligned=("count",))


def expert_builds(capability: int) -> Iterator[Build]:
    """Yield the products of the 128 experts of Qwen3-30B-A3B, their routing and their sum."""
    chip, of = Chip(divmod(capability, 10), 132), ("*i64", "*i64", None, "*i32")
    for packing, rows, tokens in (
        ((4, 128), 8, "*i32"),
        ((4, 128), 8, None),
        ((4, 128), 64, "*i32"),
        ((8, 128), 8, "*i32"),
    ):
        packed, how = Packing(*packing), " of experts" if tokens else " of experts as they lie"
        shape = triton_tiles.tile(chip, packed, rows)
        yield _multiply(capability, packed, shape, how, routed=Routed(*of, tokens, "i32", 128))
        if tokens is not None and packed.bits == 4:
            routed = Routed(*of, tokens, "i32", 128)
            yield _multiply(capability, packed, shape, " of experts behind a norm", rms=True, routed=routed)
    pdl = {"PDL": capability >= 90}
    whole = {"chosen": "*i32", "weights": "*fp32", "places": "*i32", "tokens": "*i32", "starts": "*i32"}
    sizes = dict.fromkeys(("stride", "experts", "top_k", "pairs", "size"), "i32")
    given = {**whole, **sizes, "epsilon": "fp32", "scale": "fp32", "scores": "*bf16", "x": "*bf16", "y": "*bf16"}
    given |= {"softcap": "fp32", "top_groups": "i32"}
    softmax, sigmoid = {"correction": None}, {"correction": "*fp32"}
    for how, scored, groups in ((" by softmax", softmax, 1), (" by sigmoid", sigmoid, 1), (" by groups", sigmoid, 8)):
        options = {"EXPERTS": 128, "NORMALIZED": True, "SIGMOID": scored is sigmoid, "GROUPS": groups, "BEST": 2} | pdl
        options |= {"OF_SCORES": False, "CAPPED": False}
        yield Build(f"choose experts{how}", choose_kernel, {**given, **scored}, options, unaligned=("top_k",))
    yield Build("place pairs", place_kernel, given, {"BLOCK": 1024} | pdl, unaligned=("pairs", "top_k"))
    yield Build("sum of experts", weighted_sum_kernel, given, {"BLOCK": 1024}, unaligned=("top_k",))
    yield from _mixture_builds(pdl)


def _mixture_builds(pdl: dict[str, Any]) -> Iterator[Build]:
    """Yield the further launches of a MoE layer in the fused pass, without and with a gated shared expert."""
    scored = {"stream": "*bf16", "gain": "*bf16", "rms": _RMS, "router": "*bf16", "scores": "*bf16"}
    scored |= {"experts": "i32", "rows_padded": "i32"}
    parts = {"parts": "*fp32", **dict.fromkeys(("count", "rows", "pairs", "top_k", "experts"), "i32")}
    summed = parts | {"places": "*i32", "weights": "*fp32", "shared_count": "i32", "gate_stride": "i32"}
    summed |= {"args": ResidualArguments("*bf16", "i32", "*bf16", "*fp32", _OPERAND, 1, 1)}
    loose = ("rows_padded", "count", "rows", "pairs", "top_k", "shared_count", "gate_stride", "experts")
    blocks = {"BLOCK_E": 2, "BLOCK_K": 1024} | pdl
    for how, gate, bias in (("", None, None), (" and one for all", "*bf16", None), (" with biases", None, "*bf16")):
        yield Build(f"score experts{how}", score_kernel, scored | {"gate": gate, "bias": bias}, blocks, unaligned=loose)
        given = summed | {"shared": gate and "*fp32", "gates": gate, "biases": bias, "starts": bias and "*i32"}
        yield Build(f"add experts{how}", combine_kernel, given, {"RANKS": 8, "EXPERTS": 128} | pdl, unaligned=loose)
    gated = SiluArguments("i32", _OPERAND, 1, 1, tl.bfloat16, False)
    yield _alone(pdl, "SiLU of experts", Epilogue(silu_epilogue, None, gated, 128, 2))
    biased = {"bias": "*bf16", "starts": "*i32", "experts": "i32", "EXPERTS": 32}
    clamped = gated._replace(CLAMPED=True, ALTERNATING=True, **biased)
    yield _alone(pdl, "clamped SwiGLU of experts", Epilogue(silu_epilogue, None, clamped, 128, 2))


def sample_builds() -> Iterator[Build]:
    """Yield sampling of a token from the 128,256 of Llama-3.1."""
    plain = LogitSource("*bf16", "i32", "i32", None, None, None, None, None)
    penalized = LogitSource("*bf16", "i32", "i32", "*u8", "*fp32", "*fp32", "*fp32", "*fp32")
    searched, whole = Limit("*fp32", "*i32", "*fp32", "i32", "*i32"), Limit(*(None,) * 5)
    block, blocks, loose = {"BLOCK": VOCABULARY_BLOCK}, {"BLOCKS": 128}, ("step", "step_before", "blocks", "vocab")
    settings = {"temperature": "*fp32", "top_k": "*fp32", "top_p": "*fp32", "min_p": "*fp32"}
    peaks = {"peaks": "*fp32", "index": "*i32"}
    for how, source in (("", plain), (" with penalties", penalized)):
        yield Build(f"largest of a block{how}", peak_kernel, peaks | {"source": source}, block, unaligned=loose)
    narrow = {"source": plain, "peaks": "*fp32", "weights": "*fp32", "lows": "*i32", "goals": "*fp32", "step": "i32"}
    narrow |= settings | {"weights_before": "*fp32", "lows_before": "*i32", "least": "*i32", "step_before": "i32"}
    for name, mass in (("top-k", False), ("top-p", True)):
        for place in range(3):
            constants = {"ROUND": place, "MASS": mass, "AFTER": True, **block, **blocks}
            yield Build(f"{name} round {place + 1}", narrow_kernel, narrow, constants, NARROW_WARPS, unaligned=loose)
    mass_types = {"peaks": "*fp32", "masses": "*i64"} | settings
    last = {**mass_types, "index": "*i32", "numbers": "*i64", "blocks": "i32", "chosen": "*i64", "step": "i32"}
    last |= {"tokens": "*i64", "lengths": "*i32"}
    for how, source, limit in (("", plain, whole), (" with filters", penalized, searched)):
        filtered = {"SEARCHED": bool(how), "MIN_P": bool(how), **block, **blocks}
        own = {"source": source, "limit": limit}
        yield Build(f"weight of a block{how}", mass_kernel, mass_types | own, filtered, unaligned=loose)
        yield Build(f"draw{how}", sample_kernel, last | own, {"NONE": -1, "DRAW": True} | filtered, unaligned=loose)
    greedy = {"NONE": -1, "DRAW": False, "SEARCHED": False, "MIN_P": False, **block, **blocks}
    likeliest = last | {"source": plain, "limit": whole, "masses": None}
    yield Build("likeliest", sample_kernel, likeliest, greedy, unaligned=loose)


def _alone(pdl: dict[str, Any], name: str, epilogue: Epilogue, parts: str = "*fp32") -> Build:
    """Return the build of an epilogue that is a launch of its own."""
    types = {"parts": parts, "count": "i32", "rows": "i32", "epilogue": epilogue._replace(counters=None)}
    loose = ("rows_padded", "count", "rows", "tokens", "heads", "kv_heads", "pieces", "table_width")
    return Build(name, epilogue_kernel, types, pdl, warps=min(4, epilogue.arguments.ROWS), unaligned=loose)


def _with_epilogue(
    capability: int, packing: Packing, shape: Tile, name: str, rms: bool, epilogue: Epilogue
) -> Iterator[Build]:
    """Yield a product with an epilogue, or the epilogue alone where it is a launch of its own."""
    if shape.epilogue_in_product:
        yield _multiply(capability, packing, shape, name, rms, epilogue)
    else:
        yield _alone({"PDL": capability >= 90}, name.strip(), epilogue)


def _epilogues(tile: Tile, rows: int) -> Iterator[tuple[str, bool, Epilogue]]:
    """Yield the epilogues of a layer's products: name, whether x came from a norm, and the epilogue."""
    tiles = max(1, tile.block_n // 128)
    rows = tile.rows_at_once(rows)
    normed = ResidualArguments("*bf16", "i32", "*bf16", "*fp32", _OPERAND, rows, tiles)
    yield "add", False, Epilogue(add_epilogue, "*i32", normed, 128 * tiles, 1)
    gated = SiluArguments("i32", _OPERAND, rows, tiles, tl.bfloat16, False)
    yield "SiLU", True, Epilogue(silu_epilogue, "*i32", gated, 128 * tiles, 2)
    for name, stored, scales in (
        ("rotate", "*bf16", None),
        ("rotate int8", "*i8", "*fp32"),
        ("rotate int4", "*u8", "*bf16"),
    ):
        caches = {"key_cache": stored, "value_cache": stored, "key_scales": scales, "value_scales": scales}
        rotated = _ROTATED._replace(ROWS=rows, **caches)
        yield name, True, Epilogue(rope_epilogue, "*i32", rotated, 128, 1)


def family_builds(capability: int) -> Iterator[Build]:
    """Yield variants of other families: norms after sublayers and over all heads, GELU, other rotary layouts."""
    packing, pdl = Packing(4, 128), {"PDL": capability >= 90}
    loose = ("rows", "rows_padded", "pieces", "heads", "kv_heads", "tokens", "table_width")
    for rows in (1, 16):
        shape = triton_tiles.tile(Chip(divmod(capability, 10), 132), packing, rows)
        at_once = shape.rows_at_once(rows)
        summed = SumArguments("*bf16", "i32", None, "*fp32", "i32", 128, 128, at_once)
        gated = SiluArguments("i32", _OPERAND, at_once, 1, tl.bfloat16, True)
        normed = _ROTATED._replace(query_gain="*bf16", key_gain="*bf16", ROWS=at_once)
        epilogues = {
            "sum": Epilogue(sum_epilogue, "*i32", summed, 128, 1),
            "GELU": Epilogue(silu_epilogue, "*i32", gated, 128, 2),
            "rotate pairs": Epilogue(rope_epilogue, "*i32", normed._replace(INTERLEAVED=True), 128, 1),
            "rotate a half": Epilogue(rope_epilogue, "*i32", normed._replace(ROTARY=32), 128, 1),
        }
        for name, epilogue in epilogues.items():
            yield from _with_epilogue(capability, packing, shape, f" {name} {rows}", True, epilogue)
    residual = ResidualArguments("*bf16", "i32", "*bf16", "*fp32", _OPERAND, 1, 1)
    # Before a head that is not packed the stream has no next norm.
    last = residual._replace(gain=None, squares=None, into=Operand(None, None, "i32", 0, 128, False))
    tile = triton_tiles.tile(Chip(divmod(capability, 10), 132), packing, 1)
    yield _multiply(capability, packing, tile, " add the last", False, Epilogue(add_epilogue, "*i32", last, 128, 1))
    sizes = dict.fromkeys(("pieces", "rows", "rows_padded"), "i32")
    for how, args in (("", residual), (" the last", last)):
        added = {"y": "*bf16", "squares": "*fp32", "gain": "*bf16", "eps": "fp32", "args": args}
        yield Build(f"add a normed sum{how}", norm_add_kernel, added | sizes, {"PIECES": 32} | pdl, unaligned=loose)
    whole = _ROTATED._replace(query_gain="*bf16", key_gain="*bf16", squares="*fp32", HEADS=32)
    yield _alone(pdl, "rotate after norms of all heads", Epilogue(rope_epilogue, None, whole, 128, 1), "*bf16")


def decode_builds(capability: int) -> Iterator[Build]:
    """Yield the start of a pass and the five launches of a layer of Llama-3.1-8B: 32 heads, 8 KV heads, of 128.

    The O and down products are alike.
    """
    packing = Packing(4, 128)
    normed = ResidualArguments("*bf16", "i32", "*bf16", "*fp32", _OPERAND, 1, 1)
    embed = {"tokens": "*i64", "embedding": "*bf16", "rows": "i32", "args": normed}
    pdl = {"PDL": capability >= 90}
    yield Build("embed", embed_kernel, embed, pdl, unaligned=("rows", "rows_padded"))
    for rows in (1, *TILE_ROWS):
        shape = triton_tiles.tile(Chip(divmod(capability, 10), 132), packing, rows)
        if rows == 64:
            args = _ROTATED._replace(counts="*i32", ROWS=shape.rows_at_once(64))
            yield _alone(pdl, "rotate a padded prompt", Epilogue(rope_epilogue, None, args, 128, 1))
        for name, rms, epilogue in _epilogues(shape, rows):
            if name in ("rotate int8", "rotate int4") and rows > 8:  # they differ in how a row is stored
                continue
            yield from _with_epilogue(capability, packing, shape, f" {name} {rows}", rms, epilogue)
    for name, stored, scales in _CACHES:
        cache = {"keys": stored, "values": stored, "key_scales": scales, "value_scales": scales}
        strides = dict.fromkeys(("block_stride", "head_stride", "block_size", "table_width"), "i32")
        for tokens in (1, 8):
            attend: dict[str, Any] = {
                "query": "*bf16",
                "lengths": "*i32",
                "block_table": "*i32",
                "outputs": "*fp32",
                "stats": "*fp32",
                **cache,
                **strides,
            }
            attend |= {"window": "i32", "scale": "fp32", "counters": "*i32", "into": _OPERAND, "tokens": "i32"}
            sizes = {"TOKENS": tokens, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_Q": max(8, 4 * tokens)}
            flags = {
                **sizes,
                "SPLIT_QUERIES": False,
                "BLOCK_K": BLOCK_K,
                "TURNS": 1,
                "WINDOW": False,
                "CHUNKED": False,
                "DOT": tl.float16 if stored == "*i8" else tl.bfloat16,
                "ASM": True,
                "LEAST_TURNS": LEAST_TURNS,
                "UPRIGHT": not scales,
                "PURE": capability in (100, 103),
            }
            warps, chip = attend_warps(max(8, 4 * tokens)), Chip(divmod(capability, 10), 132)
            stages = attend_stages(chip, 128, max(8, 4 * tokens), 1 if scales else 2)
            flags |= combination(tokens, 4, 128, 128, 32, warps) | pdl
            kernel = attend_kernel
            loose = ("rows_padded", "tokens", "table_width")
            yield Build(f"attend{name} to {tokens}", kernel, attend, flags, warps, stages, unaligned=loose)
            if tokens == 8:  # a prompt padded to a multiple of it
                padded = attend | {"counts": "*i32"}, flags | {"SPLIT_QUERIES": True}
                yield Build(f"attend{name} to 8 of a padded prompt", kernel, *padded, warps, stages, unaligned=loose)
            if name == "" and tokens == 1:  # one sequence, whose keys are in one block
                yield Build(
                    "attend in one block to 1", kernel, attend, flags | {"TURNS": 0}, warps, stages, unaligned=loose
                )


def prompt_builds(capability: int, head_dims: Iterable[int] = (128, 256)) -> Iterator[Build]:
    """Yield prompt attention of 32 heads and 8 KV heads for each cache, and heads of 128 with all options."""
    chip = Chip(divmod(capability, 10), 132)
    pointers = {"query": "*bf16", "starts": "*i32", "lengths": "*i32", "counts": "*i32", "block_table": "*i32"}
    pointers["result"] = "*bf16"
    sizes = {"table_width": "i32", "skipped": "i32"}
    for head_dim in head_dims:
        for name, stored, scales in _CACHES:
            dtype = {"*bf16": torch.bfloat16, "*i8": torch.int8, "*u8": torch.uint8}[stored]
            tile = prompt_tile(chip, head_dim, dtype)
            assert tile is not None
            kinds = [(f"prompt{name} of {head_dim}", False)]
            if not name and head_dim == 128:
                kinds.append(("prompt with window softcap sinks", True))
            for title, every in kinds:
                numbers = ("i32",) * 5, ("fp32",) * 2
                flags = head_dim, head_dim, tile.keys, every, False, every, tile.halves, tl.bfloat16, True
                args = PromptArguments(stored, stored, scales, scales, *numbers[0], *numbers[1], *flags)
                types = {**pointers, **sizes, "args": args, "sinks": "*fp32" if every else None}
                constants = {"GROUP": 4, "BLOCK_M": tile.rows}
                loose = (*sizes, "window", "chunk")
                yield Build(
                    f"attend {title}", attend_prompt_kernel, types, constants, tile.warps, tile.stages, unaligned=loose
                )


def builds(capability: int) -> Iterator[Build]:
    """Yield every build."""
    yield from matmul_builds(capability)
    yield from sample_builds()
    yield from decode_builds(capability)
    yield from prompt_builds(capability)
    yield from family_builds(capability)
    yield from latent_builds()
    if capability not in (86, 89):  # compute capabilities that share the tiles of 80, by major version
        yield from recurrent_builds()
        yield from dense_builds(capability)
        yield from expert_builds(capability)
        yield from foreign_builds(capability)
