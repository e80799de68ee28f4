"""Run the programs and commands of a page of `docs/`, and compare what they print with what the page shows.

A page is run from top to bottom, in an empty folder, with eight virtual CPU devices:

- A `python` block continues the program of the blocks before it. If its first line is a comment with a file name, such
  as `# step.py`, the block is written to that file instead.
- A `sh` block is run by bash; `autoshard` and `python` are those of the tests.
- A `text` block directly below shows what the block prints. `...` stands for any text, as in doctest, and spaces do not
  count.

A comment above a block changes that: `<!-- examples/plain_jax.py -->` says that the block is a part of that file, whose
own test runs it. `<!-- slow -->` leaves the block to `make test-all`; the rest of the page must do without it. Other
words are marks of pytest, such as `tpu_compile`.

    python -m tests.pages docs/tutorials/pipeline.md     # prints what each block prints, to renew a page
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600  # seconds of a block of commands; chosen

_BLOCK = re.compile(
    r"(?:^<!-- (?P<words>[^\n]*) -->\n)?^```(?P<language>python|sh)\n(?P<text>.*?)^```\n"
    r"(?:\n^```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A program or commands on a page, and the output that the page shows below them."""

    page: Path
    line: int
    language: str
    text: str
    words: tuple[str, ...]
    output: str | None

    @property
    def source(self) -> Path | None:
        """The file under examples/ that has this block."""
        files = [word for word in self.words if word.startswith("examples/")]
        return ROOT / files[0] if files else None

    @property
    def file(self) -> str | None:
        """The name of the file that the reader saves the block to."""
        name = re.match(r"# ([\w.]+\.\w+)\n", self.text)
        return name[1] if name and self.source is None else None

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if not word.startswith("examples/"))


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that are run, in order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            tuple((match["words"] or "").split()),
            match["output"],
        )
        for match in _BLOCK.finditer(text)
    ]


def run_blocks(page: Path, folder: Path, *, slow: bool) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in `folder`, and yield each with what it printed.

    Args:
        page: The page.
        folder: The empty folder in which they are run.
        slow: Whether blocks with marks are run, too.
    """
    program: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page):
        if block.source is not None or (block.marks and not slow):
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "sh":
            yield block, _run_commands(block, folder)
        else:
            yield block, _run_python(block, folder, program)


def differences(block: Block, printed: str) -> str:
    """Compare what a block printed with what its page shows. The empty text means that they agree."""
    if block.output is None:
        return ""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if checker.check_output(block.output, printed, flags):
        return ""
    return f"{block.page.name}:{block.line} prints something else.\nThe page:\n{block.output}\nPrinted:\n{printed}"


def _run_python(block: Block, folder: Path, program: dict[str, Any]) -> str:
    # Empty lines before the code: messages and plans then name the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(folder / f"{block.page.stem}.py"), "exec")
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        exec(code, program)
    return out.getvalue()


def _run_commands(block: Block, folder: Path) -> str:
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, command in {"python": "", "autoshard": " -m autoshard"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "AUTOSHARD_CACHE": str(folder / ".cache"),
    }
    completed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if completed.returncode:
        raise AssertionError(f"{block.page.name}:{block.line} ends with {completed.returncode}:\n{completed.stderr}")
    return completed.stdout


def _show(page: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        for block, printed in run_blocks(page, Path(folder), slow=True):
            print(f"== {page.name}:{block.line}{' DIFFERS' if differences(block, printed) else ''}\n{printed}")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    _show(Path(sys.argv[1]).resolve())
