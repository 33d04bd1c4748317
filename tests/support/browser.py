"""A headless Chromium, driven over the pipe of its debugging protocol: no driver, no web socket.

Knows pages and keys; does not know what is shown.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0


class Browser:
    def __init__(self, width: int = 1000, height: int = 760) -> None:
        assert CHROMIUM is not None
        read_end, our_write = os.pipe()
        our_read, write_end = os.pipe()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its processes may write to the last

        def place() -> None:  # the protocol's two ends are the descriptors 3 and 4
            os.dup2(os.dup(read_end), 13)
            os.dup2(os.dup(write_end), 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update")
        folder = f"--user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, *quiet, folder, f"--window-size={width},{height}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
        )
        os.close(read_end)
        os.close(write_end)
        self._write, self._read, self._held = our_write, our_read, b""
        self._next, self._session = 0, ""
        self.requested: list[str] = []  # every address that the page asked for
        self.errors: list[str] = []  # exceptions, refused loads and broken rules of the content security policy
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            self._held += os.read(self._read, 1 << 20)
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(json.dumps(message["params"]["entry"]))
        return message

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    @contextmanager
    def before_load(self, script: str) -> Iterator[None]:
        """Run `script` in each page that is opened, before its own."""
        added = self._call("Page.addScriptToEvaluateOnNewDocument", source=script)
        try:
            yield
        finally:
            self._call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])

    def wait(self, script: str, seconds: float = SECONDS) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, number: int, text: str = "", *, code: str = "", modifiers: int = 0) -> None:
        """Press a key; `number` is its virtual code, `code` its place where that is not `key`; modifiers: 1 is Alt."""
        shared = {"key": key, "code": code or key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """As on a screen of that size; 500 and narrower is a phone."""
        phone = width <= 500
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def choose(self, selector: str, files: Sequence[Path]) -> None:
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def save_downloads(self, folder: Path) -> None:
        self._call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
