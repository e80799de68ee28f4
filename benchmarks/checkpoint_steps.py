"""Compare saves beside training steps with Orbax's own: when they are committed, how long they block, what they cost.

    python benchmarks/checkpoint_steps.py [--rounds 5] [--context 8]

A GPT with AdamW, 480 MB in 64 leaves, sharded by the planner over eight virtual devices, takes steps of some tenths of
a second on random tokens, each of which donates the state. In turn, each checkpointer saves beside them:

    plain      steps without a save, before it
    blocked    the time until `save` returns
    committed  the time from the call until the step is on disk under its name, in plain steps
    beside     the median of the steps that begin before the step is committed, relative to plain ones

The floor is the least that any save does: it copies the state on the devices, and one thread writes the bytes with
`os.write` into files of a megabyte, without a format, digests or synchronization with the disk.

On virtual devices the copy, the digests, the writing and the steps share the host's cores; on a pod they do not. A save
takes about half a core-second, whatever the steps do, so the shorter the steps, the more of them it slows down. On a
machine that others use too, only ratios within one run mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import common  # sets up the devices first
import jax
import numpy as np
import orbax.checkpoint
from orbax.checkpoint import v1 as ocp
from real_steps import batch_of, create

from autoshard import auto_shard
from autoshard.ckpt import Checkpointer, RetentionPolicy
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step

MODEL = workload("gpt-125m").with_(vocab=4096, width=512, heads=8, batch_size=8, remat="none")
PLAN = "fsdp:8"
PLAIN_STEPS = 4  # before each save; chosen
OURS, FLOOR = "ours", "the floor"
FLOOR_FILE_BYTES = 2**20  # chosen


class Saver(NamedTuple):
    """A checkpointer: starts a save of a state, waits for it, and where a step is when it is committed."""

    save: Callable[[int, Any], Any]
    wait: Callable[[], Any]
    path: Callable[[int], Path]


class Floor:
    """Writes the bytes of a state with one thread and nothing else. Keeps one step."""

    def __init__(self, root: Path) -> None:
        self._root, self._thread = root, ThreadPoolExecutor(1)
        self._last: tuple[int, Future[None]] | None = None

    def save(self, step: int, state: Any) -> None:
        """Copy the state on the devices, and write the copy in the background."""
        leaves = jax.tree.leaves(state)
        copies = jax.device_put(leaves, [leaf.sharding for leaf in leaves], may_alias=False)
        self._last = step, self._thread.submit(self._write, step, copies)

    def wait(self) -> None:
        """Wait for the write, and remove the step before it."""
        if self._last is not None:
            self._last[1].result()
            shutil.rmtree(self.path(self._last[0] - 1), ignore_errors=True)

    def path(self, step: int) -> Path:
        """The folder of a step that is complete."""
        return self._root / str(step)

    def _write(self, step: int, copies: list[jax.Array]) -> None:
        unfinished = self._root / "unfinished"
        unfinished.mkdir(parents=True)
        shards = (s.data for copy in copies for s in copy.addressable_shards if s.replica_id == 0)
        parts = (part for shard in shards for part in _parts(np.asarray(shard)))
        for number, part in enumerate(parts):
            file = os.open(unfinished / str(number), os.O_CREAT | os.O_WRONLY)
            os.write(file, part)
            os.close(file)
        unfinished.rename(self.path(step))


def _parts(array: np.ndarray) -> Iterator[memoryview]:
    flat = array.reshape(-1).view(np.uint8).data
    return (flat[start : start + FLOOR_FILE_BYTES] for start in range(0, len(flat), FLOOR_FILE_BYTES))


@contextlib.contextmanager
def savers(root: Path, state: Any) -> Iterator[dict[str, Saver]]:
    """Open the checkpointers, each of which keeps one step."""
    newest: Any = ocp.training.preservation_policies.LatestN(1)  # Orbax types its parameter more narrowly
    options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=1)
    with (
        Checkpointer(root / OURS, keep=RetentionPolicy(last=1)) as ours,
        ocp.training.Checkpointer(str(root / "training"), preservation_policy=newest) as training,
        orbax.checkpoint.CheckpointManager(root / "manager", options=options) as manager,
    ):
        ours.prepare(state)
        pending: list[Any] = []
        floor = Floor(root / "floor")
        yield {
            FLOOR: Saver(floor.save, floor.wait, floor.path),
            OURS: Saver(ours.save, ours.wait, lambda step: root / OURS / f"step_{step:08d}"),
            "Orbax's Checkpointer": Saver(
                lambda step, state: pending.append(training.save_async(step, state)),
                lambda: pending.pop().result(),
                lambda step: root / "training" / str(step),
            ),
            "Orbax's CheckpointManager": Saver(
                lambda step, state: manager.save(step, args=orbax.checkpoint.args.StandardSave(state)),
                manager.wait_until_finished,
                lambda step: root / "manager" / str(step),
            ),
        }


class Times(NamedTuple):
    """One save: seconds until it returned and was committed, of a plain step, and of a step beside it."""

    blocked: float
    committed: float
    plain: float
    beside: float


def save_beside(saver: Saver, number: int, current: Callable[[], Any], step: Callable[[], float]) -> Times:
    """Take steps, save, and take steps until the save is committed."""
    plain = float(np.median([step() for _ in range(PLAIN_STEPS)]))
    committed: list[float] = []

    def watch() -> None:
        while not saver.path(number).exists():
            time.sleep(0.003)
        committed.append(time.perf_counter())

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.perf_counter()
    saver.save(number, current())
    blocked = time.perf_counter() - begun
    beside = [step()]
    while not committed:
        beside.append(step())
    watching.join()
    saver.wait()
    return Times(blocked, committed[0] - begun, plain, float(np.median(beside)))


def _delay(one: Times) -> float:
    """Seconds by which a save delays the steps until it is committed."""
    return one.committed * (1 - one.plain / one.beside)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=8, help="tokens in a row: more of them make longer steps")
    options = parser.parse_args()
    model = MODEL.with_(context=options.context)
    train_step, state, batch = workload_step(model)
    step = auto_shard(train_step, donate_argnums=0, plan=PLAN)
    step.plan(state, batch)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    state = step.init(create(model), jax.random.key(0))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    tokens = batch_of(model)

    def timed_step() -> float:
        nonlocal state

        def run() -> None:
            nonlocal state
            state, metrics = step(state, tokens)
            jax.block_until_ready((state, metrics))

        return common.timed(run)[0]

    found: dict[str, list[Times]] = {}
    first: dict[str, Times] = {}
    with tempfile.TemporaryDirectory() as root, savers(Path(root), state) as each:
        timed_step()
        for number in range(options.rounds + 1):
            for who, saver in each.items():
                times = save_beside(saver, number, lambda: state, timed_step)
                if number:  # the first starts threads and compiles
                    found.setdefault(who, []).append(times)
                else:
                    first[who] = times
    rows = [common.measured("a plain step", [1e3 * one.plain for times in found.values() for one in times], "ms")]
    blocked = {who: np.array([one.blocked for one in times]) for who, times in found.items()}
    for who, times in found.items():
        target = 2.0 if who == OURS else None
        rows.append(common.measured(f"committed: {who}", [one.committed / one.plain for one in times], "steps", target))
    for who in found:
        rows.append(common.measured(f"blocked: {who}", 1e3 * blocked[who], "ms"))
        rows.append(common.Row(f"blocked by the first save: {who}", 1e3 * first[who].blocked, "ms"))
    rows += [
        common.measured(f"blocked / {who}", blocked[OURS] / each_blocked, "x", 1.0)
        for who, each_blocked in blocked.items()
        if who not in (OURS, FLOOR)
    ]
    for who, times in found.items():
        target = 1.15 if who == OURS else None
        rows.append(
            common.measured(f"steps beside / plain: {who}", [one.beside / one.plain for one in times], "x", target)
        )
    floor_and_ours = list(zip(found[FLOOR], found[OURS], strict=True))
    rows += [
        common.measured("committed: ours / the floor", [o.committed / f.committed for f, o in floor_and_ours], "x"),
        common.measured("steps beside: ours / the floor", [o.beside / f.beside for f, o in floor_and_ours], "x"),
        common.measured("delay of a save: the floor", [_delay(f) for f, _ in floor_and_ours], "s"),
        common.measured("delay of a save: ours", [_delay(o) for _, o in floor_and_ours], "s"),
    ]
    context = {"parameters": parameters, "state_bytes": nbytes, "tokens": model.batch_size * model.config.context}
    common.report("checkpoint_steps", rows, rounds=options.rounds, plan=PLAN, **context)


if __name__ == "__main__":
    main()
