"""The size of the device's memory space, for programs that place values in the host's memory."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.sharding.audit import export_plan
from autoshard.sharding.audit.device_memory import add_device_bytes, device_bytes, uses_host
from autoshard.sharding.planner.bound_plan import bound_or_error

aot_compile = importlib.import_module("autoshard.sharding.audit.aot_compile")
SPACE = "Memory Space: {} (color={})\nTotal bytes: {} (1.00GiB)\n  cumulative_size; size\n"
REPORT = SPACE.format("vmem", 1, 7) + SPACE.format("default", 0, 14559376224) + SPACE.format("cmem", 5, 9 << 40)
# In place of the compiler: it writes a report to each folder that the flags name, and a result.
CHILD = f"""
import json, os, pathlib, re, sys
folders = re.findall(r"--xla_dump_to=(\\S+)", os.environ["XLA_FLAGS"])
for folder in map(pathlib.Path, folders):
    folder.mkdir(parents=True)
    (folder / "module_0000.jit_flat.after_optimizations-memory-usage-report.txt").write_text({REPORT!r})
memory = dict(argument=9 << 30, output=0, temp=9 << 30, alias=0, peak=40 << 30)
result = dict(kind="ok", memory=memory, message=str(len(folders)))
pathlib.Path(sys.argv[2], "result.json").write_text(json.dumps(result))
"""


def job_of(offload, target="v5e:2x4"):
    def loss(w, x):
        def layer(x, w):
            hidden = checkpoint_name(jax.nn.gelu(x @ w), "hidden")
            return x + hidden @ w, None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    made = plan(jax.grad(loss), w, x, target=target, plan="dp:8", offload=offload)
    return export_plan(bound_or_error(made.bound).executable)


@pytest.mark.parametrize(
    ("offload", "target", "expected"),
    [("hidden", "v5e:2x4", True), ("none", "v5e:2x4", False), ("hidden", "h100:8", True), ("hidden", "cpu:8", False)],
)
def test_programs_with_values_on_the_host(offload, target, expected):
    assert uses_host(job_of(offload, target)) == expected


def test_host_memory_of_a_cpu_is_its_own_memory():
    job = job_of("hidden")
    assert uses_host(job) and not uses_host(dataclasses.replace(job, platform="cpu"))


def test_the_size_in_a_dump(tmp_path):
    assert device_bytes(tmp_path) == 0
    (tmp_path / "a.memory-usage-report.txt").write_text("Memory Space: vmem (color=1)\nTotal bytes: 7 (7B)\n")
    assert device_bytes(tmp_path) == 0
    (tmp_path / "b.memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "c.memory-usage-report.txt").write_text(SPACE.format("default", 0, 5))
    assert device_bytes(tmp_path) == 14559376224


def test_buffers_of_copies_within_the_hosts_memory_are_left_out(tmp_path):
    (tmp_path / "b.after_optimizations-memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "b.after_optimizations-buffer-assignment.txt").write_text(
        "allocation 1: size 5, parameter 0:\nallocation 394: size 100, thread-local:\n value: size 7, thread-local\n"
        "allocation 395: size 20, thread-local:\nallocation 396: size 3, color 6, thread-local:\n"
    )
    assert device_bytes(tmp_path) == 14559376224 - 120


def test_a_result_without_figures_of_memory_stays_as_it_is(tmp_path):
    (tmp_path / "b.memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "result.json").write_text('{"kind": "oom"}')
    add_device_bytes(tmp_path / "result.json", tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == {"kind": "oom"}


@pytest.mark.parametrize(("offload", "dumps", "peak"), [("hidden", 1, 14559376224), ("none", 0, 18 << 30)])
def test_a_compiled_program_with_values_on_the_host_has_the_size(tmp_path, monkeypatch, offload, dumps, peak):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(aot_compile, "CHILD", child)
    monkeypatch.setenv("XLA_FLAGS", "")
    compiled = aot_compile.compile_job(job_of(offload), cache=tmp_path / "cache")
    assert (compiled.message, compiled.peak_bytes) == (str(dumps), peak)
    assert ("device" in compiled.memory) == bool(dumps)
    again = aot_compile.compile_job(job_of(offload), cache=tmp_path / "another", dump=tmp_path / "dump")
    assert (again.message, again.peak_bytes) == ("1", peak)
    assert device_bytes(tmp_path / "dump") == 14559376224
