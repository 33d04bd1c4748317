"""Measure tokens per second of whole random models through the generator, as `mycli bench` does."""

import statistics
from collections.abc import Iterator

from mycli.runtime.device.placement import multiplies_fp8
from mycli.runtime.diagnostics.throughput import Trial, run_trial
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import PromptCopy
from tests.gpu.bench.report import Case, Row
from tests.gpu.bench.shapes import tiny, token_bytes
from tests.gpu.bench.timing import Context
from tests.gpu.bench.weights import model


def cases(context: Context, name: str, config: ModelConfig, packing: Packing | None) -> Iterator[Case]:
    """Yield the cases of one model: replies, prompts, depths, batches, and prompts with unpacked weights last."""
    config = tiny(config) if context.tiny else config
    made, kernels = model(config, packing, context.device)
    label = f"{name}, {packing.name if packing else 'bf16'}, {kernels}"
    trials = [Trial(0, 128), Trial(512, 0), Trial(4096, 0), Trial(0, 128, 2048), Trial(0, 128, 8192)]
    trials += [Trial(0, 128, 0, batch) for batch in (4, 16, 64, 2, 8, 32)]
    for trial in [Trial(0, 4), Trial(16, 0), Trial(0, 4, 8, 2)] if context.tiny else trials:
        yield Case(trial.name, 15, lambda trial=trial: _row(context, label, made, packing, trial))  # type: ignore[misc]
    if packing is not None:
        copies: list[PromptCopy] = ["16bit", "fp8"] if multiplies_fp8(context.device) else ["16bit"]
        for kind in copies:
            made.model.keep_prompt_copies(kind)
            # Passes that captured prompts without the copy would replay those.
            made = ModelRunner(made.model, passes=compile_passes(made.model, "auto", lambda _: None))
            for tokens in (128,) if context.tiny else (512, 4096):
                trial, copied = Trial(tokens, 0), f"{label}, {kind} copy"
                yield Case(
                    f"{trial.name}, {kind} copy",
                    15,
                    lambda trial=trial, label=copied, made=made: _row(context, label, made, packing, trial),  # type: ignore[misc]
                )


def _row(context: Context, label: str, made: ModelRunner, packing: Packing | None, trial: Trial) -> list[Row]:
    result = run_trial(made, trial, context.rounds)
    rate = statistics.median(result.rates)
    row: dict[str, object] = {"model": label, "test": trial.name, "tokens/s": rate, "peak GB": result.peak_bytes / 1e9}
    read = context.limits.get("read GB/s")
    if read and trial.generate:
        nbytes = token_bytes(made.config, packing, trial.depth + trial.generate // 2, trial.sequences)
        row["% of read"] = 100 * rate / trial.sequences * nbytes / 1e9 / read
    return [{**row, **context.clock(), "samples": result.rates}]
