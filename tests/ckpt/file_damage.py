"""Ways to damage a file, and the kinds of files in a directory of steps."""

import itertools
import os
import random
import re
from collections.abc import Callable
from pathlib import Path


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def empty(file: Path, rng: random.Random) -> None:
    os.truncate(file, 0)


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


Damage = Callable[[Path, random.Random], None]
DAMAGES: tuple[Damage, ...] = (flip, truncate, empty, delete)


def kind_of(file: Path) -> str:
    """Return a file's path without the step's number and without names that are digests."""
    return re.sub(r"[0-9a-f]{32}", "*", re.sub(r"step_\d+", "step", str(file)))


def kinds_of(folder: Path) -> dict[str, list[Path]]:
    """Return the relative paths of all non-empty files below a folder, by kind."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size]
    relative = sorted((file.relative_to(folder) for file in files), key=kind_of)
    return {kind: list(group) for kind, group in itertools.groupby(relative, kind_of)}
