"""Options that go together, as records: how a model is run, and how its tokens are drawn.

A parameter of a command that is annotated with one of them stands for all of its options (`cli.command`); a record
resolves itself to what `runtime` is asked for. This is the one place where flags become settings.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from mycli.cli.flags import options
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.generation_config import GenerationDefaults
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.utils.dtypes import FLOATS

_OURS = "the model's"
FULL_LENGTH = 8  # contexts that many replies share: they are rarely as long
KV: tuple[KvDtype, ...] = get_args(KvDtype)


@dataclass(frozen=True)
class LoadFlags:
    """How a model is run, as it was typed."""

    adapter: options.AdapterName = None
    draft: options.Draft = "none"
    context: options.Context = None
    device: options.Device = "auto"
    threads: options.Threads = None  # for the help: whoever is called with it has told torch (`cli.command`)
    dtype: options.Precision = "auto"
    kv: options.CacheKind = "auto"
    shadow: options.Shadow = False
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Load weights that are NaN or infinite as they are.")
    ] = False
    expert_memory: options.ExpertMemory = None

    def resolve(self, sequences: int = 1, running: int | None = None) -> EngineConfig:
        """What is asked of the engine; `sequences`, `running`: as of `EngineConfig`.

        Raises UsageError for a precision or kind of cache that there is not.
        """
        dtype = options.choice("--dtype", self.dtype, ("auto", *FLOATS), "precision")
        return EngineConfig(
            device=self.device,
            dtype=FLOATS.get(dtype),
            kv=options.choice("--kv", self.kv, KV, "kind of cache"),
            context=self.context,
            sequences=sequences,
            running=running,
            draft=None if self.draft == "none" else self.draft,
            dense_prefill_copy=self.shadow,
            allow_nonfinite=self.allow_nonfinite,
            adapter=self.adapter,
            expert_bytes=self.expert_memory,
        )


@dataclass(frozen=True)
class KeepFlags:
    """What is kept of texts over restarts, as it was typed."""

    folder: Annotated[
        Path | None,
        typer.Option(
            "--prefix-cache-dir", metavar="DIR", help="Keep what was read in this folder, for texts that begin alike."
        ),
    ] = None
    size: Annotated[
        int | None, options.size_option("--prefix-cache-size", help="Most bytes to keep there.", show_default="8GiB")
    ] = None

    def added(self, engine: EngineConfig) -> EngineConfig:
        """`engine`, keeping that. Raises UsageError for a size without a folder."""
        if self.folder is None:
            if self.size is not None:
                raise UsageError("--prefix-cache-size needs --prefix-cache-dir", "add --prefix-cache-dir DIR")
            return engine
        folder = self.folder.expanduser().absolute()
        return replace(engine, prefix_folder=folder, prefix_bytes=self.size or engine.prefix_bytes)


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn, as it was typed; None: as the model recommends."""

    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", metavar="X", help="0 is greedy.", show_default=_OURS)
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="Draw from the k likeliest tokens; 0: all.", show_default=_OURS),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="X", help="Draw from the likeliest that make up this share.", show_default=_OURS
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", metavar="X", help="Drop tokens below this share of the likeliest.", show_default=_OURS),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", metavar="X", help="Above 1 avoids repetition.", show_default=_OURS),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.", show_default="random")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; may be repeated; -100 bans."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the reply before this text; may be repeated."),
    ] = None

    def check(self) -> None:
        """Raises UsageError for a value that cannot be, whatever the model recommends: before it is loaded."""
        try:
            self.resolve(GenerationDefaults())
        except UsageError as error:
            setting = str(error.data.get("setting", ""))
            if setting not in vars(self):
                raise
            option = f"--{setting.replace('_', '-')}"
            raise error.with_message(option + error.message.removeprefix(setting)) from None

    def resolve(self, defaults: GenerationDefaults) -> SamplingParams:
        """These over what the model recommends over greedy. Raises UsageError for a value that cannot be."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.logit_bias:
            given["logit_bias"] = options.parse_biases(self.logit_bias)
        return recommended(defaults).with_given(given)
