"""Records of related options: `cli.command` gives a command all options of a record, `resolve` returns settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from mycli.cli.flags import options
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.generation_config import GenerationDefaults
from mycli.runtime.quantization.activations import Activations
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.tokenizer.chat_template import (
    MAX_TEMPLATE_BYTES,
    Effort,
    TemplateOptions,
    effort_arguments,
)
from mycli.runtime.utils.dtypes import FLOATS, PromptCopy
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.json_fields import strict_json

_DEFAULT = "the model's"
_HOT = 2.0  # the largest temperature of OpenAI's API; llama.cpp's -t is the number of threads
# The cache has room for at most 8 contexts of full length, however many replies share it: few replies are that long.
FULL_LENGTH = 8
MAX_SEQUENCES = 32  # replies that a server generates concurrently
KV: tuple[KvDtype, ...] = get_args(KvDtype)
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ACTIVATION_KINDS: tuple[Activations, ...] = get_args(Activations)


@dataclass(frozen=True)
class RunFlags:
    """The device and the data types of a model, as typed."""

    adapter: options.AdapterName = None
    device: options.Device = "auto"
    threads: options.Threads = None  # for the help; `cli.command` sets it, before torch is imported
    dtype: options.Precision = "auto"
    kv: options.CacheKind = "auto"
    activations: options.ActivationKind = "auto"
    portable_bits: options.PortableBits = False
    shadow: options.Shadow = False
    fp8_prompts: options.Fp8Prompts = False
    expert_memory: options.ExpertMemory = None

    def resolve(self, sequences: int = 1, running: int | None = None) -> EngineConfig:
        """Return the settings of the engine. Raises UsageError for an unknown data type."""
        dtype = options.choice("--dtype", self.dtype, ("auto", *FLOATS))
        return EngineConfig(
            device=self.device,
            dtype=FLOATS.get(dtype),
            kv=options.choice("--kv", self.kv, KV),
            activations=options.choice("--activations", self.activations, ACTIVATION_KINDS),
            portable=self.portable_bits,
            sequences=sequences,
            running=running,
            prompt_copy=self._prompt_copy(),
            adapter=self.adapter,
            expert_bytes=self.expert_memory,
        )

    def _prompt_copy(self) -> PromptCopy:
        if self.shadow and self.fp8_prompts:
            raise UsageError("--shadow and --fp8-prompts both choose the weights for prompts", "omit one")
        return "fp8" if self.fp8_prompts else "16bit" if self.shadow else "none"


@dataclass(frozen=True)
class LoadFlags(RunFlags):
    """How a model is loaded and run, as typed."""

    draft: options.Draft = "none"
    context: options.Context = None
    allow_nonfinite: Annotated[bool, options.flag("--allow-nonfinite", "Accept NaN and infinite weights.")] = False

    def resolve(self, sequences: int = 1, running: int | None = None) -> EngineConfig:
        return replace(
            super().resolve(sequences, running),
            context=self.context,
            draft=None if self.draft == "none" else self.draft,
            allow_nonfinite=self.allow_nonfinite,
        )


@dataclass(frozen=True)
class PrefixCacheFlags:
    """The disk prefix cache, as typed."""

    folder: Annotated[
        Path | None, options.option("--prefix-cache-dir", "DIR", "Keep the prefix cache on disk in this folder.")
    ] = None
    size: Annotated[
        int | None, options.size("--prefix-cache-size", "Maximum size of that folder.", show_default="8GiB")
    ] = None

    def resolve(self, engine: EngineConfig) -> EngineConfig:
        """Return `engine` with the disk prefix cache. Raises UsageError for a size without a folder."""
        if self.folder is None:
            if self.size is not None:
                raise UsageError("--prefix-cache-size needs --prefix-cache-dir", "add --prefix-cache-dir DIR")
            return engine
        folder = expand_user(self.folder).absolute()
        return replace(engine, prefix_folder=folder, prefix_bytes=self.size or engine.prefix_bytes)


@dataclass(frozen=True)
class TemplateFlags:
    """The chat template and its arguments, as typed."""

    chat_template: Annotated[
        str | None,
        options.option(
            "--chat-template",
            "FILE|NAME",
            "Use the chat template in this file, or another of the model's own by its name.",
            show_default=_DEFAULT,
        ),
    ] = None
    template_arg: Annotated[
        list[str] | None,
        options.option(
            "--template-arg",
            "NAME=VALUE",
            "Set a variable of the chat template, such as enable_thinking=false; VALUE is JSON or text; repeatable.",
        ),
    ] = None
    reasoning_effort: Annotated[
        str | None,
        options.words(
            "--reasoning-effort",
            EFFORTS,
            f"Tell the chat template how much to reason: {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}.",
            metavar="LEVEL",
        ),
    ] = None

    @property
    def used(self) -> bool:
        return self != TemplateFlags()

    def resolve(self) -> TemplateOptions:
        """Return the template and its arguments. Raises UsageError for an unreadable file or argument."""
        source, name = None, self.chat_template
        if name is not None and ("/" in name or name.endswith(".jinja") or Path(name).is_file()):
            from mycli.runtime.utils.files import read_input

            try:
                source, name = read_input(Path(name), MAX_TEMPLATE_BYTES).decode(), None
            except UnicodeDecodeError:
                raise UsageError(f"--chat-template {name}: not UTF-8 text", "convert it to UTF-8") from None
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments |= effort_arguments(options.choice("--reasoning-effort", self.reasoning_effort, EFFORTS))
        for text in self.template_arg or ():
            key, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--template-arg {text}: not NAME=VALUE", "for example: enable_thinking=false")
            try:
                arguments[key] = strict_json(value.encode())
            except ValueError:
                arguments[key] = value
        return TemplateOptions(source, name, arguments)


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling settings, as typed; None means the model's generation_config.json."""

    temperature: Annotated[
        float | None, options.option("-t --temperature", "X", "0 is greedy decoding.", show_default=_DEFAULT)
    ] = None
    top_k: Annotated[
        int | None,
        options.option("--top-k", "N", "Sample from the N most likely tokens; 0: all.", show_default=_DEFAULT),
    ] = None
    top_p: Annotated[
        float | None,
        options.option(
            "--top-p", "X", "Sample from the most likely tokens up to this total probability.", show_default=_DEFAULT
        ),
    ] = None
    min_p: Annotated[
        float | None,
        options.option(
            "--min-p", "X", "Drop tokens below this share of the highest probability.", show_default=_DEFAULT
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        options.option("--repetition-penalty", "X", "Values above 1 discourage repetition.", show_default=_DEFAULT),
    ] = None
    presence_penalty: Annotated[
        float | None,
        options.option(
            "--presence-penalty", "X", "Subtract X from the logit of each token in the reply.", show_default="0"
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        options.option("--frequency-penalty", "X", "Subtract X once for each time the token occurs.", show_default="0"),
    ] = None
    seed: Annotated[int | None, options.option("--seed", "N", "Makes sampling repeatable.", show_default="random")] = (
        None
    )
    logit_bias: Annotated[
        list[str] | None,
        options.option("--logit-bias", "ID=BIAS", "Add BIAS to the logit of token ID; -100 bans it; repeatable."),
    ] = None
    stop: Annotated[
        list[str] | None, options.option("--stop", "TEXT", "End the reply before this text; repeatable.")
    ] = None

    def check(self, warn: Callable[[str], None]) -> None:
        """Raise UsageError for an invalid value, before the model is loaded; pass an unlikely one to `warn`."""
        try:
            self.resolve(GenerationDefaults())
        except UsageError as error:
            setting = str(error.data.get("setting", ""))
            if setting not in vars(self):
                raise
            option = f"--{setting.replace('_', '-')}"
            raise error.with_message(option + error.message.removeprefix(setting)) from None
        if self.temperature is not None and self.temperature > _HOT:
            warn(f"temperature {self.temperature:g} makes replies random; the option for CPU threads is --threads")

    def resolve(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return these settings; those not given come from the model, then greedy. Raises UsageError."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values: dict[str, Any] = {name: getattr(self, name) for name in (*names, *penalties)}
        if self.logit_bias:
            values["logit_bias"] = options.parse_biases(self.logit_bias)
        return recommended(defaults).with_overrides(values)


@dataclass(frozen=True)
class ReasoningFlags:
    """The limits of reasoning and of the time for a reply, as typed."""

    budget: Annotated[
        int | None,
        options.count(
            "--reasoning-budget", "Close the reasoning of a reply after N tokens, then answer.", show_default="no limit"
        ),
    ] = None
    deadline: Annotated[
        float | None,
        options.time_span(
            "--deadline",
            "End a reply within TIME (30s, 2m): its reasoning is closed early enough for an answer.",
            show_default="no limit",
        ),
    ] = None
