"""Random faults: no committed step is lost, no wrong value is restored, and every failure has a clear error."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError, RetentionPolicy
from tests.ckpt.file_damage import DAMAGES, Damage, kinds_of
from tests.ckpt.tmpfs import disk, remount
from tests.compiler_flags import xla_flags

# Orbax drops the futures of a failed load's other leaves.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = (1, 2, 3)
KILLED_DEADLINE_S = 10  # deadline after which a process exits if its peer has ended


def state_of(mesh: Mesh, step: int) -> dict[str, Any]:
    """Return a state whose values depend on its step."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(step)
    leaves = {f"w{i}": rng.normal(size=(64, 32 * (i + 1))).astype(np.float32) for i in range(4)}
    return {"params": jax.device_put(leaves, sharding), "key": jax.random.key(step), "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh8: Mesh) -> Path:
    """Return a directory of intact steps, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    with Checkpointer(folder, keep=None) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state_of(mesh8, step), config={"model": {"width": 1}}, metrics={"loss": 1 / step})
    return folder


def have_equal_bits(actual: Any, want: Any) -> bool:
    def bits(leaf: Any) -> bytes:
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return np.asarray(leaf).tobytes()

    return all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True))


def damaged(folder: Path, rng: random.Random, mesh: Mesh, file: Path, how: Damage) -> str:
    """Damage one file. Other steps can be restored; this step can be restored or is reported as damaged."""
    how(folder / file, rng)
    report = f"{how.__name__} {file}"
    hit = file.parts[0]
    try:
        checkpoints = Checkpointer(folder, keep=None)
    except CheckpointError as error:
        assert hit == "autoshard.json", f"{report}: {error}"
        return f"{report}: refused"
    detected = False
    for step in STEPS:
        want = state_of(mesh, step)
        try:
            assert have_equal_bits(checkpoints.restore(step, want), want), f"{report}: wrong values of step {step}"
        except DamagedCheckpointError as error:
            assert hit == f"step_{step:08d}" and f"step {step} in" in str(error), f"{report}: {error}"
            detected = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        newest = checkpoints.restore(like=state_of(mesh, 0))
        assert checkpoints.restored is not None and checkpoints.restored.step >= 2, report
        assert have_equal_bits(newest, state_of(mesh, checkpoints.restored.step)), report
        checkpoints.save(4, state_of(mesh, 4), block=True)
    assert have_equal_bits(checkpoints.restore(4, state_of(mesh, 4)), state_of(mesh, 4)), report
    checkpoints.close()
    return f"{report}: {'detected' if detected else 'not needed'}"


advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)


def state_filled_with(mesh: Mesh, step: int) -> dict[str, Any]:
    """Return a state of half a megabyte in which every value is the step."""
    values = {f"w{i}": np.full((64, 512), step, np.float32) for i in range(4)}
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))


def intact(checkpoints: Checkpointer, mesh: Mesh, report: str) -> list[int]:
    """Check that every step of a directory has the saved values; return the steps."""
    template = {f"w{i}": jax.ShapeDtypeStruct((64, 512), jnp.float32) for i in range(4)}
    steps = checkpoints.steps()
    assert set(STEPS) <= set(steps), report
    for step in steps:
        if step <= max(STEPS):
            assert have_equal_bits(checkpoints.restore(step, state_of(mesh, step)), state_of(mesh, step)), report
        else:
            assert all(np.all(np.asarray(leaf) == step) for leaf in checkpoints.restore(step, template).values()), (
                report
            )
    return steps


def saved_in_succession(folder: Path, rng: random.Random, mesh: Mesh) -> str:
    """Save in quick succession states that are donated at once, while another Checkpointer reads."""
    count, state, report = rng.randrange(3, 7), state_filled_with(mesh, 4), "saves in quick succession"
    with Checkpointer(folder, keep=None) as checkpoints:
        for step in range(4, 4 + count):
            checkpoints.save(step, state)
            state = advance(state)
            if rng.random() < 0.5:
                intact(Checkpointer(folder, keep=None), mesh, report)
            if rng.random() < 0.3:
                with pytest.raises(CheckpointError, match=f"has step {step} already"):
                    checkpoints.save(step, state)
        checkpoints.wait()
        assert intact(checkpoints, mesh, report) == [*STEPS, *range(4, 4 + count)]
    return f"{count} {report}"


def full_disk(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """Fill a disk by saving steps. After space is freed, the same process can save again."""
    limit, room = rng.choice([("size", 1 << 16), ("nr_inodes", 8)]), rng.uniform(0, 30)
    with disk(folder, "size=64m,nr_inodes=10000") as own_mount:
        if own_mount is None:
            return f"no tmpfs can be mounted here; {limited(folder, rng, mesh, root)}"
        used = os.statvfs(own_mount)
        blocks = (used.f_blocks - used.f_bfree) * used.f_frsize, used.f_files - used.f_ffree
        remount(own_mount, f"{limit[0]}={int(blocks[limit[0] != 'size'] + room * limit[1])}")
        state = state_filled_with(mesh, 4)
        with Checkpointer(own_mount, keep=None) as checkpoints:
            failed = None
            for step in range(4, 40):
                try:
                    checkpoints.save(step, state, block=bool(step % 2))
                except CheckpointError as error:
                    failed = str(error)
                    break
                state = advance(state)
            report = f"full disk ({limit[0]}): {failed}"
            assert failed is not None and re.search("(could not|cannot) be written", failed), report
            assert "No space left" in failed, report
            last = max(intact(checkpoints, mesh, report))
            remount(own_mount, "size=64m,nr_inodes=10000")
            checkpoints.save(last + 1, state_filled_with(mesh, last + 1), block=True)
            assert max(intact(checkpoints, mesh, report)) == last + 1
    return " ".join(report.split())


def read_only(folder: Path, rng: random.Random, mesh: Mesh) -> str:
    """A read-only directory can be read, and every change raises an error with the reason."""
    if os.geteuid():
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            return f"permissions: {failed_writes(folder, mesh)}"
        finally:
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
    with disk(folder, "size=64m") as own_mount:
        if own_mount is None:
            return "skipped: permissions do not apply to root, and no tmpfs can be mounted here"
        remount(own_mount, "ro")
        return f"read-only disk: {failed_writes(own_mount, mesh)}"


def failed_writes(folder: Path, mesh: Mesh) -> str:
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with Checkpointer(folder, keep=None) as checkpoints:
        messages = []
        for change in (
            lambda: checkpoints.save(4, state_filled_with(mesh, 4), block=True),
            lambda: checkpoints.prune(RetentionPolicy(1)),
        ):
            with pytest.raises(CheckpointError) as caught:
                change()
            messages.append(str(caught.value))
        assert intact(checkpoints, mesh, str(messages)) == list(STEPS)
        assert all(checkpoints.verify(step) == [] for step in STEPS)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert all(re.search("(?i)read-only|permission", text) for text in messages), messages
    return " / ".join(messages)


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


def check_all_steps(folder: Path, mesh: Mesh, newest: int, report: str) -> None:
    """Check that every committed step is unchanged and that another process can save."""
    with Checkpointer(folder, keep=None) as checkpoints:
        assert max(intact(checkpoints, mesh, report)) >= newest, report
        checkpoints.save(20_000, state_of(mesh, 1), block=True)


def printed_steps(out: str) -> list[int]:
    """Return the committed steps that a process printed, among Gloo's output."""
    return [int(step) for step in re.findall(r"^saved (\d+)$", out, re.MULTILINE)]


def killed(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """Kill a process that saves steps in a loop."""
    process = start_saving(folder, root)
    assert process.stdout is not None
    wanted, newest = rng.randrange(4, 8), 0
    while newest < wanted:
        line = process.stdout.readline()
        assert line, f"the process ended by itself with {process.wait()}"
        newest = max([newest, *printed_steps(line)])
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    check_all_steps(folder, mesh, max([newest, *printed_steps(rest)]), report := f"killed after step {wanted}")
    return report


def limited(folder: Path, rng: random.Random, mesh: Mesh, root: Path) -> str:
    """Limit the size of files: the save fails with an error, and other steps are unchanged."""
    limit = rng.choice([1, 1000, 20_000, 60_000])
    out, errors = start_saving(folder, root, limit).communicate(timeout=120)
    report = f"files of at most {limit} bytes: {out.splitlines()[-1]}"
    assert "error step 6 could not be written" in out and "Committed steps are untouched" in out, report
    assert "_SignalingThread" not in errors, errors  # Orbax prints no traceback, because the error suffices
    check_all_steps(folder, mesh, 5, report)
    return report


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
    """Kill one of two processes that save together: the other one ends by itself and reports the reason."""
    with socket.socket() as port_socket:
        port_socket.bind(("localhost", 0))
        port = port_socket.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": xla_flags(devices=2)}
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
            assert line, f"process {victim} ended by itself with {process.wait()}"
            newest = max([newest, *printed_steps(line)])
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0] + other.communicate(timeout=15 * KILLED_DEADLINE_S)[0]
        errors.seek(0)
        messages = errors.read()
    report = f"process {victim} of 2 killed after step {wanted}: the other ended with {other.returncode}"
    assert other.returncode != 0, report
    reasons = [
        line for line in messages.splitlines() if re.search("did not come|heartbeat|coordination|peer|task", line)
    ]
    assert reasons, f"{report}: {messages[-3000:]}"
    check_all_steps(folder, mesh, max([newest, *printed_steps(rest)]), report)
    return f"{report}: {reasons[0][:160]}"


Trial = tuple[str, Callable[[Path], str]]


def trials(saved: Path, rng: random.Random, mesh: Mesh, root: Path, counts: dict[str, int]) -> list[Trial]:
    """Return trials by kind. Damage trials cycle through all pairs of file kind and damage in a random order."""
    kinds = kinds_of(saved)
    damages = list(itertools.product(kinds, DAMAGES))
    rng.shuffle(damages)

    def damage(kind: str, how: Damage) -> Callable[[Path], str]:
        return lambda folder: damaged(folder, rng, mesh, rng.choice(kinds[kind]), how)

    others: dict[str, Callable[[Path], str]] = {
        "killed": lambda folder: killed(folder, rng, mesh, root),
        "one of two killed": lambda folder: one_of_two_killed(folder, rng, mesh, root),
        "full": lambda folder: full_disk(folder, rng, mesh, root),
        "limited": lambda folder: limited(folder, rng, mesh, root),
        "read-only": lambda folder: read_only(folder, rng, mesh),
        "overtaken": lambda folder: saved_in_succession(folder, rng, mesh),
    }
    chosen = [("damaged", damage(*way)) for way in itertools.islice(itertools.cycle(damages), counts.get("damaged", 0))]
    return chosen + [(name, others[name]) for name in others for _ in range(counts.get(name, 0))]


def run_trials(saved: Path, tmp_path: Path, mesh: Mesh, root: Path, seed: int, counts: dict[str, int]) -> None:
    seed = int(os.environ.get("AUTOSHARD_FAULT_SEED", seed))
    print(f"AUTOSHARD_FAULT_SEED={seed}")
    done: Counter[str] = Counter()
    for number, (name, trial) in enumerate(trials(saved, random.Random(seed), mesh, root, counts)):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        report = trial(folder)
        done[f"{name}: {report.rpartition(': ')[2]}" if name == "damaged" else name] += 1
        print(f"{number} {name}: {report}", flush=True)
        shutil.rmtree(folder)
    print(*(f"{count:4} {what}" for what, count in sorted(done.items())), sep="\n")


@pytest.mark.whole
def test_five_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    """All faults but killed processes, which `test_sigkill_at_any_moment` covers."""
    counts = {"damaged": 2, "full": 1, "limited": 1, "overtaken": 1}
    run_trials(saved, tmp_path, mesh8, root, 2026, counts)


@pytest.mark.slow
def test_twenty_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    counts = {"damaged": 13, "killed": 1, "one of two killed": 1, "full": 2, "limited": 1}
    counts |= {"read-only": 1, "overtaken": 1}
    run_trials(saved, tmp_path, mesh8, root, 2026, counts)


@pytest.mark.slow
def test_two_hundred_faults(saved: Path, tmp_path: Path, mesh8: Mesh, root: Path) -> None:
    counts = {"damaged": 130, "killed": 15, "one of two killed": 10, "full": 20, "limited": 5}
    counts |= {"read-only": 2, "overtaken": 18}
    run_trials(saved, tmp_path, mesh8, root, random.SystemRandom().randrange(10**6), counts)
