"""Chromium without a window, driven over its debugging pipe: enough to look at one page.

Chromium speaks JSON over file descriptors 3 (to it) and 4 (from it), each message ended by a zero
byte; so nothing needs to be installed beside the browser itself.

    python tests/report/browser.py results/demo/report.html docs/demo-report.png

is a picture of the first screen of a page.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds until an answer must be there

# Gives the pipes the numbers that Chromium expects, and becomes it.
START = """
import fcntl, os, sys
to_browser, from_browser = map(int, sys.argv[1:3])
from_browser = fcntl.fcntl(from_browser, fcntl.F_DUPFD, 10)  # or the next line may replace it
os.dup2(to_browser, 3)
os.dup2(from_browser, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser. What happens in it is kept in `events`."""

    def __init__(self, chromium: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.mkdtemp(prefix="statecut-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(to_browser), str(from_browser), chromium, *flags],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def medium(self, *, scheme: str = "light", medium: str = "") -> None:
        """How the reader likes it: light or dark, on a screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text,
            )  # fmt: skip

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = self.call(
            "Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def print(self, path: Path) -> None:
        answer = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        height = min(size["height"], 8000)  # or the picture would be too large to be looked at
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}}

    def _next(self) -> dict[str, Any]:
        ends = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, ends - time.monotonic()))
            more = os.read(self._read, 1 << 20) if ready else b""
            if not more:
                raise RuntimeError("chromium gives no answer")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def main(page: str, picture: str) -> None:
    chromium = find_chromium()
    if chromium is None:
        sys.exit("Chromium is not installed; on Debian: apt-get install chromium")
    with Browser(chromium) as browser:
        browser.resize(1040, 665)
        browser.medium()
        browser.open(Path(page))
        browser.screenshot(Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
