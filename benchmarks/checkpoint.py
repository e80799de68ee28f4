"""What a save costs: how long the training loop is held up, how long it takes, memory and bytes, beside Orbax's own.

    python benchmarks/checkpoint.py [--mib 400] [--many 10000]

The state is float32 matrices, sharded over eight virtual devices, and moments of them. In one process, in turn:

    copy       one on-device copy of the state, waited for
    blocking   until `save` returns, and until the devices are done with what it dispatched before the next step
    total      until the step is committed
    digests    of the state, alone; behind the step they are part of the total

Memory is that of a process of its own: the largest resident size during a save, a restore or an export, less that
before it. A small state goes first: imports and XLA's first programs are some 60 to 100 MiB once a process.
Steps are matrix products of some tenths of a second, with and without a save behind them.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # the devices are set up first
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer, digest

ROUNDS = 7
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


def save_ours(folder: Path, state: Any) -> tuple[float, float]:
    """Seconds until `save` returns, and until it is committed."""
    with Checkpointer(folder) as checkpoints:
        begun = time.perf_counter()
        checkpoints.save(0, state)
        blocked = time.perf_counter() - begun
        checkpoints.wait()
        return blocked, time.perf_counter() - begun


def save_orbax(folder: Path, state: Any) -> tuple[float, float]:
    """The same of Orbax's own, by its defaults."""
    begun = time.perf_counter()
    pending = ocp.save_pytree_async(folder / "step", state)
    blocked = time.perf_counter() - begun
    pending.result()
    return blocked, time.perf_counter() - begun


def times(mib: int) -> list[common.Row]:
    """Blocking and total times, all in turn."""
    state = make_state(mib, LEAVES)
    found: dict[str, list[float]] = {
        name: [] for name in ("copy", "digests", "blocking", "orbax blocking", "total", "orbax total")
    }
    sizes = {}
    for number in range(ROUNDS + 1):
        with tempfile.TemporaryDirectory() as root:
            one = {}
            one["copy"], copied = common.timed(lambda: jax.block_until_ready(copy(state)))
            del copied
            one["digests"], _ = common.timed(lambda: jax.block_until_ready(digest.digests(jax.tree.leaves(state))))
            one["blocking"], one["total"] = save_ours(Path(root) / "ours", state)
            one["orbax blocking"], one["orbax total"] = save_orbax(Path(root) / "orbax", state)
            sizes = {name: folder_bytes(Path(root) / name) for name in ("ours", "orbax")}
        if number:  # the first compiles
            for name, value in one.items():
                found[name].append(value)
    ratio = {name: np.array(found[name]) for name in found}
    whole = nbytes(state)
    return [
        *(common.measured(f"{name}", 1e3 * ratio[name], "ms") for name in found),
        common.measured("blocking / one copy", ratio["blocking"] / ratio["copy"], "x", 1.3),
        common.measured("blocking / Orbax's", ratio["blocking"] / ratio["orbax blocking"], "x", 0.5),
        common.measured("total / Orbax's", ratio["total"] / ratio["orbax total"], "x", 1.05, "digests included"),
        common.Row("bytes written / state", sizes["ours"] / whole, "x", note=f"Orbax: {sizes['orbax'] / whole:.3f}"),
    ]


def slowdown(mib: int) -> list[common.Row]:
    """Steps with a save behind them over steps without."""
    state = make_state(mib, LEAVES)
    x = jnp.ones((1024, 1024))
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ y), x))
    jax.block_until_ready((work(x), copy(state)))
    ratios, held = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as root, Checkpointer(Path(root)) as checkpoints:
            plain = [common.timed(lambda: jax.block_until_ready(work(x)))[0] for _ in range(5)]
            begun = time.perf_counter()
            checkpoints.save(0, state)
            state = advance(state)  # donates what was just saved
            jax.block_until_ready(work(x))
            held.append(time.perf_counter() - begun - float(np.median(plain)))
            beside = []
            while not checkpoints.steps():
                beside.append(common.timed(lambda: jax.block_until_ready(work(x)))[0])
            ratios.append(float(np.median(beside or plain)) / float(np.median(plain)))
    return [
        common.measured("a step with its save, less a step", 1e3 * np.array(held), "ms", note="copy and dispatch"),
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
    _warm(folder / f"warm {what}")
    if what == "export":
        with Checkpointer(folder / "ours") as checkpoints:
            shutil.rmtree(folder / "out", ignore_errors=True)
            return peak_of(lambda: checkpoints.export(None, folder / "out"))
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
    largest = mib * MIB / LEAVES
    with tempfile.TemporaryDirectory() as root:
        for what, over, target in (
            ("asynchronous save", mib * MIB, 1.1),
            ("Orbax's save", mib * MIB, None),
            ("blocking save", mib * MIB, None),
            ("restore", mib * MIB, None),
            ("export", largest, 1.2),
        ):
            command = [sys.executable, __file__, "--mib", str(mib), "--memory", what, "--folder", root]
            extra = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            unit = "x" if over != largest else "x largest"
            rows.append(common.Row(f"peak memory: {what}", extra / over, unit, target, note=f"{extra / MIB:.0f} MiB"))
    return rows


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
