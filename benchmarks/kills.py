"""Kill processes of a launched run, and count what is lost.

    python benchmarks/kills.py                   50 kills of 4 processes, those that are stored included
    python benchmarks/kills.py --kills 3 --processes 2 --fresh
    python benchmarks/kills.py --show            print the stored figures

`autoshard launch` trains a small GPT in local processes. When an attempt has completed a new checkpoint, one of its
processes gets SIGKILL. Every fifth time it gets SIGSTOP instead, so that it hangs. The run must continue from the
checkpoint that was the newest at the time of the signal, or from a later one. A restart counts as a hang if it takes
longer than the sum of three deadlines: that of a step, that of the end of the other processes, and `START_S`.

Kills of 4 processes are stored in `results/kills.json`, each as soon as it is over. If the benchmark is stopped, it can
go on later: `launch` numbers the launched runs that the kills belong to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS
from rich.console import Console
from rich.table import Table

from autoshard.ckpt import Checkpointer
from autoshard.launch.constants import FAILED_S
from autoshard.train.run.attempts import read_attempts

STEP_S = 30.0  # deadline of a step, unless --step-seconds gives another
START_S = 240.0  # deadline of the first saved step of an attempt; chosen for two cores with other work
STORED_PROCESSES = 4
POLL_S = 0.2  # seconds between two looks at a condition; chosen
STORED = RESULTS / "kills.json"
MODEL = (
    "--preset quick --gpt.layers 1 --gpt.width 32 --gpt.heads 2 --gpt.context 16 --batch-size 16 --virtual-devices 2 "
    "--sample-tokens 0 --log-every 5 --checkpoint-every 5 --steps 1000000 --eval-every 0"
).split()


def until(condition: Callable[[], Any], seconds: float, launcher: subprocess.Popen[bytes]) -> Any:
    """Wait for a true value and return it; None after some seconds, or once the launcher has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and launcher.poll() is None:
        if value := condition():
            return value
        time.sleep(POLL_S)
    return None


def processes_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Return the process numbers of the launcher's children."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def kill_again_and_again(
    folder: Path, numbers: range, processes: int, step_s: float, add: Callable[[dict[str, Any]], None]
) -> None:
    """Launch a run, and kill one of its processes after each restart.

    Args:
        folder: An empty folder.
        numbers: Numbers of the kills, which decide what is killed, when and how.
        processes: Processes of the run.
        step_s: Deadline of a step, in seconds.
        add: Gets a row for each kill, as soon as the run has continued.
    """
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 500)
    run_dir = folder / "run"
    command = [sys.executable, "-m", "autoshard", "launch", "--processes", str(processes), "--", "train", *MODEL,
               "--data", "text.txt", "--run-dir", "run", "--deadline-seconds", str(step_s)]  # fmt: skip
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    log = (folder / "log.txt").open("wb")
    launcher = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    attempt = 0  # the last attempt that was killed

    def first(event: str) -> dict[str, Any] | None:
        """Return the newest attempt's first such event, if that attempt began after the last kill."""
        events = [each for each in read_attempts(run_dir / "attempts.jsonl") if each["attempt"] > attempt]
        newest = max((each["attempt"] for each in events), default=0)
        return next((each for each in events if each["event"] == event and each["attempt"] == newest), None)

    def newest() -> int:
        """Return the step of the newest complete checkpoint; -1 if there is none."""
        return max(Checkpointer(run_dir / "checkpoints", keep=None).steps(), default=-1)

    def ready() -> tuple[int, list[int]] | None:
        """Return the number of an attempt that has completed a new checkpoint, and its processes.

        An attempt that is killed before counts as a failure, and the run gives up after three of them.
        """
        begun, pids = first("begin"), processes_of(launcher)
        if begun is None or len(pids) != processes or newest() <= begun["step"]:
            return None
        return begun["attempt"], pids

    try:
        for kill in numbers:
            chosen = random.Random(kill)  # every run of the benchmark kills the same processes
            if not until(ready, START_S, launcher):
                raise SystemExit(f"no attempt after {attempt} saved in {START_S:g} s:\n{_end_of(folder / 'log.txt')}")
            time.sleep(chosen.uniform(0.0, 2.0))
            victim, number = chosen.randrange(processes), signal.SIGSTOP if kill % 5 == 4 else signal.SIGKILL
            if (again := until(ready, START_S, launcher)) is None:
                raise SystemExit(f"no process is left to kill:\n{_end_of(folder / 'log.txt')}")
            before = newest()
            unasked, (attempt, pids) = again[0] - attempt - 1, again
            os.kill(pids[victim], number)
            since = time.monotonic()
            begun = until(lambda: first("begin"), step_s + FAILED_S + START_S, launcher)
            row = {
                "signal": number.name,
                "process": victim,
                "attempts_without_a_kill": unasked,
                "saved_before": before,
                "continued_from": begun["step"] if begun else None,
                "seconds": round(time.monotonic() - since, 1),
            }
            print(row, flush=True)
            add(row)
            if begun is None:
                break
    finally:
        launcher.terminate()
        launcher.wait(300)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all kills."""
    lost = [row["saved_before"] - row["continued_from"] for row in rows if row["continued_from"] is not None]
    seconds = [row["seconds"] for row in rows]
    return {
        "kills": len(rows),
        "lost_steps": sum(max(each, 0) for each in lost),
        "hangs": sum(row["continued_from"] is None for row in rows),
        "attempts_without_a_kill": sum(row["attempts_without_a_kill"] for row in rows),
        "restart_seconds_median": statistics.median(seconds),
        "restart_seconds_longest": max(seconds),
    }


def main() -> None:
    """Run the benchmark, or print what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all, with those that are stored")
    parser.add_argument("--processes", type=int, default=STORED_PROCESSES)
    parser.add_argument("--step-seconds", type=float, default=STEP_S, help="deadline of a step")
    parser.add_argument("--fresh", action="store_true", help="forget the kills that are stored")
    parser.add_argument("--show", action="store_true", help="print the stored figures only")
    given = parser.parse_args()
    setting = {"processes": given.processes, "step_seconds": given.step_seconds}
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    if not given.show:
        known = all(stored.get(name) == value for name, value in setting.items()) and not given.fresh
        rows: list[dict[str, Any]] = stored["rows"] if known else []
        launch = 1 + max((row["launch"] for row in rows), default=0)
        stored = setting | {"figures": {}, "rows": rows}

        def add(row: dict[str, Any]) -> None:
            rows.append({"launch": launch, "date": datetime.now(UTC).date().isoformat()} | row)
            stored["figures"] = figures(rows)
            if given.processes == STORED_PROCESSES:
                STORED.write_text(json.dumps(stored, indent=1) + "\n")

        with tempfile.TemporaryDirectory() as folder:
            kill_again_and_again(Path(folder), range(len(rows), given.kills), given.processes, given.step_seconds, add)
    if not stored:
        raise SystemExit(f"{STORED} does not exist: run the benchmark without --show")
    table = Table("figure", "value", title=f"{stored['processes']} local processes")
    for name, value in stored["figures"].items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
