"""Renders the page of a plan in Chromium and writes pictures of it. `make screenshots` renews docs/plan.png.

    python -m scripts.screenshots               the picture of the docs
    python -m scripts.screenshots FOLDER        whole pages as well: light, dark and narrow, to look at

It needs a Chromium (`chromium`, `google-chrome`) on the path.
"""

import base64
import sys
import tempfile
from pathlib import Path

from autoshard.cli import main as autoshard
from tests.browser import Browser, Page, chromium

PICTURE = Path(__file__).parents[1] / "docs" / "plan.png"
COMMAND = "plan llama2-7b --target v5p:2x2x2 --batch-size 32 --context 2048".split()
WIDTH, NARROW, HEIGHT = 1280, 390, 900  # pixels
VIEWS = (
    ("light", WIDTH, False), ("dark", WIDTH, True), ("narrow", NARROW, False), ("narrow-dark", NARROW, True)
)  # fmt: skip


def main() -> None:
    """Makes the plan and the pictures."""
    browser_path = chromium()
    if browser_path is None:
        sys.exit("screenshots: there is no Chromium on the path. Install chromium, or set PATH to where it is")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.html")
        if code := autoshard([*COMMAND, "--html", str(file)]):
            sys.exit(code)
        with Browser(browser_path, Path(folder, "profile")) as browser:
            PICTURE.write_bytes(picture(browser.open(file, WIDTH, HEIGHT)))
            for target in map(Path, sys.argv[1:2]):
                target.mkdir(parents=True, exist_ok=True)
                for name, width, dark in VIEWS:
                    page = browser.open(file, width, HEIGHT, dark)
                    height = page.run("document.documentElement.scrollHeight")
                    page.resize(width, int(height))
                    (target / f"{name}.png").write_bytes(picture(page))


def picture(page: Page) -> bytes:
    """A PNG of the window of a page."""
    return base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])


if __name__ == "__main__":
    main()
