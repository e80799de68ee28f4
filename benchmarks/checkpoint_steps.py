"""Measure how much checkpoints slow down the training of a model of 100 million parameters.

    python benchmarks/checkpoint_steps.py [--rounds 5]

A GPT with AdamW, sharded by the planner over eight virtual devices, takes steps on random tokens. In turn:

    plain      a step
    returned   the time until `save` returns; a step follows
    saved      the save and that step together. `save` dispatches a copy on the devices, which also delays the step
    beside     steps while a save is computing digests and writing

On virtual devices the copy, the digests, the writing and the steps share the host's cores; on a pod they do not.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import common  # sets up the devices first
import jax
import numpy as np
from real_steps import batch_of, create

from autoshard import auto_shard
from autoshard.ckpt import Checkpointer
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step

MODEL = workload("gpt-125m").with_(vocab=16384, context=128, batch_size=8)
PLAN = "fsdp:8"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    train_step, state, batch = workload_step(MODEL)
    step = auto_shard(train_step, donate_argnums=0, plan=PLAN)
    step.plan(state, batch)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    state = step.init(create(MODEL), jax.random.key(0))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    tokens = batch_of(MODEL)

    def timed_step(checkpoints: Checkpointer | None = None) -> tuple[float, float]:
        """Return the seconds of a step with its save, and of the save alone until it returns."""
        nonlocal state
        begun = time.perf_counter()
        if checkpoints is not None:
            checkpoints.save(0, state)
        returned = time.perf_counter() - begun
        state, metrics = step(state, tokens)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - begun, returned

    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "saved", "returned", "beside")}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as root, Checkpointer(Path(root)) as checkpoints:
            plain = timed_step()[0]
            saved, returned = timed_step(checkpoints)
            beside = []
            while not checkpoints.steps():
                beside.append(timed_step()[0])
            if number:  # the first compiles
                for name, value in (("plain", plain), ("saved", saved), ("returned", returned)):
                    seconds[name].append(value)
                seconds["beside"] += beside[:-1]  # the writing ends during the last one
    values = {name: np.array(each) for name, each in seconds.items()}
    rows = [common.measured(name, 1e3 * each, "ms") for name, each in values.items() if len(each)]
    plain = float(np.median(values["plain"]))
    rows += [
        common.measured("`save` returned after, of a step", values["returned"] / plain, "x", 0.03),
        common.measured("a step with its save / a step", values["saved"] / plain, "x"),
    ]
    if len(values["beside"]):
        rows.append(common.measured("steps during the writing / others", values["beside"] / plain, "x"))
    context = {"parameters": parameters, "state_bytes": nbytes, "tokens": MODEL.batch_size * MODEL.config.context}
    common.report("checkpoint_steps", rows, rounds=rounds, plan=PLAN, **context)


if __name__ == "__main__":
    main()
