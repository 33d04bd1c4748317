"""Compares what another program reads from a model with the expected weights, and its logits with ours."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.quant.export._weights import Weights
from mycli.quant.ggml.file import EMBEDDING_TENSOR, HEAD, padding, split_by_head
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.readers import Names, Reading, ReadWeight
from mycli.quant.readers._digests import row_digests
from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.checkpoint import GgufCheckpoint, file_order
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig

TOKENS = 16  # of the passes whose logits are compared
MISSING = "the program has no such weight"
# The tensor that a converter may have joined a part to, its parts, and the axis along which they follow one another.
_JOINED = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), ("attn_qkv", 3, 0)),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps", 2, 1)),
}
_SHARED = 0.8  # least share of common tokens, for a program that returns only its likeliest ones


@dataclass(frozen=True)
class Fault:
    """A weight that differs, by its name in the other program. row: the first one; None if shapes differ."""

    weight: str
    row: int | None
    problem: str


@dataclass(frozen=True)
class Verified:
    """The result. logits: largest difference in nats, None without logits; likeliest: share of common tokens."""

    program: str
    weights: int
    faults: tuple[Fault, ...]
    logits: float | None
    tolerance: float
    likeliest: float | None = None
    rounded: float | None = None  # of `Reading.rounded`
    rounded_tolerance: float = 0.0

    @property
    def logits_fail(self) -> bool:
        too_far = self.logits is not None and not self.logits <= self.tolerance
        return too_far or self.rounding_fails or (self.likeliest is not None and self.likeliest < _SHARED)

    @property
    def rounding_fails(self) -> bool:
        return self.rounded is not None and not self.rounded <= self.rounded_tolerance


def tokens_to_score(vocabulary: int) -> tuple[int, ...]:
    """Return the tokens whose logits are compared; the same for all models with this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(min(3, vocabulary - 1), vocabulary, (TOKENS,), generator=generator).tolist())


def verify_reading(
    reading: Reading,
    names: Names,
    reference: ModelFolder,
    model: ModelFolder,
    tokens: tuple[int, ...],
    placement: Placement,
    progress: ReportProgress = silent,
) -> Verified:
    """Compare a reading of `model` with the exact values of `reference`, rounded to the dtypes of the program."""
    expected: Iterator[tuple[str, Tensor]] = iter(())
    if reading.weights:
        expected = _folder_weights(reference)
        if names == "gguf":
            expected = _joined(_gguf_weights(reference), reading.weights)
    faults, seen = [], set()
    total = len(reading.weights)
    for name, values in expected:
        read = reading.weights.get(name)
        seen.add(name)
        if read is None:
            faults.append(Fault(name, None, MISSING))
        elif (fault := _compare(name, values, read)) is not None:
            faults.append(fault)
        progress("comparing weights", min(len(seen), total), total)
    difference = likeliest = rounded = None
    if reading.logits is not None:
        ours = _our_logits(model, tokens, placement, dense=names == "hf")
        difference, likeliest = _difference(ours, reading.logits, reading.log_probabilities)
        rounded = None if reading.rounded is None else _difference(ours, reading.rounded, reading.log_probabilities)[0]
    return Verified(
        reading.program,
        len(seen),
        tuple(faults),
        difference,
        reading.tolerance,
        likeliest,
        rounded,
        reading.rounded_tolerance,
    )


def _compare(name: str, values: Tensor, read: ReadWeight) -> Fault | None:
    shapes = f"has shape {list(read.shape)}, expected {list(values.shape)}"
    if values.numel() != math.prod(read.shape):
        return Fault(name, None, shapes)
    if values.dim() == len(read.shape) and tuple(values.shape) != read.shape:
        return Fault(name, None, f"{shapes}: transposed")
    ours = row_digests(values.float().to(getattr(torch, read.dtype)).reshape(len(read.rows), -1))
    wrong = [index for index, (digest, other) in enumerate(zip(ours, read.rows, strict=True)) if digest != other]
    if not wrong:
        return None
    # GGUF permutes the rows of some weights, so a wrong order is named as such.
    moved = sorted(ours) == sorted(read.rows)
    what = "rows in another order" if moved else "other values"
    return Fault(name, wrong[0], f"{what} in {len(wrong)} of {len(ours)} rows, first in row {wrong[0]}")


def _folder_weights(folder: ModelFolder) -> Iterator[tuple[str, Tensor]]:
    weights = Weights(folder)
    for name, _ in folder.config.tensors():
        yield name, weights.dense(name).float()


def _gguf_weights(folder: ModelFolder) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their GGUF names, with rows and columns in the order of the file; experts as one stack."""
    config, weights = folder.config, Weights(folder)
    architecture = written_architecture(config)
    stored = _stored_names(weights, architecture)
    places = {name: architecture.place(name, stored.get(name, "")) for name, _ in config.tensors()}
    experts = Counter(place.name for place in places.values() if place is not None and place.expert is not None)
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, place in places.items():
        if place is None:
            raise ModelError(f"{name}: GGUF has no tensor for it in the architecture {architecture.name}", "")
        if place.in_metadata:
            continue
        values = _as_stored(weights.dense(name).float(), place.rule, config, architecture.factors(config, name))
        if place.expert is not None:
            stack = stacks.setdefault(place.name, {})
            stack[place.expert] = values
            if len(stack) == experts[place.name]:
                yield place.name, _stacked(place.rule, stacks.pop(place.name))
        elif place.rule.by_head:
            yield from zip(place.names, split_by_head(config, values), strict=True)
        else:
            first = len(values) if place.rule.first_rows is None else place.rule.first_rows(config)
            parts = [values] if first == len(values) else [values[:first], values[first:]]
            yield from zip(place.names, parts, strict=True)
            if name == EMBEDDING_TENSOR and architecture.own_head and config.tie_embeddings:
                yield HEAD, values


def _stored_names(weights: Weights, architecture: Architecture) -> dict[str, str]:
    # The names in the file by those of the model; only a file of this architecture has them.
    if not isinstance(weights.checkpoint, GgufCheckpoint):
        return {}
    weights.checkpoint.factors = {}  # tensors of their own for other programs
    if weights.checkpoint.architecture.name != architecture.name:
        return {}
    return {name: entry.name for name, entry in weights.checkpoint.manifest.tensors.items()}


def _as_stored(values: Tensor, rule: TensorRule, config: ModelConfig, factors: Sequence[float]) -> Tensor:
    # With the values, rows and columns of the file.
    values = values * torch.tensor(factors).unsqueeze(1) if factors else values
    values = values if rule.change is None else rule.change.store(values)
    values = values.squeeze() if values.dim() > 2 else values
    if rule.padded_rows is not None:
        values = torch.cat((values, padding(config, rule, values)))
    if rule.column_order is not None:
        values = values[:, file_order(rule.column_order, config, values.shape[1])]
    if rule.row_order is not None:
        values = values[file_order(rule.row_order, config, len(values))]
    return values


def _stacked(rule: TensorRule, experts: Mapping[int, Tensor]) -> Tensor:
    whole = torch.stack([experts[index] for index in sorted(experts)])
    if "{expert}" in rule.name and rule.more_names:  # gate and up of an expert follow one another
        return whole.view(-1, (1 + len(rule.more_names)) * whole.shape[1], *whole.shape[2:])
    return whole.flatten(0, 1) if rule.more_names and rule.stored_shape is None else whole


def _joined(weights: Iterator[tuple[str, Tensor]], read: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; those that the program has as one tensor joined: q, k and v, or gate and up of experts."""
    waiting: dict[str, list[tuple[str, Tensor]]] = {}
    for name, values in weights:
        tensor, _, ending = name.rpartition(".")
        block, _, part = tensor.rpartition(".")
        joined, count, axis = _JOINED.get(part, ("", 0, 0))
        whole = f"{block}.{joined}.{ending}"
        if name in read or whole not in read:
            yield name, values
            continue
        parts = waiting.setdefault(whole, [])
        parts.append((name, values))
        if len(parts) == count:
            del waiting[whole]
            yield whole, torch.cat([values for _, values in parts], dim=axis)
    for parts in waiting.values():
        yield from parts


@torch.no_grad()
def _our_logits(model: ModelFolder, tokens: tuple[int, ...], placement: Placement, *, dense: bool) -> Tensor:
    # Log-probabilities after the last token. Formats of folders define dequantized weights, rounded to the dtype of
    # scales; those of GGUF are products in fp32.
    streamed = StreamedModel(model, placement, dense=dense)
    hidden = streamed.hidden(torch.tensor([tokens]))
    return streamed.logits(hidden[0, -1:])[0].log_softmax(0).cpu()


def _difference(ours: Tensor, read: dict[int, float], log_probabilities: bool) -> tuple[float, float | None]:
    indices = torch.tensor(list(read))
    theirs = torch.tensor(list(read.values()))
    if not log_probabilities:
        return float((ours[indices] - theirs.log_softmax(0)).abs().max()), None
    likeliest = set(ours.topk(len(indices)).indices.tolist())
    shared = [index for index in indices.tolist() if index in likeliest]
    difference = max((abs(float(ours[index]) - read[index]) for index in shared), default=float("inf"))
    return difference, len(shared) / len(indices)
