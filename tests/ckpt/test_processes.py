"""Two `jax.distributed` processes save and restore together, and a single process restores their step."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer
from tests.compiler_flags import xla_flags

WORKER = """
import os, sys, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
directory, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from autoshard.ckpt import CheckpointError, Checkpointer, CheckpointWarning, DamagedCheckpointError
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

@jax.jit
def values(seed):
    w = jnp.arange(64.0 * 96).reshape(64, 96) + seed
    put = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    sharded = {"w": put(w, "data", "model"), "r": put(w[0], "model")}
    many = [put(w[i] + i, "data") for i in range(30)] + [put(w[i]) for i in range(30)]
    return sharded | {"whole": put(w[1]), "key": jax.random.key(seed), "many": many}

advance = jax.jit(lambda w: w + 1, donate_argnums=0)
state = {**values(0), "host": np.arange(3), "local": jnp.float32(2), "packed": [np.full(5, i) for i in range(20)]}

def describe(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

template = jax.tree.map(describe, state)

def same(restored, step):
    for shard in restored["w"].addressable_shards:
        whole = np.arange(64.0 * 96, dtype=np.float32).reshape(64, 96) + step
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    for i, leaf in enumerate(restored["many"]):
        for shard in leaf.addressable_shards:
            assert leaf.sharding == template["many"][i].sharding
            np.testing.assert_array_equal(shard.data, (whole[i % 30] + i * (i < 30))[shard.index])
    assert all((leaf == i).all() for i, leaf in enumerate(restored["packed"]))
    bits = jax.random.key_data(restored["key"]).addressable_data(0)
    assert (bits == jax.random.key_data(jax.random.key(0))).all()
    assert restored["local"] == 2 and (restored["host"] == np.arange(3)).all()

with Checkpointer(directory, keep=None) as checkpoints:
    for step in (0, 1):
        checkpoints.save(step, state, config={"model": 1})
        state = {**state, "w": advance(state["w"]), "many": [advance(leaf) for leaf in state["many"]]}
    checkpoints.wait()
    assert checkpoints.steps() == [0, 1]
    from autoshard.ckpt.restore.restore import read_manifest
    assert len(read_manifest(checkpoints.directory / "step_00000001", 1).places) == 81  # many, packed, whole
    same(checkpoints.restore(like=template, config={"model": 1}), 1)
    # Leaves of one pack on two shardings: each process reads the pack on the host.
    mixed = {**template, "many": [describe(state["many"][30 * (i % 2)]) for i in range(60)]}
    restored = checkpoints.restore(like=mixed)["many"]
    whole = np.arange(64.0 * 96, dtype=np.float32).reshape(64, 96) + 1
    for i, leaf in enumerate(restored):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, (whole[i % 30] + i * (i < 30))[shard.index])
    try:
        checkpoints.save(1, state, config={})
    except CheckpointError as error:
        assert "has step 1 already" in str(error)
    else:
        raise AssertionError("a committed step was overwritten")
    own = {
        "text": f"of {index}", "array": np.full(3, index), "local": jnp.float32(index), "number": 0.5 + index,
        "kind": np.zeros(2, np.int32 if index else np.float32), "empty": np.zeros(index),
    }
    before = os.listdir(directory)
    try:
        checkpoints.save(9, {"own": own, "all": {"text": "the same", "array": np.ones(3), "local": jnp.ones(2)}})
    except CheckpointError as error:
        message = "6 leaves of the state are in the memory of single processes and differ between processes"
        assert message in str(error), error
        assert all(f"\\n  own/{name}\\n" in str(error) for name in own) and "all/" not in str(error), error
    else:
        raise AssertionError("the leaves of one process were saved for all")
    assert os.listdir(directory) == before
    checkpoints.save(9, {"data": "the same"}, block=True)
    assert checkpoints.restore(9) == {"data": "the same"}
    from autoshard._processes import exchange
    exchange("read", "")  # a step that the other process still reads would stay
    checkpoints._directory.remove(9) if index == 0 else None
    exchange("removed", "")
    # An error in one process fails the restore in both.
    from autoshard.ckpt.store import orbax_storage
    read = orbax_storage.read_arrays
    def broken(path, wanted, *, partial):
        if index == 1 and path.name.endswith("1"):
            raise OSError("only here")
        return read(path, wanted, partial=partial)
    orbax_storage.read_arrays = broken
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(checkpoints.restore(like=template), 0)
    text = str([w.message for w in caught if issubclass(w.category, CheckpointWarning)][0])
    assert ("only here" if index == 1 else "process 1 failed") in text, text
print("done", index)
"""


@pytest.mark.multiprocess
def test_one_process_restores_the_step_of_two(tmp_path: Path, root: Path) -> None:
    with socket.socket() as port_socket:
        port_socket.bind(("localhost", 0))
        port = port_socket.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": xla_flags(devices=2)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "run"), str(port), str(index)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], [err[-2500:] for _, err in outputs]

    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    expected = np.arange(64.0 * 96, dtype=np.float32).reshape(64, 96) + 1
    template = {
        "w": jax.ShapeDtypeStruct((64, 96), np.float32, sharding=sharding),
        "r": jax.ShapeDtypeStruct((96,), np.float32),
        "whole": np.zeros(96, np.float32),
        "key": jax.random.key(1),
        "host": np.zeros(3, int),
        "local": jax.ShapeDtypeStruct((), np.float32),
        "many": [jax.ShapeDtypeStruct((96,), np.float32, sharding=sharding)] * 60,
        "packed": [np.zeros(5, int)] * 20,
    }
    restored = Checkpointer(tmp_path / "run").restore(like=template, config={"model": 1})
    np.testing.assert_array_equal(restored["w"], expected)
    assert restored["w"].sharding == sharding
    for i, leaf in enumerate(restored["many"]):
        np.testing.assert_array_equal(leaf, expected[i % 30] + i * (i < 30))
    np.testing.assert_array_equal(restored["whole"], expected[1] - 1)
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(jax.random.key(0))).all()
