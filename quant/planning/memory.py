"""The memory that quantizing needs, from shapes alone, and how many tokens per pass keep it below a limit.

The peak is that of the largest stage; each stage adds up what is alive in it, beyond what the process holds already.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mycli.quant.calibration.output_moments import GRADIENT_WINDOWS, moments_name, windows_at_once
from mycli.quant.evaluate import LOGITS_AT_ONCE, STREAM_BYTES
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.rounding.error_compensation import drift_rows
from mycli.quant.rounding.rows import BLOCK_ROWS
from mycli.quant.solvers import SOLVER_WEIGHTS
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.device.system import memory
from mycli.runtime.errors import ResourceError
from mycli.runtime.memory.workspace import head_widths, hidden_width
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.units import distinct_sizes, human_bytes

LIBRARIES = 112 << 20  # buffers of BLAS and LAPACK, and what malloc retains: measured
BATCH = 4  # windows per step of tuning
_FLOAT = 4
# Matrices [K, K] alive while an input's Hessian is factored, besides two sums of its drift: two of the Hessian, H, its
# ordered copy, the reversed factor, the identity and the inverse.
_SQUARES = 8
_PIECES = 96 << 20  # the most that malloc retains of a pass through a block: its buffers are below the mmap threshold
_EXPERT_KERNELS = 128 << 20  # that oneDNN compiles for the numbers of rows of experts, with gradients: measured
_SMALL = 24 << 20  # the search for scales, packing, and buffers of files


@dataclass(frozen=True)
class Need:
    """Bytes of main memory and of GPU memory (0 without one). `at_once`: tokens per pass through a layer.

    keeps_inputs: of products, so that what leads to them runs once; the results are the same.
    """

    host: int
    device: int
    at_once: int
    keeps_inputs: bool = False


@dataclass(frozen=True)
class QuantizationWork:
    """The sizes that decide the memory of a quantization; token counts are 0 for stages that are left out."""

    config: ModelConfig
    packings: Mapping[str, Packing]
    tokens: int  # calibration windows times `seq`
    seq: int
    transforms: bool
    tunes: bool
    measured: int  # tokens of the report
    context: int  # of a window of the report
    sensitivity_tokens: int = 0  # for choosing widths
    tunes_codes: bool = False  # of all blocks, end to end
    output_moments: bool = False  # of gradients, for Hessians of the whole model
    keeps_inputs: bool = False  # of the last product of a part, in bf16, if there is room
    native_products: bool = False  # with gradients too: oneDNN compiles none


def need(work: QuantizationWork, gpu: bool, at_once: int) -> Need:
    """Return the memory for `at_once` tokens per pass, at least one window."""
    stages = _solving(work, at_once) if work.tokens else [(0, _largest_tensor(work))]
    if work.output_moments:
        stages.append(_output_moments(work, at_once))
    if work.tunes:
        stages += [_tuning_block(work), _tuning_model(work)]
    if work.sensitivity_tokens:
        stages.append(_sensitivity(work, at_once))
    if work.measured:
        stages.append(_measuring(work, at_once, gpu))
    if gpu:
        host = max(host for host, _ in stages) + _SMALL
        return Need(host, max(device for _, device in stages) + LIBRARIES, at_once)
    return Need(max(host + device for host, device in stages) + LIBRARIES, 0, at_once, work.keeps_inputs)


def fitting_need(work: QuantizationWork, at_once: int, settings: PlanSettings) -> Need:
    """Keep no inputs, then halve `at_once`, until the memory stays within the limits.

    Raises ResourceError, with the smallest limit that is enough.
    """
    gpu, max_ram, max_vram = settings.gpu, settings.max_ram, settings.max_vram
    result = need(work, gpu, at_once)
    if result.keeps_inputs and result.host > (memory().available if max_ram is None else max_ram):
        work = replace(work, keeps_inputs=False)
        result = need(work, gpu, at_once)
    while not _within(result, max_ram, max_vram):
        smaller = need(work, gpu, result.at_once // 2)
        if (smaller.host, smaller.device) == (result.host, result.device):  # of one window, or of another stage
            break
        result = smaller
    if max_ram is not None and result.host > max_ram:
        least = math.ceil(result.host / 2**20)
        raise ResourceError(_too_little("main memory", max_ram), code="raise-max-ram", data={"mib": least})
    if max_vram is not None and result.device > max_vram:
        least = math.ceil(result.device / 2**20)
        raise ResourceError(_too_little("GPU memory", max_vram), code="raise-max-vram", data={"mib": least})
    return result


def require_memory(need: Need) -> None:
    """Raise ResourceError if less main memory is free than a quantization needs."""
    available = memory().available
    if need.host > available:
        needed, left = distinct_sizes(need.host, available)
        raise ResourceError(f"{needed} of memory needed, {left} available", code="fewer-samples")


def _too_little(kind: str, limit: int) -> str:
    return f"a limit of {human_bytes(limit)} of {kind} is too small for this model and calibration"


def _within(result: Need, max_ram: int | None, max_vram: int | None) -> bool:
    return (max_ram is None or result.host <= max_ram) and (max_vram is None or result.device <= max_vram)


def _weights(layer: LayerSpec) -> int:
    return sum(math.prod(shape) for _, shape in layer.tensors())


def _largest(config: ModelConfig) -> LayerSpec:
    return max(config.layer_specs, key=_weights)


def _whole_windows(tokens: int, length: int) -> int:
    return max(length, tokens // length * length)


def _inner_width(layer: LayerSpec) -> int:
    """Return the MLP's intermediate size, summed over the experts that one token uses."""
    if not isinstance(layer.mlp, ExpertsSpec):
        return 0 if layer.mlp is None else layer.mlp.size
    shared = 0 if layer.mlp.shared is None else layer.mlp.shared.mlp.size
    return layer.mlp.top_k * layer.mlp.size + shared


def observed_values(layer: LayerSpec, product: str) -> int:
    """Return the values per token while the inputs of a product are collected in two models."""
    hidden, inner = hidden_width(layer), _inner_width(layer)
    product = product.rpartition(".")[2]  # all tokens may go to one expert
    *_, last = layer.parts[0].products().values()
    mixed, mixer = last[0].in_features, 0
    if layer.recurrent is not None:
        mixer, mixed = layer.recurrent.forward_values(), layer.recurrent.out.in_features
    elif layer.latent is not None:
        mixer = layer.latent.forward_values()
    if isinstance(layer.mixer, AttentionSpec):
        query, key = head_widths(layer)
        mixer += query + 2 * key + 3 * query
    per_layer = 0 if layer.per_layer is None else layer.per_layer.gate.out_features
    # Values that the product's input is computed from, and the width of that input; it is squared and summed in fp32.
    sources = {"qkv": hidden, "o": mixer, "gate_up": mixer, "down": 4 * inner, "per_layer_gate": 4 * inner}
    sources |= {"recurrent_in": hidden, "recurrent_out": mixer}
    sources |= {"latent_in": hidden, "latent_q": mixer, "latent_kv": mixer}
    width = {"down": inner, "per_layer_projection": per_layer, "recurrent_out": mixed}.get(product, hidden)
    if layer.latent is not None and product == "o":
        width = mixed
    return 2 * hidden + max(width + sources.get(product, 4 * per_layer), 5 * width)


def trained_values(layer: LayerSpec) -> int:
    """Return the values per token of a forward and backward pass: saved activations and the widest gradients."""
    hidden = hidden_width(layer)
    values = 12 * hidden + 8 * _inner_width(layer)
    if isinstance(layer.mlp, ExpertsSpec):  # rows gathered for experts, and their outputs weighted one by one
        values += 6 * layer.mlp.top_k * hidden
    for mixer in (layer.mixer, layer.state_space):
        if isinstance(mixer, AttentionSpec):
            query, key = head_widths(layer)
            values += 5 * query + 8 * key
        elif mixer is not None:
            values += mixer.training_values()
    return values


def _side_inputs(config: ModelConfig, tokens: int) -> int:
    shared = sum(2 * spec.kv_heads * spec.head_dim for spec in config.attentions if spec.kv_shared)
    per_layer = config.hidden_size + config.layers * config.per_layer_width if config.per_layer_width else 0
    return _FLOAT * tokens * shared + 2 * min(tokens, config.vocab_size) * per_layer


def _products(work: QuantizationWork) -> list[tuple[str, int, int]]:
    groups: Mapping[str, tuple[LinearSpec, ...]] = _largest(work.config).products()
    return [(name, sum(spec.out_features for spec in group), group[0].in_features) for name, group in groups.items()]


# Each of the following returns (host, device) bytes of a stage.


def _solving(work: QuantizationWork, at_once: int) -> list[tuple[int, int]]:
    config = work.config
    tokens = _whole_windows(at_once, work.seq)
    weights = _weights(_largest(config))
    parts = max(len(spec.parts) - spec.parallel for spec in config.layer_specs)  # each has its own stream
    count = parts + 1 + work.transforms  # a transform reads the original's stream before it is advanced
    # The block before is still being written: its codes as they are, and as a file.
    streams = _FLOAT * work.tokens * config.stream_width * count + 2 * weights + 2 * _side_inputs(config, work.tokens)
    blocks = 2 * _FLOAT * weights
    if work.keeps_inputs:
        streams += 2 * work.tokens * max(inputs for _, _, inputs in _products(work))
    # The two streams are embedded one after the other, from the table as it is stored.
    table = 2 * config.vocab_size * max(config.hidden_size, config.layers * config.per_layer_width)
    moments = _moment_bytes(work) if work.output_moments else 0
    stages = [(streams * 2 // 3 + table, moments)]
    for product, rows, inputs in _products(work):
        square, drifts = _FLOAT * inputs * inputs, 2 * _FLOAT * drift_rows(rows, inputs) * inputs
        # With output moments all rows are solved in turn, so that none can wait for a later call.
        at_a_time = (rows if work.output_moments else min(rows, max(1, SOLVER_WEIGHTS // inputs))) * inputs
        stages.append(
            (
                streams,
                moments + blocks + 2 * square + drifts + _FLOAT * tokens * observed_values(_largest(config), product),
            )
        )
        solving = max(_SQUARES * square + drifts, 5 * square + drifts + 9 * _FLOAT * at_a_time)
        stages.append((streams, moments + blocks + solving + _FLOAT * rows * inputs))
    if (EMBEDDING if config.tie_embeddings else config.head().name) in work.packings:
        square, weight = _FLOAT * config.hidden_size**2, _FLOAT * config.vocab_size * config.hidden_size
        stages.append(
            (streams, moments + max((_SQUARES + 2) * square, 7 * square + 9 * _FLOAT * SOLVER_WEIGHTS) + 3 * weight)
        )
    return stages


def _sensitivity(work: QuantizationWork, at_once: int) -> tuple[int, int]:
    # See `mixed_precision`: the stream at every block and the original's last one; then either the head with the
    # logits of a window, or a block of both models with gradients and a batch. Making the copy leaves pieces behind.
    config = work.config
    streams = _FLOAT * work.sensitivity_tokens * config.stream_width * (config.layers + 3)
    streams += 2 * _side_inputs(config, work.sensitivity_tokens)
    head = _FLOAT * config.vocab_size * (config.hidden_size + 7 * work.seq)
    tokens = _whole_windows(at_once, work.seq)
    blocks = 3 * _FLOAT * _weights(_largest(config))
    passing = _FLOAT * tokens * trained_values(_largest(config)) + _expert_kernels(work)
    return streams, max(head, blocks + passing + 3 * _SMALL)


def _expert_kernels(work: QuantizationWork) -> int:
    mixture = any(isinstance(layer.mlp, ExpertsSpec) for layer in work.config.layer_specs)
    return _EXPERT_KERNELS if mixture and not work.native_products else 0


def _moment_bytes(work: QuantizationWork) -> int:
    widths = [work.config.stream_width] * work.config.layers
    for layer in work.config.layer_specs:
        groups = {moments_name(product): group for product, group in layer.products().items()}
        widths += [sum(spec.out_features for spec in group) for group in groups.values()]
    return sum(_FLOAT * BLOCK_ROWS * -(-width // BLOCK_ROWS) * BLOCK_ROWS for width in widths)


def _output_moments(work: QuantizationWork, at_once: int) -> tuple[int, int]:
    # See `quant.calibration.output_moments`: the stream at every block, then the head with the logits of a window, or a
    # block with a batch; and the moments, which stay until all blocks are solved.
    config = work.config
    windows = windows_at_once(
        min(GRADIENT_WINDOWS, work.tokens // work.seq), work.seq, config.stream_width, config.layers
    )
    streams = _FLOAT * windows * work.seq * config.stream_width * (config.layers + 2)
    streams += _side_inputs(config, windows * work.seq)
    head = _FLOAT * config.vocab_size * (config.hidden_size + 5 * work.seq)
    tokens = _whole_windows(at_once, work.seq)
    passing = _FLOAT * _weights(_largest(config)) + _FLOAT * tokens * trained_values(_largest(config))
    return streams, _moment_bytes(work) + max(head, passing)


def _tuning_block(work: QuantizationWork) -> tuple[int, int]:
    # See `quant.tuning.block`: each weight as a code, a level, its gradient, two moments and the best level so far;
    # two more while it is differentiated, and three times the largest product.
    weights = _weights(_largest(work.config))
    largest = max(rows * inputs for _, rows, inputs in _products(work))
    streams = _FLOAT * work.tokens * work.config.stream_width * 2 + 2 * _side_inputs(work.config, work.tokens)
    trained = (1 + 5 * _FLOAT + 2 * _FLOAT) * weights + 3 * _FLOAT * largest
    if work.output_moments:  # those of all blocks, and the error of a batch twice more
        trained += _moment_bytes(work) + 2 * _FLOAT * BATCH * work.seq * work.config.stream_width
    trained += _expert_kernels(work)
    return streams, trained + _FLOAT * BATCH * work.seq * trained_values(_largest(work.config))


def _tuning_model(work: QuantizationWork) -> tuple[int, int]:
    # See `quant.tuning.end_to_end`: all codes as bytes, scales with gradients, moments and best values so far, one
    # block's weights while they are differentiated, and the stream of a batch at every block.
    config = work.config
    codes = config.layers * _weights(_largest(config))
    scales = sum(
        packing.groups(linear.in_features) * linear.out_features
        for layer in range(config.layers)
        for group in config.layer(layer).products().values()
        for linear in group
        if (packing := work.packings.get(linear.name)) is not None
    )
    tokens = min(BATCH, max(1, LOGITS_AT_ONCE // (work.seq * config.vocab_size))) * work.seq
    saved = _FLOAT * tokens * config.stream_width * (config.layers + 1) + _side_inputs(config, tokens)
    logits = 6 * _FLOAT * tokens * config.vocab_size
    head = _FLOAT * config.vocab_size * config.hidden_size * (1 + ("lm_head" in work.packings))
    block = 5 * _FLOAT * _weights(_largest(config))
    if work.tunes_codes:  # each as a level, its gradient, two moments and the best level so far
        codes += 5 * _FLOAT * codes
    # Writing the blocks leaves _SMALL behind.
    resident = codes + 7 * _FLOAT * scales + saved + head + _SMALL + _expert_kernels(work)
    streams = _FLOAT * work.tokens * config.stream_width + _side_inputs(config, work.tokens)
    training = _FLOAT * tokens * trained_values(_largest(config))
    return streams, resident + max(training + block, min(training, _PIECES) + logits)


def _largest_tensor(work: QuantizationWork) -> int:
    largest = max(math.prod(shape) for _, shape in work.config.tensors())
    return 5 * largest + _SMALL


def _measuring(work: QuantizationWork, at_once: int, gpu: bool) -> tuple[int, int]:
    config = work.config
    # An unquantized head is in memory twice: shared by both models, and in bf16 where activations are measured.
    heads = 4 if "lm_head" in work.packings else 3
    head = _FLOAT * config.vocab_size * config.hidden_size * heads // 2
    # Of both models in fp32; on a CPU also of the result in bf16 with activations of 16 and of 8 bits.
    streams = min(_FLOAT * work.measured * config.stream_width * (2 if gpu else 3), STREAM_BYTES)
    slices = 3 * _FLOAT * min(LOGITS_AT_ONCE, work.context * config.vocab_size)
    table = 2 * config.vocab_size * config.hidden_size
    tokens = _whole_windows(at_once, work.context)
    layer = _largest(config)
    passing = _FLOAT * _weights(layer) + _FLOAT * tokens * observed_values(layer, "down") // 2
    return streams, max(int(head + slices), passing, head + table)
