"""Compare a save with Orbax's own: how long it blocks the training loop, its total time, memory and bytes written.

    python benchmarks/checkpoint.py [--mib 400] [--many 10000]

The state is float32 matrices, sharded over eight virtual devices. One process measures in turn:

    copy       one copy of the state on the devices, until it is done
    blocking   the time until `save` returns
    total      the time until the step is committed
    digests    of the state, alone. A save computes them in the background, as a part of the total

Memory is measured in separate processes: the largest resident size during a save, a restore or an export, minus that
before it. A small state is saved first, because imports and XLA's first programs take 60 to 100 MiB once per process.
Training steps, with and without a save in the background, change all of the state in place and multiply matrices for
some tenths of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common  # sets up the devices first
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer, RetentionPolicy
from autoshard.ckpt.state import array_digest

# All chosen, not measured.
ROUNDS = 15  # timed saves of each checkpointer
LARGE_MIB = 512  # the largest tensor of a model that is exported
LEAVES = 24  # of the state
MANY_LEAVES_ROUNDS = 3  # timed saves and restores of a state with many leaves
MIB = 2**20


def make_state(mib: int, leaves: int) -> dict[str, Any]:
    """Create a state of `mib` MiB in equal leaves, sharded by rows, of values that do not compress."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = max(8, mib * MIB // 4 // leaves // 256 // 8 * 8)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    rng = np.random.default_rng(0)
    # Not made by a program: compiling one that returns thousands of leaves takes minutes.
    return jax.block_until_ready(
        {f"w{i:05d}": jax.device_put(rng.random((rows, 256), np.float32), sharding) for i in range(leaves)}
    )


def nbytes(state: Any) -> int:
    """Return the bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)


def saved(begin: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the seconds until a save returns, and until it is committed."""
    begun = time.perf_counter()
    pending = begin()
    blocked = time.perf_counter() - begun
    wait(pending)
    return blocked, time.perf_counter() - begun


def save_ours(folder: Path, state: Any) -> tuple[float, float]:
    """Save once, with a new `Checkpointer`."""
    with Checkpointer(folder) as checkpoints:
        return saved(lambda: checkpoints.save(0, state), lambda _: checkpoints.wait())


def save_orbax(folder: Path, state: Any) -> tuple[float, float]:
    """Save once, with Orbax's function and its defaults."""
    return saved(lambda: ocp.save_async(str(folder / "step"), state), lambda pending: pending.result())


@contextlib.contextmanager
def loops(root: Path, state: Any) -> Iterator[dict[str, Callable[[int], tuple[float, float]]]]:
    """Open the checkpointers of a training loop, each with one step on disk, and yield a `save(step)` for each."""
    newest: Any = ocp.training.preservation_policies.LatestN(1)  # Orbax types its parameter more narrowly
    options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=1)
    with (
        Checkpointer(root / "ours", keep=RetentionPolicy(last=1)) as ours,
        ocp.training.Checkpointer(str(root / "training"), preservation_policy=newest) as training,
        orbax.checkpoint.CheckpointManager(root / "manager", options=options) as manager,
    ):
        args = orbax.checkpoint.args.StandardSave(state)
        yield {
            "ours": lambda step: saved(lambda: ours.save(step, state), lambda _: ours.wait()),
            "Orbax's Checkpointer": lambda step: saved(
                lambda: training.save_async(step, state), lambda pending: pending.result()
            ),
            "Orbax's CheckpointManager": lambda step: saved(
                lambda: manager.save(step, args=args), lambda _: manager.wait_until_finished()
            ),
        }


def times(mib: int) -> list[common.Row]:
    """Measure blocking and total times, all in turn."""
    state = make_state(mib, LEAVES)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root, loops(Path(root), state) as savers:
        for number in range(ROUNDS + 1):
            one = {}
            one["copy"], copied = common.timed(lambda: jax.block_until_ready(copy(state)))
            del copied
            one["digests"], _ = common.timed(
                lambda: jax.block_until_ready(array_digest.digests(jax.tree.leaves(state)))
            )
            for who, save in savers.items():
                one[f"blocking: {who}"], one[f"total: {who}"] = save(number)
            if number:  # the first compiles
                for name, value in one.items():
                    taken.setdefault(name, []).append(value)
        written = {folder.name: folder_bytes(folder) / nbytes(state) for folder in Path(root).iterdir()}
    found = {name: np.array(values) for name, values in taken.items()}
    rows = [common.measured(name, 1e3 * values, "ms") for name, values in found.items()]
    rows.append(common.measured("blocking / one copy", found["blocking: ours"] / found["copy"], "x", 1.3))
    for what, target, note in (("blocking", 0.5, ""), ("total", 1.05, "digests included")):
        rows += [
            common.measured(f"{what} / {who}", found[f"{what}: ours"] / found[f"{what}: {who}"], "x", target, note)
            for who in savers
            if who != "ours"
        ]
    others = ", ".join(f"{name}: {share:.3f}" for name, share in written.items() if name != "ours")
    return [*rows, common.Row("bytes written / state", written["ours"], "x", note=others)]


def slowdown(mib: int) -> list[common.Row]:
    """Measure steps during a save, relative to other steps."""
    state = make_state(mib, LEAVES)
    x = jnp.ones((1024, 1024))
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ y), x))

    def step() -> float:
        nonlocal state

        def run() -> None:
            nonlocal state
            state = advance(state)  # donates the arrays that were just saved
            jax.block_until_ready((state, work(x)))

        return common.timed(run)[0]

    step()
    ratios, with_save = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as root, Checkpointer(Path(root)) as checkpoints:
            plain = float(np.median([step() for _ in range(5)]))
            begun = time.perf_counter()
            checkpoints.save(0, state)
            step()
            with_save.append((time.perf_counter() - begun) / plain)
            beside = []
            while not checkpoints.steps():
                beside.append(step())
            ratios.append(float(np.median(beside or [plain])) / plain)
    return [
        common.measured("a step with its save / a step", np.array(with_save), "x"),
        common.measured("steps during a save / others", np.array(ratios), "x"),
    ]


def restored(folder: Path, state: Any) -> float:
    """Return the seconds of a restore onto the same devices."""
    with Checkpointer(folder) as checkpoints:
        return common.timed(lambda: jax.block_until_ready(checkpoints.restore(like=state)))[0]


def many_leaves(mib: int, count: int) -> list[common.Row]:
    """Compare the same bytes in 100 leaves and in many. Medians leave out the first round, which compiles."""
    found: dict[int, np.ndarray] = {}
    for leaves in (100, count):
        state = make_state(mib, leaves)
        taken = []
        for number in range(MANY_LEAVES_ROUNDS + 1):
            with tempfile.TemporaryDirectory() as root:
                _, total = save_ours(Path(root) / "ours", state)
                back = restored(Path(root) / "ours", state)
                taken += [(total, back)] if number else []
        found[leaves] = np.median(taken, axis=0)
        del state
        gc.collect()
    return [
        common.Row(f"{count} leaves / 100, {mib} MiB: {what}", many / few, "x", 2.0, note=f"{many:.2f} s / {few:.2f} s")
        for what, few, many in zip(("save", "restore"), found[100], found[count], strict=True)
    ]


def resident() -> int:
    """Return the resident size of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def peak_of(action: Callable[[], Any]) -> int:
    """Return the largest resident size during an action, minus that before it, in bytes."""
    gc.collect()
    before, largest, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            largest[0] = max(largest[0], resident())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        result = action()
    finally:
        done.set()
        watching.join()
    del result
    return max(largest[0] - before, 0)


def memory(what: str, mib: int, folder: Path) -> int:
    """Return the peak extra bytes of one kind of work, in this process."""
    _warm(Path(tempfile.mkdtemp(dir=folder)))
    if what.startswith("export"):
        saved_in = folder / ("ours" if what == "export" else "large")
        with Checkpointer(saved_in) as checkpoints:
            if not checkpoints.steps():
                checkpoints.save(0, make_state(LARGE_MIB, 1) | {"small": jnp.ones((8, 256))}, block=True)
                return 0
            return peak_of(lambda: checkpoints.export(None, folder / f"out of {saved_in.name}"))
    state = make_state(mib, LEAVES)
    if what == "restore":
        with Checkpointer(folder / "ours") as checkpoints:
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
            )
            return peak_of(lambda: jax.block_until_ready(checkpoints.restore(like=like))) - nbytes(state)
    run: dict[str, Callable[[], Any]] = {
        "asynchronous save": lambda: save_ours(folder / "ours", state),
        "blocking save": lambda: _blocking(folder / "blocking", state),
        "Orbax's save": lambda: save_orbax(folder / "orbax", state),
    }
    return peak_of(run[what])


def _warm(folder: Path) -> None:
    state = make_state(1, 2)
    _blocking(folder / "ours", state)
    save_orbax(folder / "orbax", state)
    restored(folder / "ours", state)
    with Checkpointer(folder / "ours") as checkpoints:
        checkpoints.export(None, folder / "out")


def _blocking(folder: Path, state: Any) -> None:
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(0, state, block=True)


def memories(mib: int) -> list[common.Row]:
    """Measure the peak memory of each kind of work, each in a new process."""
    rows = []
    large = f"export of a tensor of {LARGE_MIB} MiB"
    with tempfile.TemporaryDirectory() as root:
        for what, over, target in (
            ("asynchronous save", mib * MIB, 1.1),
            ("Orbax's save", mib * MIB, None),
            ("blocking save", mib * MIB, None),
            ("restore", mib * MIB, None),
            ("export", mib * MIB, None),
            (large, LARGE_MIB * MIB, None),  # this first process only saves the tensor
            (large, LARGE_MIB * MIB, 1.2),
        ):
            command = [sys.executable, __file__, "--mib", str(mib), "--memory", what, "--folder", root]
            extra = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            rows.append(common.Row(f"peak memory: {what}", extra / over, "x", target, note=f"{extra / MIB:.0f} MiB"))
    return [row for row in rows if row.value]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=400, help="size of the state")
    parser.add_argument(
        "--many", type=int, default=10_000, help="number of leaves that is compared with 100, for 1 GiB and 64 MiB"
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory, options.mib, options.folder)))
        return
    rows = [*times(options.mib), *slowdown(options.mib), *memories(options.mib)]
    rows += [row for mib in (1024, 64) for row in many_leaves(mib, options.many)]
    common.report("checkpoint", rows, mib=options.mib, rounds=ROUNDS)


if __name__ == "__main__":
    main()
