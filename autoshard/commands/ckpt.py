"""`autoshard ckpt`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.arguments import parser


def run(arguments: Sequence[str]) -> int:
    """List or inspect; see `autoshard ckpt --help`."""
    options = parser(
        "ckpt",
        "List the checkpoints of a run, show the config that one was saved with, or check its content.",
        "autoshard ckpt runs/mine --step 200 --verify",
    )
    options.add_argument("run_dir", type=Path, help="folder of the run")
    options.add_argument("--step", type=int, help="show the config of this checkpoint")
    options.add_argument("--verify", action="store_true", help="read every array and compare it with its digest")
    given = options.parse_args(arguments)
    from autoshard.train.restore import open_checkpoints

    with contextlib.closing(open_checkpoints(given.run_dir)) as checkpoints:
        steps = checkpoints.steps() if given.step is None else [given.step]
        if given.step is not None:
            print(json.dumps(checkpoints.config(given.step), indent=1))
        damaged = 0
        for step in steps:
            leaves = checkpoints.verify(step) if given.verify else []
            damaged += bool(leaves)
            state = f"  damaged: {', '.join(leaves)}" if leaves else "  intact" if given.verify else ""
            if given.step is None or given.verify:
                print(f"step {step}{state}")
    return 1 if damaged else 0
