"""What a save costs: how long the training loop is held up, how long it takes, memory and bytes, beside Orbax's own.

    python benchmarks/checkpoint.py [--mib 400] [--many 10000]

The state is float32 matrices, sharded over eight virtual devices, and moments of them. In one process, in turn:

    copy       one on-device copy of the state, waited for
    blocking   until `save` returns
    total      until the step is committed
    digests    of the state, alone; behind the step they are part of the total

Memory is that of a process of its own: the largest resident size during a save, a restore or an export, less that
before it. A small state goes first: imports and XLA's first programs are some 60 to 100 MiB once a process.
Steps change all of the state in place and multiply matrices for some tenths of a second, with and without a save
behind them.
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

import common  # the devices are set up first
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer, RetentionPolicy
from autoshard.ckpt.state import array_digest

ROUNDS = 15
LARGE = 512  # MiB of the largest tensor of a model that is exported
LEAVES = 24
TIMES = 3
MIB = 2**20


def make_state(mib: int, leaves: int) -> dict[str, Any]:
    """A state of so many MiB in equal leaves, sharded by rows, of values that do not compress."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = max(8, mib * MIB // 4 // leaves // 256 // 8 * 8)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    rng = np.random.default_rng(0)
    # Put and not made in a program: compiling one that returns thousands of leaves takes minutes.
    return jax.block_until_ready(
        {f"w{i:05d}": jax.device_put(rng.random((rows, 256), np.float32), sharding) for i in range(leaves)}
    )


def nbytes(state: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)


def saved(begin: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Seconds until a save returns, and until it is committed."""
    begun = time.perf_counter()
    pending = begin()
    blocked = time.perf_counter() - begun
    wait(pending)
    return blocked, time.perf_counter() - begun


def save_ours(folder: Path, state: Any) -> tuple[float, float]:
    """One save by a `Checkpointer` of its own."""
    with Checkpointer(folder) as checkpoints:
        return saved(lambda: checkpoints.save(0, state), lambda _: checkpoints.wait())


def save_orbax(folder: Path, state: Any) -> tuple[float, float]:
    """One save by Orbax's function, by its defaults."""
    return saved(lambda: ocp.save_async(folder / "step", state), lambda pending: pending.result())


@contextlib.contextmanager
def loops(root: Path, state: Any) -> Iterator[dict[str, Callable[[int], tuple[float, float]]]]:
    """What a training loop would call at each step that is saved, kept open over the steps, one step on disk each."""
    newest = ocp.training.preservation_policies.LatestN(1)
    options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=1)
    with (
        Checkpointer(root / "ours", keep=RetentionPolicy(last=1)) as ours,
        ocp.training.Checkpointer(root / "training", preservation_policy=newest) as training,
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
    """Blocking and total times, all in turn."""
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
    """Steps with a save behind them over steps without."""
    state = make_state(mib, LEAVES)
    x = jnp.ones((1024, 1024))
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ y), x))

    def step() -> float:
        nonlocal state

        def run() -> None:
            nonlocal state
            state = advance(state)  # donates what was just saved
            jax.block_until_ready((state, work(x)))

        return common.timed(run)[0]

    step()
    ratios, held = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as root, Checkpointer(Path(root)) as checkpoints:
            plain = float(np.median([step() for _ in range(5)]))
            begun = time.perf_counter()
            checkpoints.save(0, state)
            step()
            held.append((time.perf_counter() - begun) / plain)
            beside = []
            while not checkpoints.steps():
                beside.append(step())
            ratios.append(float(np.median(beside or [plain])) / plain)
    return [
        common.measured("a step with its save / a step", np.array(held), "x"),
        common.measured("steps during a save / others", np.array(ratios), "x"),
    ]


def restored(folder: Path, state: Any) -> float:
    """Seconds of a restore onto the same devices."""
    with Checkpointer(folder) as checkpoints:
        return common.timed(lambda: jax.block_until_ready(checkpoints.restore(like=state)))[0]


def many_leaves(mib: int, count: int) -> list[common.Row]:
    """The same bytes in 100 leaves and in many: medians of some times, without the first, which compiles."""
    found: dict[int, np.ndarray] = {}
    for leaves in (100, count):
        state = make_state(mib, leaves)
        taken = []
        for number in range(TIMES + 1):
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
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def peak_of(action: Callable[[], Any]) -> int:
    """The largest resident size during an action, less that before it."""
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
    """Peak extra bytes of one kind of work, in this process."""
    _warm(Path(tempfile.mkdtemp(dir=folder)))
    if what.startswith("export"):
        saved_in = folder / ("ours" if what == "export" else "large")
        with Checkpointer(saved_in) as checkpoints:
            if not checkpoints.steps():
                checkpoints.save(0, make_state(LARGE, 1) | {"small": jnp.ones((8, 256))}, block=True)
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
    """Peaks, each of a process of its own."""
    rows = []
    large = f"export of a tensor of {LARGE} MiB"
    with tempfile.TemporaryDirectory() as root:
        for what, over, target in (
            ("asynchronous save", mib * MIB, 1.1),
            ("Orbax's save", mib * MIB, None),
            ("blocking save", mib * MIB, None),
            ("restore", mib * MIB, None),
            ("export", mib * MIB, None),
            (large, LARGE * MIB, None),  # which makes it, in a process of its own
            (large, LARGE * MIB, 1.2),
        ):
            command = [sys.executable, __file__, "--mib", str(mib), "--memory", what, "--folder", root]
            extra = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            rows.append(common.Row(f"peak memory: {what}", extra / over, "x", target, note=f"{extra / MIB:.0f} MiB"))
    return [row for row in rows if row.value]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=400, help="of the state")
    parser.add_argument("--many", type=int, default=10_000, help="leaves of a state, beside 100: 1 GiB and 64 MiB")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print(json.dumps(memory(given.memory, given.mib, given.folder)))
        return
    rows = [*times(given.mib), *slowdown(given.mib), *memories(given.mib)]
    rows += [row for mib in (1024, 64) for row in many_leaves(mib, given.many)]
    common.report("checkpoint", rows, mib=given.mib, rounds=ROUNDS)


if __name__ == "__main__":
    main()
