"""The script that compiles a job, run in this process: results, failures, and the topologies of each platform."""

import base64
import gzip
import json
import os
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import jax
import jax.experimental.topologies
import numpy as np
import pytest

from autoshard import plan
from autoshard.sharding.audit import compiler_process, export_plan
from autoshard.sharding.audit.compiler_process import coordinates, main, set_environment
from autoshard.sharding.planner.bound_plan import bound_or_error


@pytest.fixture(scope="module")
def job():
    """A product of sharded matrices on eight CPU devices."""
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 32), (32, 16))]
    made = plan(lambda x, w: jax.numpy.tanh(x @ w), *shapes, target="cpu:8", plan="dp:8")
    contents = export_plan(bound_or_error(made.bound).executable)
    body = asdict(contents) | {"program": base64.b64encode(contents.program).decode()}
    return json.loads(json.dumps(body, default=list))


def compiled(job, tmp_path):
    """The result and the program's text of a job."""
    (tmp_path / "job.json").write_text(json.dumps(job))
    with mock.patch.dict(os.environ):
        main(tmp_path / "job.json", tmp_path)
    program = tmp_path / "program.hlo.gz"
    return json.loads((tmp_path / "result.json").read_text()), (
        gzip.decompress(program.read_bytes()).decode() if program.exists() else None
    )


def test_a_program_has_its_memory_and_its_text(job, tmp_path):
    result, text = compiled(job | {"options": {"xla_of_tomorrow": "1"}}, tmp_path)
    assert (result["kind"], result["stage"], result["message"]) == ("ok", "", "")
    assert result["coordinates"] == [[n] for n in range(8)] and result["dropped"] == ["xla_of_tomorrow"]
    assert result["memory"]["argument"] == (64 * 32 // 8 + 32 * 16) * 4  # rows over all devices, the weights on each
    assert result["memory"]["output"] == 64 * 16 // 8 * 4 and result["memory"]["host_argument"] == 0
    assert result["versions"]["jax"] == jax.__version__
    assert text is not None and "num_partitions=8" in text and "f32[8,32]" in text


def test_a_failure_has_its_stage_and_no_program(job, tmp_path):
    result, text = compiled(job | {"mesh": {"dp": 4}, "devices": [0, 1, 2, 3]}, tmp_path)
    assert (result["kind"], result["stage"], text) == ("error", "topology", None)
    assert result["message"] == "cpu:1x8 has 8 devices, but the mesh has 4"
    result, _ = compiled(job | {"mesh": {"other": 8}}, tmp_path)
    assert (result["kind"], result["stage"]) == ("error", "lower") and result["seconds"] > 0


def test_a_program_that_does_not_fit_is_a_result(job, tmp_path, monkeypatch):
    def does_not_fit(*_):
        raise ValueError(
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 2.5G of 512M hbm."
        )

    monkeypatch.setattr(compiler_process, "_compiled", does_not_fit)
    result, text = compiled(job, tmp_path)
    assert (result["kind"], result["stage"], text) == ("oom", "compile", None)
    assert (result["needed_bytes"], result["limit_bytes"]) == (2.5 * 2**30, 512 * 2**20)


def test_sizes_of_a_program_that_does_not_fit():
    def sizes(message):
        found = compiler_process._failure(message)
        return found["kind"], found.get("needed_bytes"), found.get("limit_bytes")

    other = "Out of memory on HBM: total (20.00G) exceeds available HBM (16.00G)"
    assert sizes(other) == ("oom", 20 * 2**30, 16 * 2**30)
    assert sizes("Ran out of memory on hbm") == ("oom", None, None)
    assert sizes("Out of paper") == ("error", None, None)


@pytest.mark.parametrize(
    ("platform", "flags", "expected"),
    [
        ("cpu", "--xla_a=1 --xla_force_host_platform_device_count=2", "--xla_a=1 {count}=8"),
        ("tpu", "--xla_a=1 --xla_force_host_platform_device_count=2", "--xla_a=1"),
        ("cpu", "", "{count}=8"),
    ],
)
def test_the_environment_has_the_devices_of_the_job(platform, flags, expected):
    with mock.patch.dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cuda"):
        set_environment({"platform": platform, "devices": [*range(8)]})
        assert os.environ["XLA_FLAGS"] == expected.format(count=compiler_process.DEVICE_COUNT)
        assert (os.environ["JAX_PLATFORMS"], os.environ["TPU_WORKER_HOSTNAMES"]) == ("cpu", "localhost")


@pytest.mark.parametrize(
    ("platform", "topology", "name", "options"),
    [
        ("tpu", "v5e:4x4", "v5e:4x4", {}),
        ("tpu", "v5p:4x4x4*2", "v5p:4x4x4", {"num_slices": 2}),
        ("tpu", "v4:2x2x1", "v4:2x2x1", {"chip_config_name": "megacore"}),
        ("tpu", "v5e:1x1", "v5e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("cuda", "h100:8", "1x1x8", {"topology": "1x1x8"}),
        ("cuda", "h100:4x8", "1x4x8", {"topology": "1x4x8"}),
    ],
)
def test_the_compiler_gets_its_name_of_the_topology(monkeypatch, platform, topology, name, options):
    asked = []

    def describe(**given):
        asked.append(given)
        return SimpleNamespace(devices=["a device"])

    monkeypatch.setattr(jax.experimental.topologies, "get_topology_desc", describe)
    assert compiler_process._devices({"platform": platform, "topology": topology}) == ["a device"]
    [given] = asked
    assert (given.pop("platform"), given.pop("topology_name")) == (platform, name)
    description = given.pop("target_config", "")
    assert given == options and ("H100" in description) == (platform == "cuda")


def test_devices_that_a_mesh_has_in_another_order(job):
    mesh = compiler_process._mesh(job | {"devices": [7, 6, 5, 4, 3, 2, 1, 0], "mesh": {"a": 2, "b": 4}})
    assert mesh.axis_names == ("a", "b")
    np.testing.assert_array_equal([[d.id for d in row] for row in mesh.devices], [[7, 6, 5, 4], [3, 2, 1, 0]])


def test_coordinates_of_each_platform():
    device = SimpleNamespace
    tpu = device(platform="tpu", coords=(1, 2, 3), core_on_chip=1, slice_index=4)
    assert coordinates(tpu) == [1, 2, 3, 1]
    assert coordinates(tpu, sliced=True) == [1, 2, 3, 1, 4]
    assert coordinates(device(platform="gpu", coords=(0, 1, 5))) == [0, 1, 5]
    assert coordinates(device(platform="cpu", id=3)) == [3]


def test_only_programs_for_gpus_get_options_of_their_own():
    options = {"xla_a": "1"}
    assert compiler_process._options({"platform": "tpu", "options": options}) == options
    merged = compiler_process._options({"platform": "cuda", "options": options})
    assert merged == {"xla_gpu_autotune_level": "0", "xla_a": "1"}


def test_versions_of_packages_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(compiler_process, "PACKAGES", ("jax", "a-package-that-nobody-has"))
    assert compiler_process.versions() == {"jax": jax.__version__}
