"""What a server was asked to be: addresses, names, who may use it, and its limits. One frozen record.

Does not know where the wishes were written, and imports nothing of the web.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """What one client may take, in bytes, seconds and counts.

    header_seconds and body_seconds: to send the head and the body of a request; stall_seconds: a reader of a stream
    that takes nothing for so long is dropped; queue_seconds: to wait for the first token; ping_seconds: between the
    comments that keep a silent stream open; grace_seconds: for replies under way when the server is told to stop.
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
    waiting: int = 256  # sequences that wait for their turn
    choices: int = 64  # replies of one request, of all its prompts together


@dataclass(frozen=True)
class ServerSettings:
    """`names`: what requests may call the model, the first being its own; `key`: None where everybody may come.

    `hosts`: names beside addresses and localhost under which the server is reached; `origins`: web pages of others that
    may use it.
    """

    names: tuple[str, ...]
    key: bytes | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: ServerLimits = ServerLimits()
