"""Address, access and limits of `mycli serve`, as typed."""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from mycli.cli.command import Call
from mycli.cli.flags import options
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.keys import ApiKey, parse_keys
from mycli.runtime.server.http.request_log import LogFormat
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from mycli.runtime.utils.files import expand_user, read_input

if TYPE_CHECKING:
    from socket import socket

MAX_KEY_BYTES = 4096
MAX_KEYS_BYTES = 1 << 22
_HOST_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class AddressFlags:
    """Address, access and limits of the server, as typed."""

    host: Annotated[str, options.option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, options.option("--port", "N", "Port to listen on; 0: a free one.", min=0, max=65535)] = 8080
    key_file: Annotated[
        Path | None,
        options.option("--api-key-file", "FILE", f"Require the API key in this file; or set {options.KEY_VARIABLE}."),
    ] = None
    keys_file: Annotated[
        Path | None,
        options.option(
            "--api-keys-file", "FILE", "Require one of the keys in this file, one a line: NAME KEY [weight=N]."
        ),
    ] = None
    open_to_all: Annotated[bool, options.flag("--insecure-no-auth", "Allow other machines without an API key.")] = False
    hosts: Annotated[
        list[str] | None, options.option("--allow-host", "NAME", "Also accept requests for this host name; repeatable.")
    ] = None
    origins: Annotated[
        list[str] | None, options.option("--cors", "ORIGIN", "Allow web pages of this origin; repeatable.")
    ] = None
    aliases: Annotated[
        list[str] | None,
        options.option(
            "--alias", "NAME", "Another model name for clients, or several with commas; the first is shown."
        ),
    ] = None
    grace: Annotated[
        float,
        options.option("--grace", "SECONDS", "Seconds to finish replies after Ctrl-C or SIGTERM.", min=0, max=3600),
    ] = ServerLimits.grace_seconds
    log_format: Annotated[
        str | None,
        options.words("--log-format", ("text", "json"), "Log one line per request.", show_default="text with -v"),
    ] = None
    no_record: Annotated[
        bool, options.flag("--no-record", "Do not record replies on disk, from which they can be resumed.")
    ] = False
    waiting: Annotated[
        int,
        options.option("--max-waiting", "N", "Maximum queue length; further requests are refused.", min=1, max=100_000),
    ] = ServerLimits.waiting
    extra_properties: Annotated[
        bool, options.flag("--extra-properties", "Allow JSON properties that a schema does not name.")
    ] = False
    unix_socket: Annotated[
        Path | None,
        options.option("--unix-socket", "PATH", "Listen on this socket instead, for programs of this user."),
    ] = None
    socket_group: Annotated[
        str | None,
        options.option("--socket-group", "GROUP", "Open --unix-socket to this group, such as that of a reverse proxy."),
    ] = None
    supervised: Annotated[bool, options.flag("--supervised", "Serve one of several models.", hidden=True)] = False
    end_with_stdin: Annotated[
        bool, options.flag("--end-with-stdin", "End when standard input is closed.", hidden=True)
    ] = False

    def resolve(self, call: Call) -> ServerSettings:
        """Return the settings, without the model's name. Raises UsageError for unsafe or invalid values."""
        _check_host(self.host)
        key = None if self.supervised else self._key(call)
        keys = () if self.supervised or self.keys_file is None else self._keys(call, self.keys_file)
        local = self.unix_socket is not None or _loopback(self.host)
        if key is None and not keys and not self.open_to_all and not local:
            raise UsageError(
                f"--host {self.host} allows other machines, but no API key is set",
                "add --api-key-file FILE, or --insecure-no-auth",
            )
        if self.socket_group is not None and self.unix_socket is None:
            raise UsageError("--socket-group needs --unix-socket", "add --unix-socket PATH")
        for origin in self.origins or ():
            if origin.count("://") != 1 or origin.endswith("/") or origin == "*":
                raise UsageError(f"--cors {origin}: not an origin", "for example: --cors https://example.org")
        names = tuple(self.aliases or ()) if self.supervised else alias_names(self.aliases)
        for name in names:
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise UsageError(f"--alias {name[:60]!r}: not a valid name", "use 1 to 256 printable characters")
        hosts = tuple(name.lower() for name in (*(self.hosts or ()), self.host))
        limits = ServerLimits(grace_seconds=self.grace, waiting=self.waiting)
        log_format = options.choice("--log-format", self.log_format or "text", get_args(LogFormat))
        return ServerSettings(
            names,
            key,
            hosts,
            tuple(self.origins or ()),
            self.extra_properties,
            limits,
            log_format,
            replies=None if self.no_record else state_dir() / "replies",
            supervised=self.supervised,
            keys=keys,
        )

    def listen(self) -> "tuple[socket, str]":
        """Return a listening socket and its address for people. Raises ResourceError or UsageError."""
        from mycli.runtime.server.http.connection import listen, listen_unix

        if self.unix_socket is not None:
            path = expand_user(self.unix_socket).absolute()
            return listen_unix(path, self.socket_group), f"unix:{path}"
        listener = listen(self.host, self.port)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return listener, f"http://{host}:{listener.getsockname()[1]}"

    def close(self, listener: "socket") -> None:
        """Close what `listen` returned."""
        listener.close()
        if self.unix_socket is not None:
            expand_user(self.unix_socket).unlink(missing_ok=True)

    def _keys(self, call: Call, path: Path) -> tuple[ApiKey, ...]:
        text = read_input(path, MAX_KEYS_BYTES).decode("utf-8", "replace")
        self._warn_if_readable(call, path)
        return parse_keys(text, str(path))

    @staticmethod
    def _warn_if_readable(call: Call, path: Path) -> None:
        if path.stat().st_mode & 0o077:
            call.out.warn(f"{path} is readable by other users; run: chmod 600 {path}")

    def _key(self, call: Call) -> bytes | None:
        # Never from the command line, which other users of the machine can read.
        if self.key_file is None:
            key = os.environ.get(options.KEY_VARIABLE, "").strip().encode()
            source = options.KEY_VARIABLE
        else:
            key = read_input(self.key_file, MAX_KEY_BYTES).strip()
            source = str(self.key_file)
            self._warn_if_readable(call, self.key_file)
            if not key:
                raise UsageError(f"{source} is empty", f"write a key to it: openssl rand -hex 32 > {source}")
        if not key.isascii() or b"\n" in key or b" " in key:
            raise UsageError(
                f"{source}: a key must be one line of ASCII without spaces", "make one: openssl rand -hex 32"
            )
        return key or None


def alias_names(aliases: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in the values of --alias, which may be separated by commas as in llama.cpp."""
    return tuple(name.strip() for value in aliases or () for name in value.split(","))


def _check_host(host: str) -> None:
    # Ollama's variable has the port in it, and llama.cpp's option takes the path of a socket.
    if _HOST_NAME.fullmatch(host) and not host.endswith(".sock"):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(
            f"--host {host:.100}: not an address",
            "for example: --host 127.0.0.1 --port 8080, or --host ::1; for a socket: --unix-socket PATH",
        ) from None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
