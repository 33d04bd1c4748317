"""One model of a server for several: its names, the command of its process, and its memory."""

from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.server.ollama.card import ModelCard

# Memory of the server around a model: HTTP, tokenizer, grammars and two helper processes; see docs/server.md.
SERVER_BYTES = 96 << 20
ROUTER_BYTES = 64 << 20  # of the router process


@dataclass(frozen=True)
class RoutedModel:
    """A model that is loaded on request.

    names: accepted in requests, the first is shown; command: starts its server on `socket`; place: the memory it uses,
    cpu or cuda:N; nbytes: its estimated use of that memory, server process included; context: tokens; pinned: loaded at
    start, never unloaded for another model; idle: seconds without a request until it is unloaded, None: never; problem:
    why it cannot be loaded, "" if no reason is known; card: for clients of Ollama; removable: the name under which it
    is stored, "" if it must not be deleted.
    """

    names: tuple[str, ...]
    command: tuple[str, ...]
    socket: Path
    place: str = "cpu"
    nbytes: int = 0
    context: int = 0
    pinned: bool = False
    idle: float | None = None
    created: int = 0
    problem: str = ""
    card: ModelCard = ModelCard()
    removable: str = ""

    @property
    def name(self) -> str:
        return self.names[0]
