"""Faults at random: nothing that was committed is lost, no wrong value comes back, every failure says what happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError

# Orbax drops the futures of a failed load's other leaves.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = (1, 2, 3)


def state_of(mesh: Mesh, step: int) -> dict[str, Any]:
    """A state that says its step in every value."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(step)
    leaves = {f"w{i}": rng.normal(size=(64, 32 * (i + 1))).astype(np.float32) for i in range(4)}
    return {"params": jax.device_put(leaves, sharding), "key": jax.random.key(step), "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh8: Mesh) -> Path:
    """A directory of sound steps, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    with Checkpointer(folder, keep=None) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state_of(mesh8, step), config={"model": {"width": 1}}, metrics={"loss": 1 / step})
    return folder


def same(found: Any, want: Any) -> bool:
    def bits(leaf: Any) -> bytes:
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return np.asarray(leaf).tobytes()

    return all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True))


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


def damaged(folder: Path, rng: random.Random, mesh: Mesh) -> str:
    """One file of any kind is damaged: other steps come back, this one does or is said to be damaged."""
    file = rng.choice([file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size])
    how: Callable[[Path, random.Random], None] = rng.choice([flip, truncate, empty, delete])
    how(file, rng)
    told = f"{how.__name__} {file.relative_to(folder)}"
    hit = file.relative_to(folder).parts[0]
    try:
        checkpoints = Checkpointer(folder, keep=None)
    except CheckpointError as error:
        assert hit == "autoshard.json", f"{told}: {error}"
        return told
    for step in STEPS:
        want = state_of(mesh, step)
        try:
            assert same(checkpoints.restore(step, want), want), f"{told}: wrong values of step {step}"
        except DamagedCheckpointError as error:
            assert hit == f"step_{step:08d}" and f"step {step} in" in str(error), f"{told}: {error}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        newest = checkpoints.restore(like=state_of(mesh, 0))
    assert checkpoints.restored is not None and checkpoints.restored.step >= 2, told
    assert same(newest, state_of(mesh, checkpoints.restored.step)), told
    checkpoints.save(4, state_of(mesh, 4), block=True)
    assert same(checkpoints.restore(4, state_of(mesh, 4)), state_of(mesh, 4)), told
    checkpoints.close()
    return told


SAVING = """
import sys, resource, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from autoshard.ckpt import Checkpointer, CheckpointError
folder, limit = sys.argv[1], int(sys.argv[2])
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
state = jax.device_put({f"w{i}": np.full((64, 512), 4, np.float32) for i in range(4)}, sharding)
with Checkpointer(folder, keep=None) as checkpoints:
    for step in range(4, 10_000):
        if step == 6 and limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            checkpoints.save(step, state, block=bool(limit))
        except CheckpointError as error:
            print("error", str(error).replace(chr(10), " "), flush=True)
            break
        state = advance(state)
        print("saved", max(checkpoints.steps()), flush=True)
"""


def start_saving(folder: Path, root: Path, limit: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SAVING, str(folder), str(limit)],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def all_there(folder: Path, mesh: Mesh, newest: int, told: str) -> None:
    """Every committed step is what it was; another process may write on."""
    template = {f"w{i}": jax.ShapeDtypeStruct((64, 512), jnp.float32) for i in range(4)}
    with Checkpointer(folder, keep=None) as checkpoints:
        steps = checkpoints.steps()
        assert set(STEPS) <= set(steps) and max(steps) >= newest, told
        for step in STEPS:
            assert same(checkpoints.restore(step, state_of(mesh, step)), state_of(mesh, step)), told
        for step in [one for one in steps if one > 3]:
            assert all(np.all(np.asarray(leaf) == step) for leaf in checkpoints.restore(step, template).values()), told
        checkpoints.save(20_000, state_of(mesh, 1), block=True)


def killed(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """A process is killed while it saves one step after the other."""
    process = start_saving(folder, root)
    assert process.stdout is not None
    wanted, newest = rng.randrange(4, 8), 0
    while newest < wanted:
        line = process.stdout.readline()
        assert line.startswith("saved"), line
        newest = int(line.split()[1])
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    rest = [int(line.split()[1]) for line in process.communicate()[0].splitlines()]
    all_there(folder, mesh, max([newest, *rest]), told := f"killed after step {wanted}")
    return told


def full(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """Files cannot grow beyond a limit, as on a full disk: the save fails and says so, the others stay."""
    limit = rng.choice([1, 1000, 20_000, 60_000])
    out, _ = start_saving(folder, root, limit).communicate(timeout=120)
    told = f"files of at most {limit} bytes: {out.splitlines()[-1]}"
    assert "error step 6 could not be written" in out and "Committed steps are untouched" in out, told
    all_there(folder, mesh, 5, told)
    return told


def run_trials(saved: Path, tmp_path: Path, mesh: Mesh, root: Path, seed: int, *, files: int, processes: int) -> None:
    seed = int(os.environ.get("AUTOSHARD_FAULT_SEED", seed))
    print(f"AUTOSHARD_FAULT_SEED={seed}")
    rng = random.Random(seed)
    kinds: list[Callable[[Path], str]] = [lambda folder: damaged(folder, rng, mesh)] * files
    kinds += [lambda folder: killed(folder, rng, mesh, root)] * processes
    kinds += [lambda folder: full(folder, rng, mesh, root)] * processes
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        print(f"{number}: {kind(folder)}")
        shutil.rmtree(folder)


@pytest.mark.whole
def test_twenty_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    run_trials(saved, tmp_path, mesh8, root, 2026, files=18, processes=1)


@pytest.mark.slow
def test_two_hundred_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    run_trials(saved, tmp_path, mesh8, root, random.SystemRandom().randrange(10**6), files=160, processes=20)
