"""The options of `mycli quantize` that fail it when the result is too bad."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mycli.cli.flags import options
from mycli.quant.calls.record import CallQuality
from mycli.runtime.errors import GateError, UsageError

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.pipeline import Outcome


@dataclass(frozen=True)
class Gates:
    """Limits that end the command with exit code 6 when the result exceeds them; None: no limit."""

    max_kl: Annotated[float | None, options.option("--max-kl", "X", "Exit with 6 if the mean KL is above this.")] = None
    max_call_loss: Annotated[
        float | None,
        options.option(
            "--max-call-loss",
            "SHARE",
            "Exit with 6 if valid tool calls get lost in a larger share of the built-in prompts.",
            min=0,
            max=1,
        ),
    ] = None
    max_fallback: Annotated[
        float,
        options.option(
            "--max-fallback", "SHARE", "Exit with 6 if a larger share of layers could only be rounded.", min=0, max=1
        ),
    ] = 0.05

    @property
    def measured(self) -> bool:
        """Return True if a limit needs a quality measurement."""
        return self.max_kl is not None or self.max_call_loss is not None

    def check_values(self, report: str) -> None:
        """Raise UsageError for limits that `--report` does not measure or that nothing can keep."""
        if self.measured and report == "none":
            option = "--max-call-loss" if self.max_kl is None else "--max-kl"
            raise UsageError(f"{option} needs a quality measurement", "omit --report none")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise UsageError(f"--max-kl {self.max_kl} must be above 0", "for example: --max-kl 0.05")

    def check(self, outcome: "Outcome") -> None:
        """Raise GateError for a result that exceeds a limit."""
        kl, calls, written = outcome.report.kl, outcome.report.calls, f"the model was written to {outcome.folder}"
        if self.max_kl is not None and kl is not None and kl > self.max_kl:
            raise GateError(
                f"the mean KL of {kl:.4g} is above --max-kl {self.max_kl:g}",
                f"use more --bits or a smaller --group; {written}",
            )
        if self.max_call_loss is not None:
            if calls is None or calls.loss is None:
                raise GateError(f"--max-call-loss: {_why_no_loss(calls)}", f"omit --max-call-loss; {written}")
            if calls.loss > self.max_call_loss:
                raise GateError(
                    f"valid calls fell by {calls.loss:.1%} of the prompts, more than --max-call-loss"
                    f" {self.max_call_loss:g}",
                    f"use more --bits or a smaller --group; {written}",
                )
        if outcome.fallbacks > self.max_fallback * len(outcome.layers):
            raise GateError(
                f"{outcome.fallbacks} of {len(outcome.layers)} layers were only rounded, more than --max-fallback"
                f" {self.max_fallback:g}",
                f"use more or other calibration text; {written}",
            )


def _why_no_loss(calls: CallQuality | None) -> str:
    if calls is None:
        return "the model's chat template has no format for calls"
    if calls.before is None:
        return calls.skipped or "its replies were not measured"
    return f"the original itself replies with valid calls to 0 of {calls.prompts} prompts"
