"""The sampling parameters of a request, each checked against its range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mycli.runtime.errors import UsageError
from mycli.runtime.models.generation_config import GenerationDefaults

GREEDY_BELOW = 1e-5  # a temperature under this would overflow the logits it divides
MAX_TEMPERATURE = 100.0
MAX_BIASES = 1024
MAX_BIAS = 100


def _invalid(setting: str, problem: str, hint: str) -> UsageError:
    # The caller replaces the setting's name by that of its option or JSON field, so the data hold it.
    return UsageError(f"{setting} {problem}", hint, data={"setting": setting})


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters. The default is greedy, without filters and penalties.

    `repetition_penalty` scales the logits of tokens in the prompt or reply; `presence_penalty` is subtracted once for
    tokens in the reply, `frequency_penalty` once per occurrence. `logit_bias`: (token id, bias), added before anything
    else. Raises UsageError, with the name of the parameter, for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        # The ranges of OpenAI's API where it has the parameter, except the temperature: Ollama has no limit to it.
        bounds = {
            "temperature": (0.0, MAX_TEMPERATURE),
            "top_k": (0, 1 << 31),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 10.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise _invalid(name, f"{value} is out of range", f"choose between {low:.10g} and {high:.10g}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise _invalid("seed", f"{self.seed} is out of range", "choose a 64-bit integer")
        if len(self.logit_bias) > MAX_BIASES:
            raise _invalid("logit_bias", f"has {len(self.logit_bias)} entries", f"use at most {MAX_BIASES}")
        for token, bias in self.logit_bias:
            if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:  # false for NaN
                remedy = f"use a token id of at least 0 and a bias between -{MAX_BIAS} and {MAX_BIAS}"
                raise _invalid("logit_bias", f"{token}={bias} is out of range", remedy)

    def with_overrides(self, values: Mapping[str, object]) -> "SamplingParams":
        """Return a copy with the `values` that are not None. Raises UsageError, as the class does.

        Biases are appended to those of the model, whose suppressed tokens remain suppressed.
        """
        changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        changes["logit_bias"] = (*self.logit_bias, *changes.get("logit_bias", ()))
        return replace(self, **changes)

    def for_reply(self, index: int) -> "SamplingParams":
        """Return the parameters of reply `index` to one prompt: the seed, if set, plus `index`, modulo 2^64."""
        if self.seed is None:
            return self
        return replace(self, seed=following_seed(self.seed, index))

    @property
    def counts_replies(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def following_seed(seed: int, index: int) -> int:
    """Return the seed of reply `index` to one prompt, as a signed 64-bit integer."""
    return (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)


def recommended(defaults: GenerationDefaults) -> SamplingParams:
    """Return the parameters of generation_config.json; greedy where it has none."""
    # A bias costs the passes that sample by themselves, so only models that suppress tokens have one.
    suppressing = SamplingParams(logit_bias=tuple((token, -MAX_BIAS) for token in defaults.suppressed))
    if defaults.do_sample is False:
        return suppressing
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(defaults, name) for name in names}
    if defaults.temperature is None:  # only top-p or top-k: it samples at temperature 1, as transformers does
        values["temperature"] = float(bool(defaults.do_sample))
    return suppressing.with_overrides(values)
