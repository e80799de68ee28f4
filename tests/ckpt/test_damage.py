"""Damaged files and killed processes: all damage is detected and named, and no committed step is lost."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError
from autoshard.ckpt.store.manifest import FORMAT, _checksum

# Orbax drops the futures of a failed load's other leaves.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FLIPS = 80  # chosen: number of bits that are flipped, one at a time
SEED = 20  # chosen


def large_state(mesh: Mesh, seed: int) -> dict[str, Any]:
    """Return leaves that are too large for Orbax's index, so that most bytes are payload."""
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    leaves = {f"w{i}": rng.normal(size=(64, 256)).astype(np.float32) for i in range(3)}
    return {
        "params": jax.device_put(leaves, sharding),
        "host": rng.normal(size=2000),
        "step": jnp.int32(seed),
    }


def payload_files(step: Path) -> list[Path]:
    return [file for file in sorted((step / "state").rglob("*")) if file.is_file() and file.parent.name == "d"]


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path, mesh8: Mesh) -> tuple[Checkpointer, dict[int, Any]]:
    """Steps 1, 2 and 3, and their states."""
    states = {step: large_state(mesh8, step) for step in (1, 2, 3)}
    checkpoints = Checkpointer(tmp_path, keep=None)
    for step, state in states.items():
        checkpoints.save(step, state, config={"model": 1}, block=True)
    checkpoints.close()
    return checkpoints, states


@pytest.mark.slow
def test_flipped_bits_in_payload_files(run: Any, tmp_path: Path, assert_same: Any) -> None:
    """Each flipped bit is detected, or is in a part of the file that is never read."""
    checkpoints, states = run
    rng = random.Random(SEED)
    files = payload_files(tmp_path / "step_00000003")
    sizes = [file.stat().st_size for file in files]
    detected = 0
    for trial in range(FLIPS):
        [file] = rng.choices(files, sizes)
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        try:
            restored = checkpoints.restore(3, states[3])
        except DamagedCheckpointError as error:
            detected += 1
            assert error.step == 3 and error.leaves, f"seed {SEED} trial {trial}: {error}"
            assert "step 3" in str(error) and "Step 2 is intact" in str(error)
        else:
            assert_same(restored, states[3])
        flip(file, bit)
    assert detected >= 0.95 * FLIPS
    assert_same(checkpoints.restore(3, states[3]), states[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(each, marks=pytest.mark.slow) for each in ("delete", "truncate", "empty"))]
)
def test_every_file_of_a_step(run: Any, tmp_path: Path, assert_same: Any, damage: str) -> None:
    """For each file, either the damage is detected or the restore does not depend on the file."""
    checkpoints, states = run
    step = tmp_path / "step_00000003"
    outcomes = {}
    for file in [file for file in sorted(step.rglob("*")) if file.is_file() and file.stat().st_size]:
        whole = file.read_bytes()
        if damage == "flip":
            flip(file, 4 * len(whole))
        elif damage == "delete":
            file.unlink()
        else:
            file.write_bytes(whole[: len(whole) // 2] if damage == "truncate" else b"")
        try:
            assert_same(checkpoints.restore(3, states[3]), states[3])
            outcomes[str(file.relative_to(step))] = "unread"
        except DamagedCheckpointError as error:
            assert "step 3" in str(error)
            outcomes[str(file.relative_to(step))] = "detected"
        file.write_bytes(whole)
    roots = (
        "_CHECKPOINT_METADATA",
        "state/manifest.ocdbt",
        "digests/manifest.ocdbt",
        "state/d/",
        "digests/d/",
    )
    assert all(outcome == "detected" for file, outcome in outcomes.items() if file.startswith(roots)), outcomes
    assert "detected" in [outcome for file, outcome in outcomes.items() if file.startswith("state/ocdbt.process_0/d/")]
    assert_same(checkpoints.restore(3, states[3]), states[3])


def test_the_damaged_leaf_is_named(run: Any, tmp_path: Path) -> None:
    """A flipped bit in the largest payload file, which contains the arrays, damages exactly one leaf."""
    checkpoints, states = run
    file = max(payload_files(tmp_path / "step_00000003"), key=lambda file: file.stat().st_size)
    flip(file, 8 * (file.stat().st_size // 2))
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpoints.restore(3, states[3])
    assert len(caught.value.leaves) == 1 and caught.value.leaves[0] in str(caught.value)
    assert checkpoints.verify(3) == list(caught.value.leaves)
    assert checkpoints.verify(2) == []


def test_values_that_differ_from_their_digest(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that Orbax reads without an error are compared with their digests."""
    from autoshard.ckpt.store import orbax_storage

    checkpoints, states = run
    read = orbax_storage.read_arrays

    def read_wrong_value(path: Any, wanted: Any, *, partial: bool) -> dict[Any, Any]:
        arrays = read(path, wanted, partial=partial)
        arrays[("params", "w1")] = arrays[("params", "w1")].at[3, 5].mul(1 + 2**-23)
        return arrays

    monkeypatch.setattr(orbax_storage, "read_arrays", read_wrong_value)
    with pytest.raises(
        DamagedCheckpointError, match="values differ from the saved ones in 1 leaves:\n  params/w1\nNo earlier"
    ):
        checkpoints.restore(3, states[3])


def test_fallback_to_the_newest_intact_step(run: Any, tmp_path: Path, assert_same: Any) -> None:
    checkpoints, states = run
    for step in (2, 3):
        file = max(payload_files(tmp_path / f"step_0000000{step}"), key=lambda file: file.stat().st_size)
        flip(file, 8 * (file.stat().st_size // 2))
    with pytest.warns(CheckpointWarning, match="(?s)step 3 in .* is damaged.*Step 1 is restored instead"):
        restored = checkpoints.restore(like=states[3])
    assert_same(restored, states[1])
    assert checkpoints.restored.step == 1 and checkpoints.restored.damaged == (2, 3)
    with pytest.raises(DamagedCheckpointError, match="Step 1 is intact"):
        checkpoints.restore(3, states[3])
    shutil.rmtree(tmp_path / "step_00000001")
    with pytest.raises(DamagedCheckpointError, match="No earlier step is intact"):
        checkpoints.restore(3, states[3])


def test_a_renamed_step(run: Any, tmp_path: Path) -> None:
    checkpoints, states = run
    (tmp_path / "step_00000003").rename(tmp_path / "step_00000004")
    with pytest.raises(DamagedCheckpointError, match="its manifest is of step 3"):
        checkpoints.restore(4, states[3])


def test_a_changed_manifest(run: Any, tmp_path: Path) -> None:
    """A changed manifest without the matching checksum is damage; one of a newer format is not."""
    checkpoints, states = run
    file = tmp_path / "step_00000003" / "_CHECKPOINT_METADATA"
    whole = file.read_text()
    written = json.loads(whole)["custom_metadata"]

    def put(**changes: Any) -> dict[str, Any]:
        body = written["autoshard"] | changes
        return {"autoshard": body, "sha256": _checksum(body)}

    file.write_text(json.dumps(json.loads(whole) | {"custom_metadata": put(config={"model": 2})}))
    assert checkpoints.config(3) == {"model": 2}  # with the matching checksum, which shows that this file is read
    file.write_text(
        json.dumps(
            json.loads(whole) | {"custom_metadata": written | put(config={"model": 3}) | {"sha256": written["sha256"]}}
        )
    )
    with pytest.raises(DamagedCheckpointError, match="step 3 .*the manifest has a wrong checksum"):
        checkpoints.restore(3, states[3])
    file.write_text(json.dumps(json.loads(whole) | {"custom_metadata": put(format=FORMAT + 1)}))
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}, .* reads up to {FORMAT}: upgrade") as caught:
        checkpoints.restore(3, states[3])
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_files_without_read_permission_are_not_reported_as_damaged(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.ckpt.store import orbax_storage

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    checkpoints, states = run
    monkeypatch.setattr(orbax_storage, "read_arrays", forbidden)
    with pytest.raises(CheckpointError, match="cannot be read: .*Permission denied") as caught:
        checkpoints.restore(3, states[3])
    assert not isinstance(caught.value, DamagedCheckpointError)


SAVING = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from autoshard.ckpt import Checkpointer
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
state = jax.device_put({f"w{i}": np.zeros((64, 4096), np.float32) for i in range(8)}, sharding)
with Checkpointer(sys.argv[1], keep=2) as checkpoints:
    for step in range(10_000):
        checkpoints.save(step, state, config={})
        state = advance(state)
        print(max(checkpoints.steps(), default=None), flush=True)
"""


def test_sigkill_at_any_moment(tmp_path: Path, root: Path) -> None:
    rng = random.Random(SEED)
    env = os.environ | {"PYTHONPATH": str(root)}
    for trial in range(2):
        directory = tmp_path / str(trial)
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(directory)], env=env, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        newest = -1
        while newest < 2 + trial:  # steps are being committed
            line = process.stdout.readline()
            assert line, "the saving process ended by itself"
            newest = int(line) if line.strip() != "None" else -1
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        later_lines = process.communicate()[0].split()
        newest = max([newest, *(int(line) for line in later_lines if line != "None")])
        template = {f"w{i}": jax.ShapeDtypeStruct((64, 4096), jnp.float32) for i in range(8)}
        with Checkpointer(directory, keep=2) as checkpoints:
            last = checkpoints.latest()
            assert last is not None and last >= newest, f"step {newest} was committed, the newest is {last}"
            for step in checkpoints.steps():
                restored = checkpoints.restore(step, template)
                assert all(np.all(np.asarray(leaf) == step) for leaf in restored.values())
            checkpoints.save(last + 1, restored, config={}, block=True)
            names = {path.name for path in directory.iterdir()}
        assert not [name for name in names if "tmp" in name or "removed" in name]
