"""Compare this checkout's planning, dispatch and propagation times with those of another revision.

    python benchmarks/against.py --against REV

REV is checked out into a temporary git worktree. The checkouts are measured in turns, old, new, old, new, ..., each
measurement in a process of its own (`against_measurements.py`). A table shows for each measurement

    ratio   the median over the turns of new / old
    noise   the largest factor between two neighbouring turns of the old checkout

and the exit status is 1 if a ratio exceeds both 1.03 and the noise, 2 if the comparison cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURE = Path(__file__).with_name("against_measurements.py")
NAMES = ("planning", "dispatch", "propagation")
TOLERATED_RATIO = 1.03  # chosen: a smaller slowdown is tolerated
MIN_TURNS = 5  # chosen: single outliers move the median of fewer ratios
TIMEOUT_S = 600  # of one measurement; chosen
# Chosen: the dispatch time beyond that of `jax.jit` can be about zero. Ratios of shorter times are noise of the clock.
FLOOR_US = 1.0


class Unmeasurable(Exception):
    """The comparison cannot be made. The message is one line."""


@dataclass(frozen=True)
class Comparison:
    """The times of one measurement in both checkouts, in microseconds, one of each per turn."""

    name: str
    old_us: Sequence[float]
    new_us: Sequence[float]

    @property
    def ratio(self) -> float:
        """The median over the turns of new / old."""
        pairs = zip(floored(self.old_us), floored(self.new_us), strict=True)
        return statistics.median(new / old for old, new in pairs)

    @property
    def noise(self) -> float:
        """The largest factor, at least 1, by which neighbouring turns of the old checkout differ."""
        return max(max(later / old, old / later) for old, later in pairwise(floored(self.old_us)))

    @property
    def is_slower(self) -> bool:
        """Whether the new checkout is slower by more than is tolerated and more than the noise."""
        return self.ratio > max(TOLERATED_RATIO, self.noise)

    def __str__(self) -> str:
        old_us, new_us = statistics.median(self.old_us), statistics.median(self.new_us)
        verdict = "slower" if self.is_slower else "ok"
        return f"{self.name:12} {old_us:12.1f} {new_us:12.1f} {self.ratio:8.3f} {self.noise:8.3f}  {verdict}"


HEADING = f"{'':12} {'old, us':>12} {'new, us':>12} {'ratio':>8} {'noise':>8}"


def floored(times_us: Sequence[float]) -> list[float]:
    """Times that are at least `FLOOR_US`."""
    return [max(time_us, FLOOR_US) for time_us in times_us]


def commit_of(revision: str) -> str:
    """The full hash of a revision.

    Raises:
        Unmeasurable: This repository has no such commit.
    """
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        raise Unmeasurable(f"--against {revision!r}: {ROOT} has no such commit: give a branch, a tag or a hash")
    return found.stdout.strip()


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary worktree of a commit, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="autoshard-against-") as folder:
        worktree = Path(folder) / "checkout"
        added = git("worktree", "add", "--detach", "--quiet", str(worktree), commit)
        try:
            if added.returncode:
                raise Unmeasurable(f"git worktree add failed: {last_line(added.stderr)}")
            yield worktree
        finally:
            git("worktree", "remove", "--force", str(worktree))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def last_line(text: str) -> str:
    """The last line of an output."""
    return (text.strip() or "no output").splitlines()[-1]


def measured_us(name: str, checkout: Path) -> float:
    """Run one measurement of a checkout in a process of its own.

    Raises:
        Unmeasurable: It failed, took too long, or measured another checkout.
    """
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    try:
        ran = subprocess.run(
            [sys.executable, MEASURE, name],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Unmeasurable(f"{name} of {checkout} took more than {TIMEOUT_S} s") from error
    if ran.returncode:
        raise Unmeasurable(f"{name} of {checkout} failed: {last_line(ran.stderr)}")
    result = json.loads(last_line(ran.stdout))
    if Path(result["package"]) != (checkout / "autoshard").resolve():
        raise Unmeasurable(f"{name} of {checkout} imported {result['package']} instead")
    return result["us"]


def compared(old: Path, new: Path, turns: int, names: Sequence[str] = NAMES) -> Iterator[Comparison]:
    """Measure two checkouts in turns."""
    for name in names:
        times = [(measured_us(name, old), measured_us(name, new)) for _ in range(turns)]
        old_us, new_us = zip(*times, strict=True)
        yield Comparison(name, old_us, new_us)


def turns_of(text: str) -> int:
    """The argument of `--turns`."""
    if not text.isdecimal() or int(text) < MIN_TURNS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {MIN_TURNS}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare this checkout's speed with that of another revision.")
    parser.add_argument("--against", metavar="REV", required=True, help="the revision that counts as old")
    parser.add_argument("--turns", type=turns_of, default=MIN_TURNS, help=f"at least {MIN_TURNS}, the default")
    options = parser.parse_args(arguments)
    try:
        commit = commit_of(options.against)
        print(f"old: {commit[:12]}; new: {ROOT}; {options.turns} turns\n{HEADING}", flush=True)
        slower = []
        with checked_out(commit) as old:
            for comparison in compared(old, ROOT, options.turns):
                print(comparison, flush=True)
                slower += [comparison.name] if comparison.is_slower else []
    except Unmeasurable as error:
        print(f"against.py: {error}", file=sys.stderr)
        return 2
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
