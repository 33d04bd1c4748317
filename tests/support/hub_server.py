"""Runs a hub on loopback for tests: the HTTP protocol of huggingface.co as mycli and huggingface_hub use it.

Consists of two servers: the hub, and the storage host to which it redirects large files, which must never receive a
token. Every request is logged; a test queues faults by a part of the path.
"""

import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1024  # bytes from which a file is stored in git-lfs


@dataclass(frozen=True)
class Fault:
    """Describes a faulty response. Unset fields leave that part of the response correct."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    drop_after: int | None = None  # bytes of the body after which the connection is closed
    ignore_range: bool = False
    altered: bool = False  # right size, wrong bytes
    announced: int | None = None  # Content-Length, independent of the bytes sent
    seconds_per_block: float = 0.0
    shifted: int = 0  # offset by which Content-Range and the body are shifted


@dataclass(frozen=True)
class Request:
    host: str  # "hub" or "storage"
    method: str
    path: str
    headers: Mapping[str, str]


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """Build a safetensors file from raw bytes: name -> (dtype, shape, data)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


class HubServer:
    """Serves `repos[name][commit][file] = bytes` and `refs[name][branch] = commit` until closed."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.log: list[Request] = []
        self.page = 1000  # entries per page of a listing
        self._faults: list[tuple[str, Fault]] = []
        self._lock = threading.Lock()
        self._servers = {host: self._serve(host) for host in ("hub", "storage")}

    def _serve(self, host: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"owner": self, "host": host})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def address(self, host: str = "hub") -> str:
        """Return the address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._servers[host].server_address[1]}"

    def add(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to `repo`, set the branch to it, and return its id."""
        text = json.dumps(sorted((name, git_digest(data)) for name, data in files.items()))
        commit = hashlib.sha1(f"{repo} {text}".encode()).hexdigest()
        self.repos.setdefault(repo, {})[commit] = dict(files)
        self.refs.setdefault(repo, {})[branch] = commit
        return commit

    def fail(self, where: str, fault: Fault, times: int = 1) -> None:
        """Answer the next `times` requests whose "host:path" contains `where` with `fault`."""
        with self._lock:
            self._faults.extend([(where, fault)] * times)

    def forgive(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, host: str, path: str) -> Fault:
        """Return the fault for a request and remove it from the queue."""
        with self._lock:
            for index, (where, fault) in enumerate(self._faults):
                if where in f"{host}:{path}":
                    del self._faults[index]
                    return fault
        return Fault()

    def requests(self, where: str) -> list[Request]:
        """Return the logged requests whose "host:path" contains `where`."""
        return [request for request in self.log if where in f"{request.host}:{request.path}"]


class _Handler(BaseHTTPRequestHandler):
    owner: HubServer
    host: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path)
        self.owner.log.append(Request(self.host, self.command, path, dict(self.headers)))
        fault = self.owner.take(self.host, path)
        try:
            if fault.status is not None:
                self._send(fault.status, fault.headers, fault.body or b"", fault)
            elif self.host == "storage":
                self._send_file(self._blob(urlsplit(path).path.rpartition("/")[2]), {}, fault)
            else:
                self._route(fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _blob(self, digest: str) -> bytes:
        for commits in self.owner.repos.values():
            for files in commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return data
        raise AssertionError(digest)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}", Fault())

    def _route(self, fault: Fault) -> None:
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        api = words[:1] == ["api"]
        words = words[2:] if words[:2] == ["api", "models"] else words[1:] if api else words
        if words[:1] == ["datasets"]:
            words[:2] = ["/".join(words[:2])]
        if not words:
            return self._send_found(parse_qs(parts.query)["search"][0])
        repo, verb, rest = "/".join(words[:2]), (words[2:3] or ["revision"])[0], words[3:]
        if repo not in self.owner.repos:
            return self._refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        revision = rest[0] if rest else "main"
        commit = self.owner.refs[repo].get(revision, revision)
        if commit not in self.owner.repos[repo]:
            return self._refuse(404, "RevisionNotFound")
        files = self.owner.repos[repo][commit]
        if api and verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._send_json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}, {})
        if api and verb == "tree":
            return self._send_tree(repo, commit, files, int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        name = "/".join(rest[1:])
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        data = files[name]
        headers = {"X-Repo-Commit": commit}
        if len(data) < LARGE:
            return self._send_file(data, {**headers, "ETag": f'"{git_digest(data)}"'}, fault)
        digest = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        location = f"{self.owner.address('storage')}/lfs/{digest}?signature=secret"
        return self._send(302, {**headers, "Location": location}, b"", fault)

    def _send_found(self, words: str) -> None:
        """Send the results of a search: the family of each config, the size of pico, and accounts by the name."""
        found: list[dict[str, Any]] = []
        for repo, branches in self.owner.refs.items():
            files = self.owner.repos[repo][branches["main"]]
            config = json.loads(files.get("config.json", b"{}"))
            if words in repo:
                size = {"total": 5_770_496} if any(name.endswith(".safetensors") for name in files) else {}
                about = {"config": {"model_type": config.get("model_type")}, "safetensors": size}
                found.append({"id": repo, "downloads": 7, "gated": "auto" if "gated" in repo else False, **about})
        self._send_json(found, {})

    def _send_tree(self, repo: str, commit: str, files: Mapping[str, bytes], start: int) -> None:
        entries: list[dict[str, Any]] = []
        for name, data in files.items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_digest(data)}
            if len(data) >= LARGE:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entry["oid"] = git_digest(b"pointer to " + name.encode())
            entries.append(entry)
        headers, kind = {}, repo if repo.startswith("datasets/") else f"models/{repo}"
        if start + self.owner.page < len(entries):
            query = f"recursive=true&cursor={start + self.owner.page}"
            headers["Link"] = f'<{self.owner.address()}/api/{kind}/tree/{commit}?{query}>; rel="next"'
        self._send_json(entries[start : start + self.owner.page], headers)

    def _send_json(self, value: Any, headers: Mapping[str, str]) -> None:
        self._send(200, {"Content-Type": "application/json", **headers}, json.dumps(value).encode(), Fault())

    def _send_file(self, data: bytes, headers: Mapping[str, str], fault: Fault) -> None:
        if fault.altered:
            data = bytes(byte ^ 1 for byte in data)
        wanted = self.headers.get("Range")
        if wanted is None or fault.ignore_range:
            return self._send(200, headers, data, fault)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) + fault.shifted
        end = min(int(last) + 1 if last else len(data), len(data))
        if start >= len(data):
            return self._send(416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b"", fault)
        ranged = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        return self._send(206, ranged, data[start:end], fault)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, fault: Fault) -> None:
        self.send_response(status)
        announced = len(body) if fault.announced is None else fault.announced
        for name, value in {**headers, **fault.headers, "Content-Length": str(announced)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body if fault.drop_after is None else body[: fault.drop_after]
        block = 4096 if fault.seconds_per_block else max(len(body), 1)
        for start in range(0, len(body), block):
            self.wfile.write(body[start : start + block])
            self.wfile.flush()
            time.sleep(fault.seconds_per_block)
        if fault.drop_after is not None or announced != len(body):
            self.close_connection = True


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()
