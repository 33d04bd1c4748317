"""The settings of a server: model names, access and limits."""

from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.server.http.keys import ApiKey, KeyTable
from mycli.runtime.server.http.request_log import LogFormat
from mycli.runtime.server.ollama.card import ModelCard

# From the server that passes a request on: the client's address, and the share of its key.
CLIENT_HEADER = "x-mycli-client"
SHARE_HEADER = "x-mycli-share"


@dataclass(frozen=True)
class ServerLimits:
    """The limits for one client, in bytes, seconds and counts.

    header_seconds, body_seconds: to send the head and the body of a request; stall_seconds: a connection is closed
    when its client reads next to nothing for this long; queue_seconds: to wait for the first token; ping_seconds:
    between the comments that keep a silent stream open; grace_seconds: for running replies at shutdown.
    """

    body_bytes: int = 4 << 20
    header_bytes: int = 64 << 10
    headers: int = 128
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: int = 75
    stall_seconds: float = 30.0
    queue_seconds: float = 600.0
    ping_seconds: float = 15.0
    grace_seconds: float = 30.0
    connections: int = 1024
    waiting: int = 256  # replies without a first token, of all clients
    choices: int = 64  # replies to one request, all its prompts together


@dataclass(frozen=True)
class ServerSettings:
    """names: accepted as `model` in requests, the first for requests without one; key: None to serve without a key.

    hosts: host names accepted besides localhost and IP addresses; origins: other sites whose pages may use the server;
    extra_properties: replies may have properties that a JSON schema does not name; log_format: of the line per request;
    reasoning_budget, deadline: tokens of reasoning and seconds of a reply where a request sets none, None for any;
    replies: the folder in which replies are recorded, None for no records; supervised: requests come from this user's
    own server for several models, which has checked them; card: of the model, for clients of Ollama; keys: of several
    users, besides `key`.
    """

    names: tuple[str, ...]
    key: bytes | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    extra_properties: bool = False
    limits: ServerLimits = ServerLimits()
    log_format: LogFormat = "text"
    reasoning_budget: int | None = None
    deadline: float | None = None
    replies: Path | None = None
    supervised: bool = False
    card: ModelCard = ModelCard()
    keys: tuple[ApiKey, ...] = ()


def untagged(name: str) -> str:
    """Return a model's name without the tag that clients of Ollama append."""
    return name.removesuffix(":latest")


class ServerState:
    """The settings and counts of a server, whether it runs a model itself or passes requests on."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.keys = KeyTable(settings.keys)
        self.draining = False
        self.requests = 0  # POST requests from their head to the end of their response

    @property
    def name(self) -> str:
        return self.settings.names[0]
