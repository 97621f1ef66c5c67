"""A headless Chromium over its DevTools pipe: opens a page, keeps what it asked for and complained about."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--no-default-browser-check", "--remote-debugging-pipe",
]  # fmt: skip
PATIENCE_S = 60.0


@dataclass
class Tab:
    to: int
    back: int
    session: str = ""
    sent: int = 0
    unread: bytes = b""
    requests: list[str] = field(default_factory=list)
    """Every URL the page asked for, its own among them."""
    complaints: list[str] = field(default_factory=list)
    """Console messages, exceptions, and what the browser logged: refused loads too."""
    loads: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Loads the page in a window of this size, whatever the browser's smallest window is."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        before = self.loads
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self.loads == before:
            self._next()

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        """The next message, its event kept."""
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium said nothing more"
            data = os.read(self.back, 1 << 20)
            assert data, "Chromium ended"
            self.unread += data
        raw, self.unread = self.unread.split(b"\0", 1)
        message = json.loads(raw)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(f"{params['type']}: {params['args']}")
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Page.loadEventFired":
                self.loads += 1
        return dict(message)


def binary() -> str:
    """Fails, and says what to install, where there is no Chromium: a page that nobody opened was not tested."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "no Chromium on the PATH: on Debian, apt-get install chromium"
    return found


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """One blank tab of a browser of its own; `profile` is a fresh folder for its user data."""
    read_by_it, to = os.pipe()
    back, written_by_it = os.pipe()

    def wire() -> None:  # the pipe's two ends are file descriptors 3 and 4, by Chromium's convention
        keep = [os.dup(read_by_it), os.dup(written_by_it)]
        high = [os.dup2(keep[0], 30), os.dup2(keep[1], 31)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [binary(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=wire, close_fds=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        one = Tab(to, back)
        target = one.call("Target.createTarget", url="about:blank")["targetId"]
        one.session = one.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            one.call(f"{domain}.enable")
        yield one
    finally:
        os.close(to)  # Chromium ends when its pipe does
        os.close(back)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
