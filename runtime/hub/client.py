"""What is asked of a hub over HTTP: the commit behind a revision, its files, and ranges of their bytes.

Speaks the protocol of huggingface.co with the person's token, which goes to the hub's own address and nowhere else.
Every failure becomes either `TransientError`, worth another try, or a `UserError` that says which failure it is. Writes
nothing; the cache is `runtime.hub.download`'s business. The HTTP library is imported on first use (60 ms).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit

from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import DATASETS
from mycli.runtime.hub.retry import RetryPolicy, TransientError, retry_after, transport_problem
from mycli.runtime.hub.store import COMMIT, DIGEST, MAX_TREE_BYTES
from mycli.runtime.utils.json_fields import Fields, parse_object
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:
    import httpx2

MAX_INFO_BYTES = 16 << 20
MAX_PAGES = 1000


@dataclass(frozen=True)
class Wanted:
    """What a request is about, for the words of its error."""

    repo: str
    revision: str
    name: str = ""


def endpoint() -> str:
    """The hub's address: $HF_ENDPOINT or https://huggingface.co. Raises UsageError for what is no address."""
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"HF_ENDPOINT={address}: not an address", "such as https://huggingface.co")
    return address


def token() -> str | None:
    """The person's token from $HF_TOKEN or the token file, never shown. Raises UsageError if it cannot be one."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    import huggingface_hub

    found = huggingface_hub.get_token()
    if found is not None and not re.fullmatch(r"[\x21-\x7e]+", found):
        raise UsageError("HF_TOKEN, or the token file, holds characters that no token can have", code="log-in")
    return found


class Hub:
    """A connection to the hub, closed by `with`. `note` is told when something is tried again.

    huggingface_hub's own requests are not used: they send the token on to wherever a listing continues, wait as long as
    a server asks, and read answers of any size.
    """

    def __init__(self, address: str, token: str | None, note: Callable[[str], None], policy: RetryPolicy) -> None:
        import httpx2

        self.address = address
        self.note = note
        self.policy = policy
        self._host = urlsplit(address).hostname or ""
        self._origin = urlsplit(address)[:2]
        self._token = token
        self._client = httpx2.Client(timeout=policy.timeout, follow_redirects=True)

    @classmethod
    def connect(cls, note: Callable[[str], None]) -> "Hub":
        """With the address and token of the environment."""
        return cls(endpoint(), token(), note, RetryPolicy())

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def commit(self, repo: str, revision: str | None) -> str:
        """The commit that `revision`, or the branch "main", points to now; a commit is itself, which asks nothing."""
        revision = revision or "main"
        if COMMIT.fullmatch(revision):
            return revision
        url = f"{self.address}/api/{_kind(repo)}/revision/{quote(revision, safe='')}"
        data, _ = self.policy.run(lambda: self._document(url, Wanted(repo, revision), MAX_INFO_BYTES), self.note)
        commit = parse_object(data, self._host, MAX_INFO_BYTES).text("sha")
        if not COMMIT.fullmatch(commit):
            raise ModelError(f"{self._host}: {commit!r:.60} is not a commit", "check HF_ENDPOINT")
        return commit

    def tree(self, repo: str, commit: str) -> Fields:
        """The files of `commit`, as `trees/` of the cache keeps them; `resolve.parse_tree` reads it."""
        url = f"{self.address}/api/{_kind(repo)}/tree/{commit}?recursive=true"
        records: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            ask = partial(self._document, url, Wanted(repo, commit), MAX_TREE_BYTES)
            data, following = self.policy.run(ask, self.note)
            for item in self._array(data, MAX_TREE_BYTES):
                if item.text("type", "") == "file":
                    records[item.text("path")] = _record(item)
            if following is None:
                return Fields(records, f"{self._host}: the listing")
            url = following
        raise ModelError(f"{repo}: its listing has more than {MAX_PAGES} pages", "this is not a model")

    def models(self, query: str) -> list[Fields]:
        """What the hub lists for `query`, the parameters of its address, as an object each."""
        url = f"{self.address}/api/models?{query}"
        data, _ = self.policy.run(lambda: self._document(url, Wanted("the hub", ""), MAX_INFO_BYTES), self.note)
        return self._array(data, MAX_INFO_BYTES)

    def _array(self, data: bytes, limit: int) -> list[Fields]:
        """The objects of a JSON array: it is given a name, to be read like every other JSON of a stranger."""
        listing = parse_object(b'{"items":' + data + b"}", self._host, limit + 10)
        return [Fields(values, f"{self._host}: the listing") for values in listing.array("items", dict)]

    def read(self, repo: str, commit: str, name: str, start: int, length: int) -> bytes:
        """`length` bytes of a file from `start`; fewer at its end."""

        def attempt() -> bytes:
            with self.open(repo, commit, name, start, start + length - 1) as response:
                # A server that ignores the range sends all of it: what comes before is skipped, not kept.
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
        self, repo: str, commit: str, name: str, start: int = 0, last: int | None = None
    ) -> Iterator["httpx2.Response"]:
        """The response to a request for a file from byte `start` (to `last`): status 200, 206 or 416, body unread.

        Raises TransientError, also for what goes wrong while the body is read inside the `with`, or a UserError.
        """
        url = f"{self.address}/{repo}/resolve/{commit}/{quote(name)}"
        bounded = start or last is not None
        headers = {"Range": f"bytes={start}-{'' if last is None else last}"} if bounded else {}
        with self._get(url, headers, Wanted(repo, commit, name)) as response:
            yield response

    def _document(self, url: str, wanted: Wanted, limit: int) -> tuple[bytes, str | None]:
        """A whole JSON answer, and the address of the next page if there is one."""
        with self._get(url, {}, wanted) as response:
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > limit:
                    raise ModelError(f"{self._host}: an answer of more than {human_bytes(limit)}", "check HF_ENDPOINT")
            if bytes(data[:100]).lstrip()[:1] not in (b"{", b"["):
                hint = "log in to this network, or check HF_ENDPOINT"
                raise NotFoundError(f"{self._host} does not answer as a hub does", hint)
            following = response.links.get("next", {}).get("url")
            return bytes(data), urljoin(url, following) if following else None

    @contextmanager
    def _get(self, url: str, headers: Mapping[str, str], wanted: Wanted) -> Iterator["httpx2.Response"]:
        import httpx2

        sent = {"User-Agent": "mycli", "Accept-Encoding": "identity", **headers}
        if self._token and urlsplit(url)[:2] == self._origin:
            sent["Authorization"] = f"Bearer {self._token}"
        try:
            # The client drops Authorization when a redirect leaves the origin (a test asserts it).
            with self._client.stream("GET", url, headers=sent) as response:
                self._check(response, wanted)
                yield response
        except httpx2.HTTPError as error:
            raise transport_problem(error, self._host) from None

    def _check(self, response: "httpx2.Response", wanted: Wanted) -> None:
        status, headers = response.status_code, response.headers
        if status in (200, 206, 416):
            return
        here = urlsplit(str(response.url))[:2] == self._origin
        if not here or status in (408, 429) or status >= 500:
            # A storage host refuses a link that has expired: asking the hub again brings a fresh one.
            busy = ": too many requests" if status == 429 else ""
            raise TransientError(f"{response.url.host} answers {status}{busy}", retry_after(headers))
        raise self._refusal(status, headers.get("X-Error-Code", ""), headers.get("X-Error-Message", ""), wanted)

    def _refusal(self, status: int, code: str, reason: str, wanted: Wanted) -> NotFoundError:
        """What a 4xx of the hub means to a person."""
        repo, page = wanted.repo, f"{self.address}/{wanted.repo}"
        if code == "GatedRepo" and self._token:
            return NotFoundError(
                f"{repo} is gated, and this account has no access to it (yet)", f"ask for it at {page}"
            )
        if code == "GatedRepo":
            message = f"{repo} is gated: it requires accepting its terms"
            return NotFoundError(message, code="accept-terms", data={"page": page})
        if code == "RevisionNotFound":
            return NotFoundError(
                f"{repo} has no revision {wanted.revision}", f"its branches and tags: {page}/tree/main"
            )
        if code == "EntryNotFound":
            return NotFoundError(f"{repo} has no file {wanted.name}", f"its files: {page}/tree/main")
        if status == 401 and self._token and code != "RepoNotFound":
            message = f"{self.address} does not accept the token of HF_TOKEN or the token file"
            return NotFoundError(message, f"a new one: {self.address}/settings/tokens")
        if code == "RepoNotFound" or status in (401, 404):
            message = f"{repo}: no such {'dataset' if repo.startswith(DATASETS) else 'model'} on {self.address}"
            if self._token:
                return NotFoundError(message, "check the spelling; or this account may not see it")
            return NotFoundError(message, code="private-model")
        because = f": {reason}" if reason else ""
        if status == 403:
            return NotFoundError(
                f"{repo}: {self.address} forbids access{because}", "check what the token is allowed to do"
            )
        return NotFoundError(f"{repo}: {self.address} answers {status}{because}", "check HF_ENDPOINT and the name")


def _kind(repo: str) -> str:
    """`repo` as the hub's API has it: models are not called so elsewhere, datasets are."""
    return repo if repo.startswith(DATASETS) else f"models/{repo}"


def _record(item: Fields) -> dict[str, Any]:
    """An entry of the hub's listing under the names that huggingface_hub gives its fields in the cache."""
    lfs, xet = item.object("lfs").values, item.values.get("xetHash")
    digest = str(lfs.get("oid", item.values.get("oid")))
    if not DIGEST.fullmatch(digest):
        raise item.fail("oid", f"{digest!r:.80} is not a hash", "check HF_ENDPOINT")
    record = {"size": item.values.get("size"), "blob_id": item.values.get("oid")}
    record |= {"lfs_sha256": lfs.get("oid"), "lfs_size": lfs.get("size")}
    record["xet_hash"] = xet if re.fullmatch(r"[0-9a-f]{64}", str(xet)) else None
    return {key: value for key, value in record.items() if value is not None}
