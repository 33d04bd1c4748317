"""What quantizing takes of memory, from shapes alone, and how many tokens at once keep it below a bound.

The peak is that of the largest of its stages, each a sum of what is alive in it. Counts bytes beyond what the program
holds before it begins. Does not allocate, and does not know whether there is enough.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mycli.quant.evaluate import LOGITS_AT_ONCE, STREAM_BYTES
from mycli.quant.solvers import SOLVER_WEIGHTS
from mycli.runtime.errors import ResourceError
from mycli.runtime.memory.layer import observed_values, trained_values, weight_values
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.units import human_bytes

LIBRARIES = 112 << 20  # buffers of the libraries that multiply and factor, and what malloc keeps: measured
BATCH = 4  # windows a step of tuning
_FLOAT = 4
# Matrices [K, K] alive while an input's Hessian is factored: two sums of two kinds, H, its ordered copy, the reversed
# factor, the identity and the inverse.
_SQUARES = 10
_PIECES = 96 << 20  # at most, that malloc keeps of a pass through a block: buffers too small to be given back at once
_SMALL = 24 << 20  # the search for scales, packing, and buffers of files


@dataclass(frozen=True)
class Need:
    """Bytes of main memory, and of a GPU's (0 where there is none). `at_once`: tokens through a layer at a time."""

    host: int
    device: int
    at_once: int


@dataclass(frozen=True)
class QuantizationWork:
    """What is to be done. `tokens`: windows times `seq`; 0 where the method wants no data. `transforms`: inputs are
    rescaled first.

    `judged`: tokens that sensitivities are taken at, 0 where widths are given.
    `measured`: tokens of the report, 0 where there is none; `context` of them in a window.
    """

    config: ModelConfig
    packings: Mapping[str, Packing]
    tokens: int
    seq: int
    transforms: bool
    tunes: bool
    measured: int
    context: int
    judged: int = 0


def need(work: QuantizationWork, gpu: bool, at_once: int) -> Need:
    """For `at_once` tokens through a layer at a time, at least one window."""
    stages = _solving(work, at_once) if work.tokens else [(0, _tensors(work))]
    if work.tunes:
        stages += [_tuning_block(work), _tuning(work)]
    if work.judged:
        stages.append(_judging(work, at_once))
    if work.measured:
        stages.append(_measuring(work, at_once))
    if gpu:
        host = max(host for host, _ in stages) + _SMALL
        return Need(host, max(device for _, device in stages) + LIBRARIES, at_once)
    return Need(max(host + device for host, device in stages) + LIBRARIES, 0, at_once)


def choose(work: QuantizationWork, gpu: bool, at_once: int, max_ram: int | None, max_vram: int | None) -> Need:
    """`at_once` tokens where that stays within the bounds, else the most that do, by halves.

    Raises ResourceError that names the smallest bound that would do.
    """
    found = need(work, gpu, at_once)
    while not _within(found, max_ram, max_vram):
        if found.at_once <= max(work.seq, work.context if work.measured else 1):
            break
        found = need(work, gpu, found.at_once // 2)
    if max_ram is not None and found.host > max_ram:
        least = math.ceil(found.host / 2**20)
        raise ResourceError(_too_little("main memory", max_ram), code="raise-max-ram", data={"mib": least})
    if max_vram is not None and found.device > max_vram:
        least = math.ceil(found.device / 2**20)
        raise ResourceError(_too_little("GPU memory", max_vram), code="raise-max-vram", data={"mib": least})
    return found


def _too_little(kind: str, bound: int) -> str:
    return f"{human_bytes(bound)} of {kind} are too little for this model and calibration"


def _within(found: Need, max_ram: int | None, max_vram: int | None) -> bool:
    return (max_ram is None or found.host <= max_ram) and (max_vram is None or found.device <= max_vram)


def _largest(config: ModelConfig) -> LayerSpec:
    """The layer that holds most."""
    return max(config.layer_specs, key=weight_values)


def _lent(config: ModelConfig, tokens: int) -> int:
    """Bytes that go along with a stream of so many tokens: keys and values that layers lend, and the rows of tables
    that layers are told of."""
    lent = sum(2 * spec.kv_heads * spec.head_dim for spec in config.attentions if spec.kv_shared)
    told = config.hidden_size + config.layers * config.per_layer_width if config.per_layer_width else 0
    return _FLOAT * tokens * lent + 2 * min(tokens, config.vocab_size) * told


def _tables(config: ModelConfig) -> int:
    """Bytes of the largest table of tokens as it is stored."""
    return 2 * config.vocab_size * max(config.hidden_size, config.layers * config.per_layer_width)


def _products(work: QuantizationWork) -> list[tuple[str, int, int]]:
    """Name, rows and inputs of each product of a block."""
    groups: Mapping[str, tuple[LinearSpec, ...]] = _largest(work.config).products()
    return [(name, sum(each.out_features for each in group), group[0].in_features) for name, group in groups.items()]


def _solving(work: QuantizationWork, at_once: int) -> list[tuple[int, int]]:
    """(host, device) of the stages of work with data."""
    config = work.config
    tokens = max(work.seq, at_once // work.seq * work.seq)
    # Beside them lies the block before, whose codes are written: as they are, and as a file.
    weights = weight_values(_largest(config))
    parts = max(len(spec.parts) - spec.parallel for spec in config.layer_specs)  # each has a stream of its own
    held = 2 * parts if work.transforms else parts + 1
    streams = _FLOAT * work.tokens * config.hidden_size * held + 2 * weights + 2 * _lent(config, work.tokens)
    blocks = 2 * _FLOAT * weights
    # The streams are made one after the other, from the table as it is stored.
    table = _tables(config)
    stages = [(streams * 2 // 3 + table, 0)]
    for product, rows, inputs in _products(work):
        square = _FLOAT * inputs * inputs
        at_a_time = min(rows, max(1, SOLVER_WEIGHTS // inputs)) * inputs
        stages.append((streams, blocks + 4 * square + _FLOAT * tokens * observed_values(_largest(config), product)))
        solving = max(_SQUARES * square, 7 * square + 9 * _FLOAT * at_a_time)
        stages.append((streams, blocks + solving + _FLOAT * rows * inputs))
    head = config.head()
    if head.name in work.packings:
        square, weight = _FLOAT * config.hidden_size**2, _FLOAT * config.vocab_size * config.hidden_size
        stages.append((streams, max(_SQUARES * square, 7 * square + 9 * _FLOAT * SOLVER_WEIGHTS) + 3 * weight))
    return stages


def _judging(work: QuantizationWork, at_once: int) -> tuple[int, int]:
    """Of `quant.mixed_precision`: the stream at every block and what the original ends with; then either the head with
    the logits of a window, or a block of both models, the gradients of its weights and the pass over a batch. What was
    made before, the copy, leaves something behind too."""
    config = work.config
    streams = _FLOAT * work.judged * config.hidden_size * (config.layers + 3)
    head = _FLOAT * config.vocab_size * (config.hidden_size + 7 * work.seq)
    tokens = max(work.seq, at_once // work.seq * work.seq)
    blocks = 3 * _FLOAT * weight_values(_largest(config))
    return streams, max(head, blocks + _FLOAT * tokens * trained_values(_largest(config)) + 3 * _SMALL)


def _tuning_block(work: QuantizationWork) -> tuple[int, int]:
    """Of `quant.tuning.block`: each weight as a code, a level that moves, its gradient, two moments and the best
    level so far; twice more while it is differentiated, and thrice the largest product."""
    weights = weight_values(_largest(work.config))
    largest = max(rows * inputs for _, rows, inputs in _products(work))
    streams = _FLOAT * work.tokens * work.config.hidden_size * 2
    trained = (1 + 5 * _FLOAT + 2 * _FLOAT) * weights + 3 * _FLOAT * largest
    return streams, trained + _FLOAT * BATCH * work.seq * trained_values(_largest(work.config))


def _tuning(work: QuantizationWork) -> tuple[int, int]:
    """Of `quant.tuning.end_to_end`: all codes as bytes, scales with their gradients, moments and best so far, one
    block's weights as they are differentiated, and the stream of a batch at every block."""
    config = work.config
    codes = config.layers * weight_values(_largest(config))
    scaled = sum(
        packing.groups(linear.in_features) * linear.out_features
        for layer in range(config.layers)
        for group in config.layer(layer).products().values()
        for linear in group
        if (packing := work.packings.get(linear.name)) is not None
    )
    tokens = min(BATCH, max(1, LOGITS_AT_ONCE // (work.seq * config.vocab_size))) * work.seq
    saved = _FLOAT * tokens * config.hidden_size * (config.layers + 1)
    logits = 6 * _FLOAT * tokens * config.vocab_size
    head = _FLOAT * config.vocab_size * config.hidden_size * (1 + ("lm_head" in work.packings))
    block = 5 * _FLOAT * weight_values(_largest(config))
    kept = codes + 7 * _FLOAT * scaled + saved + head + _SMALL  # what writing the blocks left behind
    streams = _FLOAT * work.tokens * config.hidden_size
    training = _FLOAT * tokens * trained_values(_largest(config))
    return streams, kept + max(training + block, min(training, _PIECES) + logits)


def _tensors(work: QuantizationWork) -> int:
    """Of the largest tensor while it is rounded and packed: stored, fp32 in part, its codes and words."""
    largest = max(math.prod(shape) for _, shape in work.config.tensors())
    return 5 * largest + _SMALL


def _measuring(work: QuantizationWork, at_once: int) -> tuple[int, int]:
    config = work.config
    heads = 1 + ("lm_head" in work.packings)
    head = _FLOAT * config.vocab_size * config.hidden_size * heads
    streams = min(_FLOAT * work.measured * config.hidden_size * 2, STREAM_BYTES)
    slices = 4 * _FLOAT * min(LOGITS_AT_ONCE, work.context * config.vocab_size)
    table = 2 * config.vocab_size * config.hidden_size
    tokens = max(work.context, at_once // work.context * work.context)
    passing = (
        _FLOAT * weight_values(_largest(config)) + _FLOAT * tokens * observed_values(_largest(config), "down") // 2
    )
    return streams, max(int(head + slices), passing, head + table)
