"""Finds the models of a server for several, and plans the memory of each before weights are read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from mycli.cli.command import Call, command_line
from mycli.cli.flags.address import AddressFlags, alias_names
from mycli.cli.flags.config_file import MODEL, config_path, option_key, read_served_models
from mycli.cli.flags.options import parse_duration
from mycli.cli.flags.records import FULL_LENGTH, LoadFlags, PrefixCacheFlags
from mycli.cli.flags.several import SeveralModelsFlags, setting_words
from mycli.cli.load import adapted, open_config
from mycli.cli.main import find_command, option_keys
from mycli.runtime.checkpoint.gguf_parts import part_number
from mycli.runtime.device.probe import Target, find_target
from mycli.runtime.device.system import memory
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.sizing import fitting_plan, requested_plan
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import is_path
from mycli.runtime.hub.store import BUILT_IN, state_dir
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.open import check_context, draft_folder
from mycli.runtime.server.ollama.card import ModelCard, model_card
from mycli.runtime.server.router.model import ROUTER_BYTES, SERVER_BYTES, RoutedModel
from mycli.runtime.utils.files import expand_user

_OWN_KEYS = (MODEL, "pin", "idle")
_FREE_SHARE = 0.9  # share of free memory for models; the rest is for the page cache of weights and other programs


@dataclass(frozen=True)
class ModelRequest:
    """A model to serve. settings: its table of config.toml; required: an error ends the command."""

    name: str
    source: str
    settings: Mapping[str, Any]
    required: bool = True


def requested_models(models: Sequence[str], several: SeveralModelsFlags) -> list[ModelRequest]:
    """Return the models of the command line, of config.toml and of --models-dir. Raises UsageError.

    config.toml adds its models only if nothing else is named.
    """
    tables = read_served_models(config_path(), _model_keys())
    requests = [
        ModelRequest(Path(name).name, str(tables.get(name, {}).get(MODEL, name)), tables.get(name, {}))
        for name in models
    ]
    if several.models_dir is not None:
        listed = list(_models_in(expand_user(several.models_dir).absolute()))
        if not listed:
            raise UsageError(
                f"{several.models_dir} contains no models", "name a folder of model folders or .gguf files"
            )
        requests += [ModelRequest(name, str(path), tables.get(name, {}), False) for name, path in listed]
    if not requests:
        requests = [ModelRequest(name, str(table.get(MODEL, name)), table, False) for name, table in tables.items()]
    if not requests:
        raise UsageError("no model to serve", "name one: mycli serve MODEL; or add [models.NAME] to config.toml")
    return requests


def is_configured(name: str) -> bool:
    """Return whether config.toml has a table for a model of this name. Raises UsageError for an invalid file."""
    return name in read_served_models(config_path(), _model_keys())


def _model_keys() -> list[str]:
    # Options of `mycli serve` that concern one model, not the address that all share.
    chosen = {entry.name for record in (LoadFlags, PrefixCacheFlags) for entry in fields(record)}
    chosen |= {"max_sequences", "aliases", "reasoning_budget", "extra_properties"}
    return [*_OWN_KEYS, *(key for key, parameter in option_keys("serve").items() if parameter in chosen)]


def _models_in(folder: Path, depth: int = 2) -> Iterator[tuple[str, Path]]:
    # Model folders and .gguf files, also one level deeper, as org/name.
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "name a folder that holds models") from None
    for path in entries:
        if path.name.startswith("."):
            continue
        if path.suffix == ".gguf" and part_number(path.name) in (None, 1):
            yield path.stem, path
        elif (path / "config.json").is_file():
            yield path.name, path
        elif path.is_dir() and depth > 1:
            yield from _models_in(path, depth - 1)


@dataclass(frozen=True)
class Catalog:
    """Builds the models of a server for several from the options of the command line."""

    call: Call
    address: AddressFlags
    several: SeveralModelsFlags
    words: Sequence[str]  # options for all models
    sockets: Path

    def routed(self, requests: Sequence[ModelRequest]) -> tuple[list[RoutedModel], dict[str, int]]:
        """Return the models, and the memory limit of each place in bytes. Raises UserError."""
        rooms: dict[str, int] = {}
        models = [self.routed_model(request, str(index), rooms) for index, request in enumerate(requests)]
        names: dict[str, str] = {}
        for model in models:
            for name in model.names:
                if name in names:
                    raise UsageError(f"two models are called {name}", "give one another name: [models.NAME]")
                names[name] = model.name
        for pin in self.several.pinned or ():
            if Path(pin).name not in names:
                raise UsageError(f"--pin {pin}: not one of the models", f"the models are: {', '.join(names)}")
        return models, rooms

    def routed_model(self, request: ModelRequest, label: str, rooms: dict[str, int]) -> RoutedModel:
        """Return one model, with a socket called `label`; its place is added to `rooms`. Raises UserError."""
        words = [*self.words, *setting_words({k: v for k, v in request.settings.items() if k not in _OWN_KEYS})]
        loading, parameters = self._parse(request, words)
        socket = self.sockets / f"{label}.sock"
        aliases = [*alias_names(parameters["aliases"]), request.name]
        pinned = bool(request.settings.get("pin")) or request.name in map(_last, self.several.pinned or ())
        model = RoutedModel(
            tuple(dict.fromkeys([request.name, *aliases])), (), socket, pinned=pinned, idle=self._idle(request)
        )
        target = find_target(loading.device or "auto", state_dir())
        room = rooms.setdefault(target.place, self._room(target))
        try:
            context, nbytes, card = self._plan(request, loading, target, room)
        except (ModelError, NotFoundError) as error:
            if request.required:
                raise
            self.call.out.warn(f"{request.name} cannot be served: {error.message}")
            return replace(model, place=target.place, problem=error.message)
        words = [*(word for name in model.names for word in ("--alias", name)), *words]
        limit = room - (0 if target.gpu else SERVER_BYTES)
        command = command_line("serve", request.source, *words, "--memory", f"{limit}B")
        command += ["--unix-socket", str(socket), "--supervised", "--json", *self._global_words()]
        stored = request.source if not is_path(request.source) and request.source not in BUILT_IN else ""
        model = replace(model, removable=stored)
        return replace(model, command=tuple(command), place=target.place, nbytes=nbytes, context=context, card=card)

    def _global_words(self) -> Iterable[str]:
        log_format = self.address.log_format or ("text" if self.call.out.verbose else None)
        words = [] if log_format is None else ["--log-format", log_format]
        words += ["--max-waiting", str(self.address.waiting), "--grace", str(self.address.grace)]
        return words + (["--offline"] if self.call.offline else [])

    def _parse(self, request: ModelRequest, words: Sequence[str]) -> tuple[EngineConfig, Mapping[str, Any]]:
        # Parsed by the command itself, so that config.toml accepts exactly the options of `serve`, with their checks.
        try:
            parameters = find_command("serve").make_context("serve", [request.source, *words]).params
        except typer.TyperException as error:
            parameter: Any = getattr(error, "param", None)
            key = "" if parameter is None else f" {option_key(parameter.opts)}"
            raise UsageError(f"[models.{request.name}]{key}: {error}", f"edit {config_path()}") from None
        loading, prefix = _record(LoadFlags, parameters), _record(PrefixCacheFlags, parameters)
        running = parameters["max_sequences"]
        return prefix.resolve(loading.resolve(min(running, FULL_LENGTH), running)), parameters

    def _idle(self, request: ModelRequest) -> float | None:
        value = request.settings.get("idle")
        try:
            return self.several.idle if value is None else parse_duration(value)
        except typer.BadParameter as error:
            raise UsageError(f"[models.{request.name}] idle: {error.message}", f"edit {config_path()}") from None

    def _room(self, target: Target) -> int:
        free = target.free if target.gpu else memory().available
        room = int(free * _FREE_SHARE) if self.several.memory is None else self.several.memory
        return room if target.gpu else room - ROUTER_BYTES

    def _plan(
        self, request: ModelRequest, engine: EngineConfig, target: Target, room: int
    ) -> tuple[int, int, ModelCard]:
        # The context that the model gets, its bytes and its description.
        folder = adapted(self.call, open_config(self.call, request.source, fetch=False), request.source, engine.adapter)
        check_context(folder, engine.context)
        draft = draft_folder(folder, engine.draft, lambda name: open_config(self.call, name, fetch=False))
        server = 0 if target.gpu else SERVER_BYTES
        requested = requested_plan(folder, engine, draft, gpu=target.gpu)
        plan = fitting_plan(requested, engine, room - server - estimate(requested).runtime)
        return plan.context, estimate(plan).total + server, model_card(folder)


def _record(kind: Any, parameters: Mapping[str, Any]) -> Any:
    return kind(**{entry.name: parameters[entry.name] for entry in fields(kind)})


def _last(name: str) -> str:
    return Path(name).name
