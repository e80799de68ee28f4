"""Compare the time to the first step of `autoshard train` with that of the same step by hand.

    python benchmarks/first_step.py [--rounds 5]

Two programs start in turn, each in a new process without a compilation cache, on eight virtual CPU devices:

    autoshard train    the preset `quick`, until the line of its first step is in `metrics.jsonl`
    by hand            `first_step_by_hand.py`: the same step and batch size, `jax.jit`, shardings by hand

A round gives one ratio: the trainer's time over the time by hand plus the trainer's planning time, which it records in
`attempts.jsonl`. Times are those of the clock, and the CPU seconds of the process up to that moment, which other work
on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import Row, measured, report

HERE = Path(__file__).resolve().parent
ARGUMENTS = "--preset quick --steps 1000 --eval-every 0 --sample-tokens 0 --log-every 1 --plan fsdp:8"
TIMEOUT_S = 600.0  # chosen
POLL_S = 0.01


def has_loss(printed: str) -> bool:
    """Return whether a line is the loss of a step. Lines of a traceback may contain the word too."""
    return re.search(r"^loss \d+\.\d+$", printed, re.MULTILINE) is not None


def seconds_until(done: Callable[[], bool], command: list[str], folder: Path) -> tuple[float, float]:
    """Start a command, and stop it once a condition holds; return the seconds by the clock and of the CPU."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    env |= {"PYTHONPATH": f"{HERE.parent}:{HERE}", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    begin = time.perf_counter()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            while not done():
                if process.poll() or time.perf_counter() - begin > TIMEOUT_S:
                    raise SystemExit(f"{' '.join(command)} made no step:\n{(folder / 'log.txt').read_text()[-2000:]}")
                time.sleep(POLL_S)
            wall = time.perf_counter() - begin
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return wall, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            process.kill()
            process.wait()


def round_of(folder: Path, text: Path) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return the times of the trainer, those by hand, and the trainer's planning time."""
    folder.mkdir()
    run, out = folder / "run", folder / "log.txt"
    trainer = [sys.executable, "-m", "autoshard", "train", *ARGUMENTS.split(), "--data", str(text), "--run-dir", "run"]
    metrics = run / "metrics.jsonl"
    ours = seconds_until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), trainer, folder)
    begin = json.loads((run / "attempts.jsonl").read_text().splitlines()[0])
    out.unlink()
    by_hand = [sys.executable, str(HERE / "first_step_by_hand.py"), str(text)]
    theirs = seconds_until(lambda: out.exists() and has_loss(out.read_text()), by_hand, folder)
    return ours, theirs, begin["seconds"]["plan"]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_text("to be or not to be, that is the question\n" * 25_000)
        rounds = [round_of(Path(name) / str(number), text) for number in range(given.rounds)]
    plans = [plan for *_, plan in rounds]
    rows: list[Row] = []
    for index, kind, target in ((0, "clock", 1.1), (1, "CPU", None)):
        ours, theirs = [mine[index] for mine, *_ in rounds], [other[index] for _, other, _ in rounds]
        ratios = [mine / (other + plan) for mine, other, plan in zip(ours, theirs, plans, strict=True)]
        rows.append(Row(f"autoshard train, {kind}", median(ours), "s"))
        rows.append(Row(f"by hand, {kind}", median(theirs), "s"))
        rows.append(measured(f"train / (by hand + planning), {kind}", ratios, "", target))
    rows.append(Row("planning", median(plans), "s"))
    report("first_step", rows, rounds=given.rounds)


if __name__ == "__main__":
    main()
