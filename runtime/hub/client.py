"""HTTP client for a Hugging Face hub: commits, file listings, byte ranges and search, with retries.

huggingface_hub's own requests are not used: they send the token to whatever host a listing's `next` link names, sleep
for as long as a server asks, and read responses of any size. Every failure is a `UserError` with its own message.
"""

import ipaddress
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import DATASETS, normalize_model_name, split_name
from mycli.runtime.hub.store import COMMIT, DIGEST, MAX_TREE_BYTES
from mycli.runtime.utils.json_fields import Fields, parse_object
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:
    import httpx2  # imported on first use: it takes 60 ms

# Limits for a hostile or broken server.
MAX_INFO_BYTES = 16 << 20
MAX_PAGES = 1000
RESUMABLE = "another attempt continues where this one stopped"
_T = TypeVar("_T")


class TransientError(Exception):
    """A failure worth a retry: a dropped connection or a busy server. `retry_after`: seconds the server asked for."""

    def __init__(self, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts and delays between them, in seconds."""

    attempts: int = 6  # for a file, without progress in between
    request_attempts: int = 4  # for everything else
    base_delay: float = 0.5
    max_delay: float = 20.0
    max_retry_after: float = 120.0
    timeout: float = 15.0

    def run(
        self, action: Callable[[], _T], note: Callable[[str], None], progress: Callable[[], int] | None = None
    ) -> _T:
        """Return the result of `action`, called again with exponential backoff after each TransientError.

        `progress` returns the bytes of a file received so far. Raises NotFoundError after the last attempt, or when
        the server asks for more than `max_retry_after` seconds.
        """
        failures, before = 0, progress() if progress else 0
        limit = self.attempts if progress else self.request_attempts
        while True:
            try:
                return action()
            except TransientError as problem:
                # Attempts count anew after 1 MiB: a server that drops every connection after a few bytes must not
                # keep the loop going (test_a_connection_that_drips_is_not_progress).
                received = progress() if progress else 0
                failures, before = 1 if received - before >= 1 << 20 else failures + 1, received
                if failures >= limit:
                    hint = f"check the network; {RESUMABLE}" if progress else "check the network, and try again"
                    raise NotFoundError(f"{problem} (tried {failures} times)", hint) from None
                delay = min(self.base_delay * 2 ** (failures - 1), self.max_delay)
                if problem.retry_after is not None:
                    delay = problem.retry_after
                    if delay > self.max_retry_after:
                        raise NotFoundError(f"{problem}: it asks to wait {delay:.0f} s", f"wait; {RESUMABLE}") from None
                note(f"{problem}; trying again in {delay:.1f} s")
                time.sleep(delay)


class Hub:
    """A connection to one hub; a context manager. `note` receives a line before each retry."""

    def __init__(self, address: str, token: str | None, note: Callable[[str], None], policy: RetryPolicy) -> None:
        import httpx2

        # In the form that the client gives to URLs of responses: a host in small letters, without the default port.
        self._base = str(httpx2.URL(address)).rstrip("/")
        self.address = re.sub(r"//[^/]*@", "//", self._base)  # shown in messages: without a password
        self.note = note
        self.policy = policy
        self._host = urlsplit(self._base).hostname or ""
        self._origin = urlsplit(self._base)[:2]
        self._token = token
        self._client = _http_client(policy.timeout)

    @classmethod
    def connect(cls, note: Callable[[str], None]) -> "Hub":
        address, token = _endpoint(), _token()
        if token is not None and not _is_private_channel(address):
            note(f"{address} is not encrypted, so no token is sent to it")
            token = None
        return cls(address, token, note, RetryPolicy())

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def commit(self, repo: str, revision: str | None) -> str:
        """Return the commit that `revision` (default "main") points to; a commit is returned without a request."""
        revision = revision or "main"
        if COMMIT.fullmatch(revision):
            return revision
        url = f"{self._base}/api/{_api_path(repo)}/revision/{quote(revision, safe='')}"
        data, _ = self._get_json(url, repo, f"revision {revision}", MAX_INFO_BYTES)
        commit = parse_object(data, self._host, MAX_INFO_BYTES).text("sha")
        # It becomes a folder name in the cache.
        if not COMMIT.fullmatch(commit):
            raise ModelError(f"{self._host}: {commit!r:.60} is not a commit", "check HF_ENDPOINT")
        return commit

    def tree(self, repo: str, commit: str) -> Fields:
        """Return the files of `commit` in the format of the cache's `trees/`; see `store.parse_tree`."""
        url: str | None = f"{self._base}/api/{_api_path(repo)}/tree/{commit}?recursive=true"
        records: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            assert url is not None
            data, url = self._get_json(url, repo, f"revision {commit}", MAX_TREE_BYTES)
            for item in self._parse_list(data, MAX_TREE_BYTES):
                if item.text("type", "") == "file":
                    records[item.text("path")] = _tree_record(item)
            if url is None:
                return Fields(records, f"{self._host}: the listing")
        raise ModelError(f"{repo}: its listing has more than {MAX_PAGES} pages", "this is not a model")

    def list_models(self, query: str) -> list[Fields]:
        url = f"{self._base}/api/models?{query}"
        data, _ = self._get_json(url, "the hub", "such page", MAX_INFO_BYTES)
        return self._parse_list(data, MAX_INFO_BYTES)

    def read(self, repo: str, commit: str, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from offset `start`; fewer at the end of the file."""

        def attempt() -> bytes:
            with self.open(repo, commit, name, start, start + length - 1) as response:
                if response.status_code == 416:  # the file ends before `start`, as an empty one does
                    return b""
                # A server that ignores the range sends the whole file (200): skip up to `start`.
                skip = start if response.status_code == 200 else 0
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk[skip:]
                    skip = max(0, skip - len(chunk))
                    if len(data) >= length:
                        break
                return bytes(data[:length])

        return self.policy.run(attempt, self.note)

    @contextmanager
    def open(
        self, repo: str, commit: str, name: str, start: int, last: int | None = None
    ) -> Iterator["httpx2.Response"]:
        """Yield the response to a request for bytes `start` to `last` of a file: status 200, 206 or 416, body unread.

        Raises TransientError or a UserError, also for failures while the body is read.
        """
        url = f"{self._base}/{repo}/resolve/{commit}/{quote(name)}"
        ranged = start or last is not None
        headers = {"Range": f"bytes={start}-{'' if last is None else last}"} if ranged else {}
        with self._get(url, headers, repo, f"file {name}") as response:
            yield response

    def _get_json(self, url: str, repo: str, subject: str, limit: int) -> tuple[bytes, str | None]:
        def attempt() -> tuple[bytes, str | None]:
            with self._get(url, {}, repo, subject) as response:
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > limit:
                        message = f"{self._host}: an answer of more than {human_bytes(limit)}"
                        raise ModelError(message, "check HF_ENDPOINT")
                # The login page of a captive portal is HTML.
                if bytes(data[:100]).lstrip()[:1] not in (b"{", b"["):
                    hint = "log in to this network, or check HF_ENDPOINT"
                    raise NotFoundError(f"{self._host} does not answer as a hub does", hint)
                following = response.links.get("next", {}).get("url")
                return bytes(data), following and self._joined(url, following)

        return self.policy.run(attempt, self.note)

    def _joined(self, url: str, following: str) -> str:
        import httpx2

        try:
            return str(httpx2.URL(urljoin(url, following)))
        except (ValueError, httpx2.InvalidURL):
            raise ModelError(
                f"{self._host}: its listing continues at an invalid address", "check HF_ENDPOINT"
            ) from None

    def _parse_list(self, data: bytes, limit: int) -> list[Fields]:
        # Wrapped in an object so that the one strict JSON reader applies.
        listing = parse_object(b'{"items":' + data + b"}", self._host, limit + 10)
        return [Fields(values, f"{self._host}: the listing") for values in listing.array("items", dict)]

    @contextmanager
    def _get(self, url: str, headers: Mapping[str, str], repo: str, subject: str) -> Iterator["httpx2.Response"]:
        import httpx2

        # identity: a compressed body could expand without bound.
        headers = {"User-Agent": "mycli", "Accept-Encoding": "identity", **headers}
        # The `next` page of a listing may be on another host, which must not receive the token.
        if self._token and urlsplit(url)[:2] == self._origin:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            # The client drops Authorization when a redirect leaves the origin (a test asserts it).
            with self._client.stream("GET", url, headers=headers) as response:
                self._check(response, repo, subject)
                yield response
        except httpx2.HTTPError as error:
            raise _transport_error(error, self._host) from None

    def _check(self, response: "httpx2.Response", repo: str, subject: str) -> None:
        status, headers = response.status_code, response.headers
        if status in (200, 206, 416):
            return
        # Storage hosts refuse an expired link: a retry through the hub brings a fresh one. They send no X-Error-Code,
        # unlike a hub that redirects to its address with https or www.
        storage = urlsplit(str(response.url))[:2] != self._origin and "X-Error-Code" not in headers
        if storage or status in (408, 429) or status >= 500:
            busy = ": too many requests" if status == 429 else ""
            raise TransientError(f"{response.url.host} answers {status}{busy}", _retry_after(headers))
        raise self._refusal(status, headers.get("X-Error-Code", ""), headers.get("X-Error-Message", ""), repo, subject)

    def _refusal(self, status: int, code: str, reason: str, repo: str, subject: str) -> NotFoundError:
        # The error for a 4xx response: gated, private, missing and forbidden each have a message.
        page = f"{self.address}/{repo}"
        if code == "GatedRepo":
            if self._token:
                message = f"{repo} is gated, and this account has no access to it (yet)"
                return NotFoundError(message, f"ask for it at {page}")
            message = f"{repo} is gated: it requires accepting its terms"
            return NotFoundError(message, code="accept-terms", data={"page": page})
        if code in ("RevisionNotFound", "EntryNotFound"):
            listed = "branches and tags" if code == "RevisionNotFound" else "files"
            return NotFoundError(f"{repo} has no {subject}", f"its {listed}: {page}/tree/main")
        if status == 401 and self._token and code != "RepoNotFound":
            message = f"{self.address} does not accept the token of HF_TOKEN or the token file"
            return NotFoundError(message, f"create a new one: {self.address}/settings/tokens")
        if code == "RepoNotFound" or status in (401, 404):
            message = f"{repo}: no such {'dataset' if repo.startswith(DATASETS) else 'model'} on {self.address}"
            if self._token:
                return NotFoundError(message, "check the spelling; or this account may not see it")
            return NotFoundError(message, code="private-model")
        answer, hint = f"answers {status}", "check HF_ENDPOINT and the name"
        if status == 403:
            answer, hint = "forbids access", "check what the token is allowed to do"
        return NotFoundError(f"{repo}: {self.address} {answer}{f': {reason}' if reason else ''}", hint)


def _http_client(timeout: float) -> "httpx2.Client":
    import httpx2

    try:
        return httpx2.Client(timeout=timeout, follow_redirects=True)
    except ImportError:  # ALL_PROXY=socks5://...
        hint = "pip install socksio, or set HTTPS_PROXY to an HTTP proxy"
        raise UsageError("a SOCKS proxy is set in the environment and needs the package socksio", hint) from None
    except (ValueError, httpx2.InvalidURL) as error:
        message = f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: {error}"
        raise UsageError(message, "set it to a URL such as http://proxy.example.com:3128") from None
    except OSError as error:
        message = f"SSL_CERT_FILE={os.environ.get('SSL_CERT_FILE', '')}: {error.strerror or error}"
        raise UsageError(message, "set it to a file of certificates in PEM format") from None


def _endpoint() -> str:
    import httpx2

    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").strip()
    with suppress(httpx2.InvalidURL, UnicodeError):
        url = httpx2.URL(address)
        url.raw_host.decode("ascii").encode("idna")  # as the look-up of the name does; fails for an empty label
        if url.scheme in ("http", "https") and url.host and (url.port or 0) < 1 << 16:
            return address
    raise UsageError(f"HF_ENDPOINT={address}: not a URL", "set it to a URL such as https://huggingface.co")


def _is_private_channel(address: str) -> bool:
    # Others on the network read what is sent by http, unless it stays on this machine.
    parts = urlsplit(address)
    try:
        loopback = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        loopback = parts.hostname == "localhost"
    return parts.scheme == "https" or loopback


def _token() -> str | None:
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    import huggingface_hub

    try:
        token = huggingface_hub.get_token()
    except UnicodeDecodeError:  # a token file in UTF-16, as PowerShell's `>` writes it
        token = "\0"
    # A newline in the token would forge a header.
    if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError("HF_TOKEN, or the token file, holds characters that no token can have", code="log-in")
    return token


def _api_path(repo: str) -> str:
    return repo if repo.startswith(DATASETS) else f"models/{repo}"


def _tree_record(item: Fields) -> dict[str, Any]:
    # Converts an entry of the hub's listing to the field names of huggingface_hub's cache.
    lfs, xet = item.object("lfs").values, item.values.get("xetHash")
    digest = str(lfs.get("oid", item.values.get("oid")))
    # It becomes a file name in the cache.
    if not DIGEST.fullmatch(digest):
        raise item.fail("oid", f"{digest!r:.80} is not a hash", "check HF_ENDPOINT")
    record = {"size": item.values.get("size"), "blob_id": item.values.get("oid")}
    record |= {"lfs_sha256": lfs.get("oid"), "lfs_size": lfs.get("size")}
    record["xet_hash"] = xet if re.fullmatch(r"[0-9a-f]{64}", str(xet)) else None
    return {key: value for key, value in record.items() if value is not None}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    # The seconds to wait from Retry-After (a number or a date) or huggingface.co's RateLimit header.
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        exhausted = re.search(r"\br=0;\s*t=(\d{1,6})\b", headers.get("RateLimit", ""))
        return float(exhausted[1]) if exhausted else None


def _transport_error(error: "httpx2.HTTPError", host: str) -> Exception:
    import httpx2

    via = ""
    with suppress(RuntimeError):  # raised by errors without a request
        host = error.request.url.host
        if getproxies().keys() & {error.request.url.scheme, "all"} and not proxy_bypass(host):
            via = " through the proxy"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        hint = "behind a proxy that inspects TLS, set SSL_CERT_FILE to its certificate"
        return NotFoundError(f"the certificate of {host} is not trusted", hint)
    if isinstance(error, httpx2.ProxyError):
        message = f"the proxy does not allow connections to {host}: {error}"
        return NotFoundError(message, "check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, httpx2.TooManyRedirects | httpx2.UnsupportedProtocol | httpx2.DecodingError):
        return NotFoundError(f"{host}: {error}", "check HF_ENDPOINT")
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        subject = f"the proxy to {host}" if via else host
        return TransientError(f"the address of {subject} cannot be found: no network, or no name service")
    if isinstance(error, httpx2.TimeoutException):
        return TransientError(f"{host} does not answer")
    if isinstance(error, httpx2.ConnectError):
        return TransientError(f"no connection to {host}{via}")
    return TransientError(f"the connection to {host} was lost")


@dataclass(frozen=True)
class SearchResult:
    name: str
    downloads: int
    parameters: int | None
    model_type: str | None
    gated: bool


def search_models(hub: Hub, words: str, limit: int) -> list[SearchResult]:
    """Return at most `limit` repositories with safetensors whose name matches `words`, most downloaded first."""
    words = normalize_model_name(words).strip()
    if not words or len(words) > 200:
        raise UsageError("no words to search for", "give a part of a name, such as llama 3.2")
    query = [("search", words), ("filter", "safetensors"), ("sort", "downloads"), ("limit", str(limit))]
    query += [("expand[]", field) for field in ("config", "downloads", "gated", "safetensors")]
    results = []
    for item in hub.list_models(urlencode(query))[:limit]:
        name = item.text("id")
        with suppress(UsageError):  # a name that `pull` would refuse is not listed
            split_name(name)
            size = item.object("safetensors").integer("total", 0, low=0, high=1 << 50)
            downloads = item.integer("downloads", 0, low=0, high=1 << 50)
            model_type = item.object("config").text("model_type", "")
            gated = item.values.get("gated") not in (False, None)
            results.append(SearchResult(name, downloads, size or None, model_type or None, gated))
    return results
