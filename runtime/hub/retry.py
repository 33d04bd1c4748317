"""Bearing with a network: which failures may pass, how long to wait before another try, and when to give up.

Knows HTTP and sockets, nothing of any hub.
"""

import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from mycli.runtime.errors import NotFoundError

if TYPE_CHECKING:
    import httpx2

_T = TypeVar("_T")
RESUMABLE = "another attempt continues where this one stopped"


class TransientError(Exception):
    """A failure that may pass: a dropped connection, a busy server. `retry_after`: seconds the server asked for."""

    def __init__(self, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


@dataclass(frozen=True)
class RetryPolicy:
    """How often to try, and how long to wait in between, in seconds; a server may ask for up to `longest_wait`."""

    attempts: int = 6  # for a file, without progress in between
    questions: int = 4  # for everything else
    first_delay: float = 0.5
    longest_delay: float = 20.0
    longest_wait: float = 120.0
    timeout: float = 15.0

    def run(
        self, action: Callable[[], _T], note: Callable[[str], None], progress: Callable[[], int] | None = None
    ) -> _T:
        """`action()` until it succeeds, waiting longer after each TransientError, and telling `note` so.

        `progress`, in bytes, makes it a file, whose attempts count anew after a MiB. Raises NotFoundError when they are
        used up or the server asks for too long a wait.
        """
        failures, before = 0, progress() if progress else 0
        allowed = self.attempts if progress else self.questions
        while True:
            try:
                return action()
            except TransientError as problem:
                # A server that drops every connection after a few bytes is not progress.
                done = progress() if progress else 0
                failures, before = 1 if done - before >= 1 << 20 else failures + 1, done
                if failures >= allowed:
                    hint = f"check the network; {RESUMABLE}"
                    raise NotFoundError(f"{problem} (tried {failures} times)", hint) from None
                delay = min(self.first_delay * 2 ** (failures - 1), self.longest_delay)
                if problem.retry_after is not None:
                    delay = problem.retry_after
                    if delay > self.longest_wait:
                        raise NotFoundError(f"{problem}: it asks to wait {delay:.0f} s", f"wait; {RESUMABLE}") from None
                note(f"{problem}; trying again in {delay:.1f} s")
                time.sleep(delay)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from Retry-After (a number or a date) or the RateLimit header of huggingface.co."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        spent = re.search(r"\br=0;\s*t=(\d{1,6})\b", headers.get("RateLimit", ""))
        return float(spent[1]) if spent else None


def transport_problem(error: "httpx2.HTTPError", host: str) -> Exception:
    """What a failure below HTTP means: `TransientError`, or a UserError where trying again cannot help."""
    import httpx2

    with suppress(RuntimeError):  # not every error knows its request
        host = error.request.url.host
    causes: list[BaseException] = [error]
    while (deeper := causes[-1].__cause__ or causes[-1].__context__) and deeper not in causes:
        causes.append(deeper)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        hint = "where a proxy inspects traffic, SSL_CERT_FILE names its certificate"
        return NotFoundError(f"the certificate of {host} is not trusted", hint)
    if isinstance(error, httpx2.ProxyError):
        return NotFoundError(
            f"the proxy does not allow connections to {host}: {error}", "check HTTPS_PROXY and NO_PROXY"
        )
    if isinstance(error, httpx2.TooManyRedirects | httpx2.UnsupportedProtocol | httpx2.DecodingError):
        return NotFoundError(f"{host}: {error}", "check HF_ENDPOINT")
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return TransientError(f"the address of {host} cannot be found: no network, or no name service")
    if isinstance(error, httpx2.TimeoutException):
        return TransientError(f"{host} does not answer")
    if isinstance(error, httpx2.ConnectError):
        return TransientError(f"no connection to {host}")
    return TransientError(f"the connection to {host} was lost")
