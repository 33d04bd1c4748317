"""Options that go together, as records: how a model is run, and how its tokens are drawn.

A parameter of a command that is annotated with one of them stands for all of its options (`cli.command`); a record
resolves itself to what `runtime` is asked for. This is the one place where flags become settings.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mycli.cli import options
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import Dtype, Kv

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.models.generation_config import GenerationDefaults
    from mycli.runtime.sampling.params import SamplingParams

DTYPES: dict[str, Dtype | None] = {"auto": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KV: tuple[Kv, ...] = ("auto", "bf16", "int8")


@dataclass(frozen=True)
class LoadFlags:
    """How a model is run, as it was typed."""

    draft: options.Draft = "none"
    context: options.Context = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    kv: options.Kv = "auto"
    shadow: options.Shadow = False
    allow_nonfinite: options.AllowNonfinite = False

    def resolve(self, sequences: int = 1) -> EngineConfig:
        """What is asked of the engine. Raises UsageError for a precision or kind of cache that there is not."""
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: not a precision", f"choose from {', '.join(DTYPES)}")
        kind = next((kind for kind in KV if kind == self.kv), None)
        if kind is None:
            raise UsageError(f"--kv {self.kv}: not a kind of cache", f"choose from {', '.join(KV)}")
        return EngineConfig(
            device=self.device,
            dtype=DTYPES[self.dtype],
            kv=kind,
            context=self.context,
            sequences=sequences,
            draft=None if self.draft == "none" else self.draft,
            dense_prefill_copy=self.shadow,
            allow_nonfinite=self.allow_nonfinite,
        )


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn, as it was typed; None: as the model recommends."""

    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    repetition_penalty: options.RepetitionPenalty = None
    seed: options.Seed = None
    logit_bias: options.LogitBias = None
    stop: options.Stop = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a reply."""
        return tuple(self.stop or ())

    def resolve(self, defaults: "GenerationDefaults") -> "SamplingParams":
        """These over what the model recommends over greedy. Raises UsageError for a value that cannot be."""
        from mycli.runtime.sampling.params import SamplingParams

        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        recommended: dict[str, Any] = {}
        if defaults.do_sample is not False:
            recommended = {name: getattr(defaults, name) for name in names}
            if defaults.temperature is None:  # only top-p or top-k: it samples at temperature 1, as transformers does
                recommended["temperature"] = float(bool(defaults.do_sample))
        given = {name: getattr(self, name) for name in (*names, "seed")}
        if self.logit_bias:
            given["logit_bias"] = options.parse_biases(self.logit_bias)
        chosen = SamplingParams()
        for values in (recommended, given):
            chosen = replace(chosen, **{name: value for name, value in values.items() if value is not None})
        return chosen
