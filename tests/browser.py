"""A headless Chromium for tests. It is controlled by the DevTools protocol over a pipe, without a driver or a port.

    with Browser(chromium(), folder) as browser:
        page = browser.open(file, width=1280)
        page.run("document.title")

A page records its network requests in `page.requests`, those that its content security policy blocks in
`page.blocked`, its console messages in `page.console`, and its uncaught exceptions in `page.errors`. With
`AUTOSHARD_BROWSER=required` in the environment, a test that needs a browser and finds none fails.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 60.0  # for an answer or for a page to load; chosen


def chromium() -> str | None:
    """Returns the path of a browser, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def is_required() -> bool:
    """Returns whether the environment requires a browser."""
    return os.environ.get("AUTOSHARD_BROWSER") == "required"


class BrowserError(Exception):
    """The browser did not answer, or it reported an error."""


class Browser:
    """A running Chromium with its own profile."""

    def __init__(self, path: str, profile: Path):
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The browser reads commands from descriptor 3 and writes answers to 4. The ends of the pipes first get high
        # numbers, so that they cannot be 3 or 4 themselves.
        ends = [os.dup2(to_browser, 103), os.dup2(from_browser, 104)]
        redirected = ["bash", "-c", 'exec "$@" 3<&103 4>&104 103<&- 104>&-', "browser", *command]
        with open(profile.parent / f"{profile.name}.log", "wb") as log:
            self.process = subprocess.Popen(
                redirected, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self.log, self.out, self.into = Path(log.name), ours_out, ours_in
        self.pages: dict[str, Page] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._number, self._rest = 0, b""

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser and its child processes."""
        for end in (self.out, self.into):
            os.close(end)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Sends a command and waits for the answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while number not in self._answers:
            self.listen(end - time.monotonic())
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def listen(self, seconds: float) -> None:
        """Waits for output of the browser and handles its messages."""
        ready, _, _ = select.select([self.into], [], [], max(seconds, 0.0))
        read = os.read(self.into, 1 << 20) if ready else b""
        if not read:
            raise BrowserError(
                f"the browser did not answer, or it ended. Its log: {self.log.read_text(errors='replace')[-2000:]}"
            )
        *whole, self._rest = (self._rest + read).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self.pages.get(message.get("sessionId", ""))) is not None:
                page.handle(message["method"], message["params"])

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """Opens a file in a new page and waits until it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.resize(width, height)
        page.call("Page.navigate", url=file.as_uri())
        end = time.monotonic() + TIMEOUT_S
        while not page.is_loaded:
            self.listen(end - time.monotonic())
        return page


class Page:
    """A page of the browser, and a record of its events."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session, self.is_loaded = browser, session, False
        self.requests: list[str] = []
        self.blocked: list[str] = []
        self._urls: dict[str, str] = {}
        self.console: list[str] = []
        self.errors: list[str] = []

    def handle(self, method: str, params: dict[str, Any]) -> None:
        """Handles an event of the page."""
        if method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self._urls[params["requestId"]] = params["request"]["url"]
        elif method == "Network.loadingFailed" and params.get("blockedReason") == "csp":
            self.blocked.append(self._urls[params["requestId"]])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command for this page; see `Browser.call`."""
        return self.browser.call(method, self.session, **params)

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """Evaluates a JavaScript expression and returns its value."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise BrowserError(f"{script[:200]}: {reply['exceptionDetails']['exception'].get('description')}")
        return reply["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Scrolls an element into view and returns the position of its middle in the window, in pixels."""
        where = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return where[0], where[1]

    def point(self, selector: str) -> None:
        """Moves the mouse to an element."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Clicks at the position of an element, as a person does: an element on top of it gets the click."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field by typing."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key="Backspace", code="Backspace",
                          windowsVirtualKeyCode=8)  # fmt: skip

    def screenshot(self, file: Path, top: float = 0.0, height: float | None = None) -> None:
        """Saves an image of the page, or of the part that starts at `top`."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": top, "width": width, "height": height or whole - top, "scale": 1}
        image = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(image["data"]))
