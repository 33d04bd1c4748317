"""Measures a model on a text: perplexity, and the divergence of its distributions from a reference model's.

Protocol: the text is tokenized once with the tokenizer's defaults (which decide about BOS) and cut into non-overlapping
windows of equal length; the tail is dropped. Every token of a window but the first is scored, given those before it in
the window. Both models are streamed; logits exist for a slice of one window at a time.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.recipe import Head
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.activations import Activations
from mycli.runtime.tokenizer.tokenizer import MAX_TEXT, Tokenizer
from mycli.runtime.utils import portable_math
from mycli.runtime.utils.files import MAX_TEXT_BYTES, read_input

LOGITS_AT_ONCE = 1 << 24  # numbers in one slice of logits: 64 MiB in fp32, several of which exist at a time
STREAM_BYTES = 1 << 30  # of residual streams; more windows take another pass over the layers


class ScoredModel(Protocol):
    """A model to measure: a `StreamedModel`, or a `ResidentModel` with portable bits."""

    folder: ModelFolder
    placement: Placement
    config: ModelConfig

    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        """Return what `logits` reads, [windows, context, width] for int64 [windows, context]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 [rows, vocabulary] for [rows, width]."""
        ...


@dataclass(frozen=True)
class TokenWindows:
    windows: Tensor
    begins_with_bos: bool
    sha256: str  # of the text as bytes


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error, None for a single window."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Divergence:
    """The divergence of a model Q from a reference P over all scored tokens; natural logarithms."""

    kl: Mean  # mean of KL(P || Q), the whole vocabulary
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top1: Mean  # share of tokens for which both have the same most likely one
    rms_dp: float  # root mean square of the change in probability of the actual token
    reference_perplexity: Mean


@dataclass(frozen=True)
class Evaluation:
    perplexity: Mean
    divergence: Divergence | None
    windows: int
    context: int
    scored_tokens: int
    begins_with_bos: bool
    dtype: str
    text_sha256: str


def held_out_text() -> str:
    """The bundled text that the bundled model was not trained on."""
    return (resources.files("mycli.runtime") / "pico" / "held-out.txt").read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """Read a UTF-8 file or pipe of at most `MAX_TEXT_BYTES`. Raises NotFoundError or UsageError."""
    data = read_input(path, MAX_TEXT_BYTES, pipes=True)
    try:
        # As a file opened in text mode.
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", "convert it with iconv") from None


def cut(text: str, tokenizer: Tokenizer, context: int, limit: int | None = None) -> TokenWindows:
    """Windows of `context` tokens, at most `limit` tokens in all. Raises UsageError for less than one window."""
    if context < 2:
        raise UsageError(f"windows of {context} tokens are too short: each needs two", code="larger-windows")
    ids: list[int] = []
    for start in range(0, len(text), MAX_TEXT):
        if limit is not None and len(ids) >= limit:
            break
        ids += tokenizer.encode(text[start : start + MAX_TEXT], add_special=start == 0)
    count = min(len(ids), limit or len(ids)) // context
    if limit is not None and limit < context:
        raise UsageError(
            f"a limit of {limit} tokens is less than one window of {context}", code="more-tokens-or-less-context"
        )
    if count == 0:
        raise UsageError(
            f"the text has {len(ids)} tokens, fewer than one window of {context}",
            code="longer-text-or-less-context",
        )
    windows = torch.tensor(ids[: count * context], dtype=torch.int64).view(count, context)
    begins = tokenizer.bos is not None and ids[0] == tokenizer.bos
    return TokenWindows(windows, begins, hashlib.sha256(text.encode()).hexdigest())


def evaluate(
    model: ScoredModel, text: TokenWindows, reference: ScoredModel | None = None, progress: ReportProgress = silent
) -> Evaluation:
    """Score `model` on `text`, and measure its divergence from `reference` if there is one.

    Raises UsageError for windows longer than a model's context and for different vocabularies, ModelError for logits
    that are not finite.
    """
    return evaluate_each([model], text, reference, progress)[0]


def evaluate_each(
    models: Sequence[ScoredModel],
    text: TokenWindows,
    reference: ScoredModel | None,
    progress: ReportProgress = silent,
    *,
    same_blocks: bool = False,
) -> list[Evaluation]:
    """Score each of `models` as `evaluate` does; the reference runs once for all.

    same_blocks: `models` differ in nothing but their heads, so that the blocks of the first run for all.
    """
    run = models[:1] if same_blocks else models
    every = [*run] if reference is None else [*run, reference]
    windows, context = text.windows.shape
    for config in (streamed.config for streamed in every):
        if context > config.max_context:
            raise UsageError(
                f"windows of {context} tokens exceed the model's context of {config.max_context}", code="less-context"
            )
        require_same_vocabulary(models[0].config, config)
    row_bytes = context * sum(streamed.config.stream_width * streamed.placement.dtype.itemsize for streamed in every)
    scores: list[list[dict[str, Tensor]]] = [[] for _ in models]
    at_once = max(1, STREAM_BYTES // row_bytes)
    for start in range(0, windows, at_once):
        part = text.windows[start : start + at_once]
        streams = [
            streamed.hidden(part, _numbered(progress, number, len(every))) for number, streamed in enumerate(every, 1)
        ]
        if same_blocks:
            streams = [streams[0]] * len(models) + streams[1:]
        trim_heap(mmap_threshold=4 << 20)  # scores lie between slices of logits, so malloc could never return those
        for index, tokens in enumerate(part):
            inputs = [(model, stream[index]) for model, stream in zip(models, streams, strict=False)]
            compared = None if reference is None else (reference, streams[-1][index])
            for score, rows in zip(_score(inputs, compared, tokens), scores, strict=True):
                rows.append(score)
            progress("windows", len(scores[0]), windows)
        trim_heap()
    return [_evaluation(model, text, rows) for model, rows in zip(models, scores, strict=True)]


def _numbered(progress: ReportProgress, number: int, count: int) -> ReportProgress:
    """Name the model in the stage where several run one after the other."""
    if count == 1:
        return progress
    return lambda stage, done, total: progress(f"{stage} of model {number} of {count}", done, total)


def require_same_vocabulary(first: ModelConfig, second: ModelConfig) -> None:
    """Raise UsageError for models whose predictions cannot be compared."""
    if first.vocab_size != second.vocab_size:
        sizes = f"{first.vocab_size} and {second.vocab_size}"
        raise UsageError(f"models with vocabularies of {sizes} tokens cannot be compared", "")


def _evaluation(model: ScoredModel, text: TokenWindows, scores: Sequence[dict[str, Tensor]]) -> Evaluation:
    columns = {name: torch.stack([score[name] for score in scores]) for name in scores[0]}  # [windows, context - 1]
    windows, context = text.windows.shape
    return Evaluation(
        perplexity=_perplexity(columns["nll"]),
        divergence=_divergence(columns) if "kl" in columns else None,
        windows=windows,
        context=context,
        scored_tokens=windows * (context - 1),
        begins_with_bos=text.begins_with_bos,
        dtype=model.placement.dtype_name,
        text_sha256=text.sha256,
    )


def activation_models(folder: ModelFolder, placement: Placement) -> dict[Activations, StreamedModel]:
    """Return a packed model in bf16 with activations of 16 and of 8 bits; empty if no CPU kernel multiplies it."""
    kinds: tuple[Activations, ...] = "16", "8"
    placements = [replace(placement, dtype=torch.bfloat16, activations=kind) for kind in kinds]
    models = [StreamedModel(folder, precision) for precision in placements]
    if models[0].activations is None:
        return {}
    if "lm_head" not in folder.packings:
        models[1].share_head(models[0])
    return dict(zip(kinds, models, strict=True))


def measure_heads(
    folder: ModelFolder, text: TokenWindows, reference: StreamedModel, progress: ReportProgress
) -> dict[Head, Evaluation]:
    """Score a model with the output head of `reference`, and with its own in 8 bits."""
    packed = StreamedModel(folder, reference.placement, reference.at_once)
    dense = StreamedModel(folder, reference.placement, reference.at_once)
    dense.share_head(reference)
    results = evaluate_each([dense, packed], text, reference, progress, same_blocks=True)
    return dict(zip(("keep", "int8"), results, strict=True))


@torch.no_grad()
def _score(
    models: Sequence[tuple[ScoredModel, Tensor]], reference: tuple[ScoredModel, Tensor] | None, tokens: Tensor
) -> list[dict[str, Tensor]]:
    """Score models with their hidden states of one window."""
    step = max(1, LOGITS_AT_ONCE // models[0][0].config.vocab_size)
    scored = len(tokens) - 1
    slices = [slice(start, min(start + step, scored)) for start in range(0, scored, step)]
    parts = [_score_rows(models, reference, tokens, rows) for rows in slices]
    return [
        {name: torch.cat([part[name] for part in scores]) for name in scores[0]} for scores in zip(*parts, strict=True)
    ]


def _score_rows(
    models: Sequence[tuple[ScoredModel, Tensor]],
    reference: tuple[ScoredModel, Tensor] | None,
    tokens: Tensor,
    rows: slice,
) -> list[dict[str, Tensor]]:
    # The reference predicts once for all models. Slices of logits are freed on return.
    targets = tokens[rows.start + 1 : rows.stop + 1].unsqueeze(1)
    predicted = (_Predicted.of(model, stream, rows, targets) for model, stream in models)
    if reference is None:
        return [{"nll": -ours.chosen} for ours in predicted]
    theirs = _Predicted.of(*reference, rows, targets)
    likeliest = theirs.logs.argmax(1).cpu()
    return [
        _compared(ours, theirs, likeliest, model.placement.portable)
        for ours, (model, _) in zip(predicted, models, strict=True)
    ]


class _Predicted(NamedTuple):
    """Log-probabilities fp32 [rows, vocabulary], and those of the actual tokens [rows] on the host."""

    logs: Tensor
    chosen: Tensor

    @classmethod
    def of(cls, model: ScoredModel, stream: Tensor, rows: slice, targets: Tensor) -> "_Predicted":
        logs = _log_probabilities(model, stream[rows])
        return cls(logs, logs.gather(1, targets.to(logs.device)).squeeze(1).cpu())


def _compared(ours: _Predicted, theirs: _Predicted, likeliest: Tensor, portable: bool) -> dict[str, Tensor]:
    # Overwrites the log-probabilities of `ours`, whose likeliest tokens are therefore found first.
    exponential = portable_math.exponential if portable else torch.exp
    return {
        "nll": -ours.chosen,
        "same": (ours.logs.argmax(1).cpu() == likeliest).float(),
        "dp": (exponential(ours.chosen.double()) - exponential(theirs.chosen.double())).float(),
        "reference_nll": -theirs.chosen,
        "kl": (_portable_kl if portable else _kl)(ours.logs, theirs.logs.to(ours.logs.device)),
    }


@torch.no_grad()
def token_divergence(
    model: StreamedModel, hidden: Tensor, reference: StreamedModel, reference_hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(reference || model) and whether the likeliest token is the same, fp32 [rows] each, for rows [rows, hidden]."""
    kl, same = [], []
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for start in range(0, len(hidden), at_once):
        rows = slice(start, start + at_once)
        ours = _log_probabilities(model, hidden[rows])
        theirs = _log_probabilities(reference, reference_hidden[rows]).to(ours.device)
        same.append((ours.argmax(1) == theirs.argmax(1)).float().cpu())
        kl.append(_kl(ours, theirs))
    return torch.cat(kl), torch.cat(same)


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:
    # Overwrites `ours`. Rounding can make a divergence of zero negative.
    return ours.neg_().add_(theirs).mul_(theirs.exp()).sum(1).clamp_(min=0).cpu()


def _portable_kl(ours: Tensor, theirs: Tensor) -> Tensor:
    p = theirs.double()
    return portable_math.total((p - ours.double()) * portable_math.exponential(p)).clamp_(min=0).float()


def _log_probabilities(model: ScoredModel, hidden: Tensor) -> Tensor:
    logits = model.logits(hidden)
    low, high = torch.aminmax(logits)  # NaN or infinite if any logit is; isfinite(logits) would copy
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ModelError(
            f"{model.folder.path}: logits are not finite in {model.placement.dtype}",
            code="verify-files-or-fp32",
        )
    return portable_math.log_softmax(logits) if model.placement.portable else logits.log_softmax(1)


def _estimate(values: Tensor) -> Mean:
    # Tokens of one window are not independent, so windows are the unit of the standard error.
    means = [portable_math.mean(window) for window in values.tolist()]
    count, middle = len(means), portable_math.mean(means)
    squares = math.fsum((mean - middle) ** 2 for mean in means)
    return Mean(middle, math.sqrt(squares / (count - 1) / count) if count > 1 else None)


def _perplexity(nll: Tensor) -> Mean:
    mean = _estimate(nll)
    value = portable_math.exp_of(mean.value)
    return Mean(value, None if mean.error is None else value * mean.error)


def _divergence(columns: dict[str, Tensor]) -> Divergence:
    kl = columns["kl"].double().flatten()
    ordered = kl.sort().values
    return Divergence(
        kl=_estimate(columns["kl"]),
        kl_median=float(ordered[(len(ordered) - 1) // 2]),
        kl_p99=float(ordered[math.ceil(0.99 * len(ordered)) - 1]),
        kl_max=float(ordered[-1]),
        same_top1=_estimate(columns["same"]),
        rms_dp=math.sqrt(portable_math.mean(dp * dp for dp in columns["dp"].flatten().tolist())),
        reference_perplexity=_perplexity(columns["reference_nll"]),
    )
