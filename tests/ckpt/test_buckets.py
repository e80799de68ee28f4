"""Checkpoints in a bucket of a local server that emulates Google Cloud Storage."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

_RUN = """
import os, sys
from gcp_storage_emulator.server import create_server
port = int(sys.argv[1])
server = create_server("localhost", port, in_memory=True, default_bucket="bucket")
server.start()
try:
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from autoshard import cli
    from autoshard.ckpt import CheckpointError, Checkpointer
    mesh = jax.make_mesh((8,), ("x",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], []))
    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), spread), "key": jax.random.key(1)}
    with Checkpointer("gs://bucket/run/checkpoints", keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state)
            state["w"] = state["w"] + 1
        print(checkpoints.latest(), checkpoints.steps())
        back = checkpoints.restore(2, like=state, shardings={"w": whole, "key": None})
        print(np.array_equal(back["w"], np.arange(64.0).reshape(8, 8) + 1), tuple(back["w"].sharding.spec))
        print(jax.random.key_data(back["key"]).tolist(), checkpoints.verify())
        try:
            checkpoints.save(3, state)
        except CheckpointError as error:
            print(error)
        checkpoints.copy(3, sys.argv[2])
    print(cli.main(["ckpt", "verify", sys.argv[2]]), cli.main(["ckpt", "ls", "gs://bucket/run/checkpoints"]))
finally:
    server.stop()
"""


@pytest.mark.slow
def test_checkpoints_in_a_bucket(tmp_path: Path) -> None:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://localhost:{port}"
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    command = [sys.executable, "-c", _RUN, str(port), str(tmp_path / "copy")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[:3] == ["3 [2, 3]", "True ()", "[0, 1] []"], done.stdout
    assert lines[3].startswith("gs://bucket/run/checkpoints has step 3 already")
    assert lines[4] == "step 3  intact" and [line.split()[0] for line in lines[6:8]] == ["2", "3"], done.stdout
    assert lines[-1] == "0 0"
