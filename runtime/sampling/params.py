"""The sampling settings of a request, each checked against its range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mycli.runtime.errors import UsageError
from mycli.runtime.models.generation_config import GenerationDefaults

GREEDY_BELOW = 1e-5  # a temperature under this would overflow the logits it divides
MAX_BIASES = 1024
MAX_BIAS = 100


def _unfit(setting: str, problem: str, hint: str) -> UsageError:
    return UsageError(f"{setting} {problem}", hint, data={"setting": setting})


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings. Neutral values: top_k 0, top_p 1, min_p 0, penalties 0, but repetition_penalty 1.

    Temperature 0 is greedy. repetition_penalty scales the logits of tokens in prompt and reply; presence_penalty and
    frequency_penalty lower those of tokens in the reply, once and for each occurrence. logit_bias: (token id, addend),
    as in OpenAI's API. Raises UsageError, naming the setting, for a value outside its range.
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
        bounds = {
            "temperature": (0.0, 2.0),
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
                raise _unfit(name, f"{value} is out of range", f"choose between {low:.10g} and {high:.10g}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise _unfit("seed", f"{self.seed} is out of range", "choose a 64-bit integer")
        if len(self.logit_bias) > MAX_BIASES:
            raise _unfit("logit_bias", f"has {len(self.logit_bias)} entries", f"give at most {MAX_BIASES}")
        for token, bias in self.logit_bias:
            if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:  # false for NaN
                remedy = f"a token id, and between -{MAX_BIAS} and {MAX_BIAS}"
                raise _unfit("logit_bias", f"{token}={bias} is out of range", remedy)

    def with_given(self, values: Mapping[str, object]) -> "SamplingParams":
        """Return these settings updated by the values that are not None. Raises UsageError."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]  # checked as they are set

    def for_reply(self, index: int) -> "SamplingParams":
        """Return the settings of reply `index` to one prompt: the seed plus `index`, modulo 2^64."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + index + (1 << 63)) % (1 << 64) - (1 << 63))

    @property
    def counts_replies(self) -> bool:
        """Whether a token depends on how often it came in the reply."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def recommended(defaults: GenerationDefaults) -> SamplingParams:
    """Return the settings that a model recommends; greedy without a recommendation."""
    if defaults.do_sample is False:
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(defaults, name) for name in names}
    if defaults.temperature is None:  # only top-p or top-k: it samples at temperature 1, as transformers does
        values["temperature"] = float(bool(defaults.do_sample))
    return SamplingParams().with_given(values)
