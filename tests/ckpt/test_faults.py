"""Faults at random: nothing that was committed is lost, no wrong value comes back, every failure says what happened."""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError, RetentionPolicy

# Orbax drops the futures of a failed load's other leaves.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = (1, 2, 3)
KILLED_DEADLINE_S = 10  # until a process that lost another gives up, in these trials


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


Damage = Callable[[Path, random.Random], None]
DAMAGES: tuple[Damage, ...] = (flip, truncate, empty, delete)


def kind_of(file: Path) -> str:
    """A file's path without what tells it from others of its kind: the step's number and names that are digests."""
    return re.sub(r"[0-9a-f]{32}", "*", re.sub(r"step_\d+", "step", str(file)))


def kinds_of(folder: Path) -> dict[str, list[Path]]:
    """All files below a folder that are not empty, by kind; relative."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size]
    relative = sorted((file.relative_to(folder) for file in files), key=kind_of)
    return {kind: list(group) for kind, group in itertools.groupby(relative, kind_of)}


def damaged(folder: Path, rng: random.Random, mesh: Mesh, file: Path, how: Damage) -> str:
    """One file is damaged: other steps come back, this one does or is said to be damaged."""
    how(folder / file, rng)
    told = f"{how.__name__} {file}"
    hit = file.parts[0]
    try:
        checkpoints = Checkpointer(folder, keep=None)
    except CheckpointError as error:
        assert hit == "autoshard.json", f"{told}: {error}"
        return f"{told}: refused"
    found = False
    for step in STEPS:
        want = state_of(mesh, step)
        try:
            assert same(checkpoints.restore(step, want), want), f"{told}: wrong values of step {step}"
        except DamagedCheckpointError as error:
            assert hit == f"step_{step:08d}" and f"step {step} in" in str(error), f"{told}: {error}"
            found = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        newest = checkpoints.restore(like=state_of(mesh, 0))
        assert checkpoints.restored is not None and checkpoints.restored.step >= 2, told
        assert same(newest, state_of(mesh, checkpoints.restored.step)), told
        checkpoints.save(4, state_of(mesh, 4), block=True)
    assert same(checkpoints.restore(4, state_of(mesh, 4)), state_of(mesh, 4)), told
    checkpoints.close()
    return f"{told}: {'found' if found else 'nothing depends on it'}"


advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)


def counted(mesh: Mesh, step: int) -> dict[str, Any]:
    """A state of half a megabyte whose every value is its step."""
    values = {f"w{i}": np.full((64, 512), step, np.float32) for i in range(4)}
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))


def intact(checkpoints: Checkpointer, mesh: Mesh, told: str) -> list[int]:
    """The steps of a directory, each of which must be what was saved."""
    template = {f"w{i}": jax.ShapeDtypeStruct((64, 512), jnp.float32) for i in range(4)}
    steps = checkpoints.steps()
    assert set(STEPS) <= set(steps), told
    for step in steps:
        if step <= max(STEPS):
            assert same(checkpoints.restore(step, state_of(mesh, step)), state_of(mesh, step)), told
        else:
            assert all(np.all(np.asarray(leaf) == step) for leaf in checkpoints.restore(step, template).values()), told
    return steps


def overtaken(folder: Path, rng: random.Random, mesh: Mesh) -> str:
    """Saves one behind the other, each of a state that is donated at once, while somebody else reads."""
    count, state, told = rng.randrange(3, 7), counted(mesh, 4), "saves that overtake each other"
    with Checkpointer(folder, keep=None) as checkpoints:
        for step in range(4, 4 + count):
            checkpoints.save(step, state)
            state = advance(state)
            if rng.random() < 0.5:
                intact(Checkpointer(folder, keep=None), mesh, told)
            if rng.random() < 0.3:
                with pytest.raises(CheckpointError, match=f"has step {step} already"):
                    checkpoints.save(step, state)
        checkpoints.wait()
        assert intact(checkpoints, mesh, told) == [*STEPS, *range(4, 4 + count)]
    return f"{count} {told}"


def own_disk(folder: Path, options: str) -> bool:
    """Puts a file system in memory below a folder; False where that is not allowed."""
    folder.mkdir(exist_ok=True)
    if sys.platform != "linux" or shutil.which("mount") is None:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def disk(saved: Path, options: str) -> Iterator[Path | None]:
    """A copy of the sound steps on a disk of its own; None where none can be had."""
    folder = saved.parent / f"disk-{os.getpid()}"
    mounted = own_disk(folder, options)
    try:
        if mounted:
            shutil.copytree(saved, folder / "run")
        yield folder / "run" if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder.parent)], check=True, capture_output=True)


def full(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """A disk runs full while one step after the other is saved; with room again the same process goes on."""
    what, room = rng.choice([("size", 1 << 16), ("nr_inodes", 8)]), rng.uniform(0, 30)
    with disk(folder, "size=64m,nr_inodes=10000") as own:
        if own is None:
            return f"no file system may be mounted here, so {limited(folder, rng, mesh, root)}"
        used = os.statvfs(own)
        blocks = (used.f_blocks - used.f_bfree) * used.f_frsize, used.f_files - used.f_ffree
        remount(own, f"{what[0]}={int(blocks[what[0] != 'size'] + room * what[1])}")
        state = counted(mesh, 4)
        with Checkpointer(own, keep=None) as checkpoints:
            failed = None
            for step in range(4, 40):
                try:
                    checkpoints.save(step, state, block=bool(step % 2))
                except CheckpointError as error:
                    failed = str(error)
                    break
                state = advance(state)
            told = f"a disk that is full ({what[0]}): {failed}"
            assert failed is not None and re.search("(could not|cannot) be written", failed), told
            assert "No space left" in failed, told
            last = max(intact(checkpoints, mesh, told))
            remount(own, "size=64m,nr_inodes=10000")
            checkpoints.save(last + 1, counted(mesh, last + 1), block=True)
            assert max(intact(checkpoints, mesh, told)) == last + 1
    return " ".join(told.split())


def read_only(folder: Path, rng: random.Random, mesh: Mesh) -> str:
    """What cannot be written can be read, and says so of every change that is asked for."""
    if os.geteuid():
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            return f"permissions: {unwritable(folder, mesh)}"
        finally:
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
    with disk(folder, "size=64m") as own:
        if own is None:
            return "not tried: permissions are nothing to root, and no file system may be mounted here"
        remount(own, "ro")
        return f"a disk that is mounted read-only: {unwritable(own, mesh)}"


def unwritable(folder: Path, mesh: Mesh) -> str:
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with Checkpointer(folder, keep=None) as checkpoints:
        said = []
        for change in (
            lambda: checkpoints.save(4, counted(mesh, 4), block=True),
            lambda: checkpoints.prune(RetentionPolicy(1)),
        ):
            with pytest.raises(CheckpointError) as caught:
                change()
            said.append(str(caught.value))
        assert intact(checkpoints, mesh, str(said)) == list(STEPS)
        assert all(checkpoints.verify(step) == [] for step in STEPS)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert all(re.search("(?i)read-only|permission", text) for text in said), said
    return " / ".join(said)


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
        stderr=subprocess.PIPE if limit else subprocess.DEVNULL,
        text=True,
    )


def all_there(folder: Path, mesh: Mesh, newest: int, told: str) -> None:
    """Every committed step is what it was; another process may write on."""
    with Checkpointer(folder, keep=None) as checkpoints:
        assert max(intact(checkpoints, mesh, told)) >= newest, told
        checkpoints.save(20_000, state_of(mesh, 1), block=True)


def told_steps(out: str) -> list[int]:
    """Steps that a process says are committed, between what Gloo says."""
    return [int(step) for step in re.findall(r"^saved (\d+)$", out, re.MULTILINE)]


def killed(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """A process is killed while it saves one step after the other."""
    process = start_saving(folder, root)
    assert process.stdout is not None
    wanted, newest = rng.randrange(4, 8), 0
    while newest < wanted:
        line = process.stdout.readline()
        assert line, f"the process left by itself with {process.wait()}"
        newest = max([newest, *told_steps(line)])
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    all_there(folder, mesh, max([newest, *told_steps(rest)]), told := f"killed after step {wanted}")
    return told


def limited(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """Files cannot grow beyond a limit, as on a full disk: the save fails and says so, the others stay."""
    limit = rng.choice([1, 1000, 20_000, 60_000])
    out, errors = start_saving(folder, root, limit).communicate(timeout=120)
    told = f"files of at most {limit} bytes: {out.splitlines()[-1]}"
    assert "error step 6 could not be written" in out and "Committed steps are untouched" in out, told
    assert "_SignalingThread" not in errors, errors  # Orbax's pages: the error says it
    all_there(folder, mesh, 5, told)
    return told


SAVING_TOGETHER = """
import sys, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
folder, port, me, deadline = sys.argv[1], *map(int, sys.argv[2:])
jax.distributed.initialize(f"localhost:{port}", 2, me, heartbeat_timeout_seconds=deadline)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from autoshard import _processes
from autoshard.ckpt import Checkpointer
_processes.DEADLINE_S = float(deadline)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
make = jax.jit(lambda: {f"w{i}": jnp.full((64, 512), 4, jnp.float32) for i in range(4)}, out_shardings=sharding)
advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
state = make()
with Checkpointer(folder, keep=None) as checkpoints:
    for step in range(4, 10_000):
        checkpoints.save(step, state)
        state = advance(state)
        print("saved", max(checkpoints.steps()), flush=True)
"""


def one_of_two_killed(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """One of two processes that save together is killed: the other ends by itself, too, and says why."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with contextlib.ExitStack() as stack:
        processes = []
        for me in range(2):
            errors = stack.enter_context((folder.parent / f"{folder.name}.{me}.err").open("w+"))
            command = [sys.executable, "-c", SAVING_TOGETHER, str(folder), *map(str, (port, me, KILLED_DEADLINE_S))]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.kill)
            processes.append((process, errors))
        victim = rng.randrange(2)
        (process, _), (other, errors) = processes[victim], processes[1 - victim]
        assert process.stdout is not None
        wanted, newest = rng.randrange(5, 8), 0
        while newest < wanted:
            line = process.stdout.readline()
            assert line, f"process {victim} left by itself with {process.wait()}"
            newest = max([newest, *told_steps(line)])
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0] + other.communicate(timeout=15 * KILLED_DEADLINE_S)[0]
        errors.seek(0)
        said = errors.read()
    told = f"process {victim} of 2 killed after step {wanted}: the other left with {other.returncode}"
    assert other.returncode != 0, told
    why = [line for line in said.splitlines() if re.search("did not come|heartbeat|coordination|peer|task", line)]
    assert why, f"{told}: {said[-3000:]}"
    all_there(folder, mesh, max([newest, *told_steps(rest)]), told)
    return f"{told}: {why[0][:160]}"


Trial = tuple[str, Callable[[Path], str]]


def trials(saved: Path, rng: random.Random, mesh: Mesh, root: Path, counts: dict[str, int]) -> list[Trial]:
    """So many of each kind. Damage goes through all kinds of files and ways in turn, in a random order."""
    kinds = kinds_of(saved)
    ways = list(itertools.product(kinds, DAMAGES))
    rng.shuffle(ways)

    def damage(kind: str, how: Damage) -> Callable[[Path], str]:
        return lambda folder: damaged(folder, rng, mesh, rng.choice(kinds[kind]), how)

    others: dict[str, Callable[[Path], str]] = {
        "killed": lambda folder: killed(folder, rng, mesh, root),
        "one of two killed": lambda folder: one_of_two_killed(folder, rng, mesh, root),
        "full": lambda folder: full(folder, rng, mesh, root),
        "limited": lambda folder: limited(folder, rng, mesh, root),
        "read-only": lambda folder: read_only(folder, rng, mesh),
        "overtaken": lambda folder: overtaken(folder, rng, mesh),
    }
    made = [("damaged", damage(*way)) for way in itertools.islice(itertools.cycle(ways), counts["damaged"])]
    return made + [(name, others[name]) for name in others for _ in range(counts[name])]


def run_trials(saved: Path, tmp_path: Path, mesh: Mesh, root: Path, seed: int, counts: dict[str, int]) -> None:
    seed = int(os.environ.get("AUTOSHARD_FAULT_SEED", seed))
    print(f"AUTOSHARD_FAULT_SEED={seed}")
    done: Counter[str] = Counter()
    for number, (name, trial) in enumerate(trials(saved, random.Random(seed), mesh, root, counts)):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        told = trial(folder)
        done[f"{name}: {told.rpartition(': ')[2]}" if name == "damaged" else name] += 1
        print(f"{number} {name}: {told}", flush=True)
        shutil.rmtree(folder)
    print(*(f"{count:4} {what}" for what, count in sorted(done.items())), sep="\n")


@pytest.mark.whole
def test_twenty_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    counts = {"damaged": 13, "killed": 1, "one of two killed": 1, "full": 2, "limited": 1}
    counts |= {"read-only": 1, "overtaken": 1}
    run_trials(saved, tmp_path, mesh8, root, 2026, counts)


@pytest.mark.slow
def test_two_hundred_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    counts = {"damaged": 130, "killed": 15, "one of two killed": 10, "full": 20, "limited": 5}
    counts |= {"read-only": 2, "overtaken": 18}
    run_trials(saved, tmp_path, mesh8, root, random.SystemRandom().randrange(10**6), counts)
