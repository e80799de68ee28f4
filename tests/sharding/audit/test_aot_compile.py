"""Failures of the compiler and of the cache: each gives one result or one error, and leaves the plan unchanged."""

import dataclasses
import importlib
import json
import signal

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.export import deserialize

from autoshard import Plan, plan
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.kernels.grouped.matmul import grouped_matmul
from autoshard.models.attention import attention
from autoshard.sharding.audit import AuditError, export_plan
from autoshard.sharding.audit.compiler_process import device_rank, gpu_target_config
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.planner.bound_plan import bound_or_error

aot_compile = importlib.import_module("autoshard.sharding.audit.aot_compile")


def product(x, w):
    return jax.numpy.tanh(x @ w)


def planned(target="cpu:8", strategy="dp:8", rows=64):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 32), (32, 16))]
    return plan(product, *shapes, target=target, plan=strategy)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache without compiled programs."""
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def replace_compiler(monkeypatch, tmp_path, code):
    """Run this code in place of `compiler_process.py`."""
    script = tmp_path / "child.py"
    script.write_text(code)
    monkeypatch.setattr(aot_compile, "CHILD", script)


def test_program_is_compiled_once(empty_cache):
    plan = planned()
    first, second = plan.verify(), plan.verify()
    assert (first.cached, second.cached) == (False, True)
    assert dataclasses.replace(second, cached=False) == first
    assert len(list(empty_cache.iterdir())) == 1
    assert plan.verify(options={"xla_cpu_enable_fast_math": "true"}).cached is False


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_cache_that_cannot_be_written(tmp_path, monkeypatch, below):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / below))
    with pytest.warns(AutoshardWarning, match=f"cannot be cached in .*{below} .*Set AUTOSHARD_CACHE"):
        audit = planned().verify()
    assert audit.ok and audit.step_time_us


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [("result.json", "{"), ("result.json", "{}"), ("program.hlo.gz", "not gzipped"), ("result.json", None)],
)
def test_damaged_cache_entry_is_compiled_again(empty_cache, name, text):
    planned().verify()
    (file,) = empty_cache.glob(f"*/{name}")
    file.unlink() if text is None else file.write_text(text)
    again, after = planned().verify(), planned().verify()
    assert (again.ok, again.cached, after.ok, after.cached) == (True, False, True, True)


def test_cache_key_covers_the_environment_of_the_compiler(monkeypatch):
    before = aot_compile.environment_key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert aot_compile.environment_key() != before


def test_compiler_that_is_killed(empty_cache, tmp_path, monkeypatch):
    code = "import os, signal, sys\nsys.stderr.write('last words\\n')\nsys.stderr.flush()\n"
    replace_compiler(monkeypatch, tmp_path, code + "os.kill(os.getpid(), signal.SIGKILL)")
    audit = planned().verify()
    assert (audit.kind, audit.ok) == ("crash", False)
    assert str(-signal.SIGKILL) in audit.message and "last words" in audit.message
    assert "the compiler crashed" in str(audit)
    assert audit.predicted_step_time_us and audit.step_time_us is None
    assert not list(empty_cache.iterdir())  # crashes are not cached


def test_compiler_that_takes_too_long(empty_cache):
    audit = planned().verify(timeout_s=0.05)
    assert (audit.kind, audit.seconds) == ("timeout", 0.05)
    assert "stopped after 0.05 s" in audit.message and "took too long" in str(audit)
    assert not list(empty_cache.iterdir())


def test_program_that_does_not_fit(empty_cache, tmp_path, monkeypatch):
    result = {"kind": "oom", "message": "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm.",
              "needed_bytes": 20 << 30, "limit_bytes": 1 << 34, "seconds": 1.5}  # fmt: skip
    code = f"pathlib.Path(sys.argv[2], 'result.json').write_text('''{json.dumps(result)}''')"
    replace_compiler(monkeypatch, tmp_path, f"import pathlib, sys\n{code}")
    audit = planned().verify()
    assert (audit.kind, audit.peak_bytes, audit.collectives) == ("oom", 20 << 30, ())
    assert "does not fit" in str(audit) and "20.0 GiB" in str(audit)
    assert planned().verify().cached  # a result like any other


def test_option_that_the_compiler_does_not_know():
    audit = planned().verify(options={"xla_no_such_option": "1"})
    assert audit.ok and audit.dropped == ("xla_no_such_option",)
    assert "options that this compiler does not know: xla_no_such_option" in str(audit)


def test_option_value_that_the_compiler_rejects(empty_cache):
    audit = planned().verify(options={"xla_cpu_enable_fast_math": "perhaps"})
    assert audit.kind == "error" and "perhaps" in audit.message
    assert not list(empty_cache.iterdir())


@pytest.mark.parametrize(
    ("target", "platform", "extra"), [("v5e:2x4", "tpu", "aot-tpu"), ("h100:8", "cuda", "aot-cuda")]
)
def test_compiler_that_is_not_installed(monkeypatch, target, platform, extra):
    plan = planned(target)
    monkeypatch.setattr(aot_compile, "find_spec", lambda name: None)
    with pytest.raises(AuditError, match=rf"product for {target}.*{platform} is not installed: .*autoshard\[{extra}\]"):
        plan.verify()
    assert issubclass(AuditError, AutoshardError)


def test_targets_that_no_compiler_supports(tmp_path):
    plan = planned()
    with pytest.raises(AuditError, match="no compiler supports machines from files"):
        file = tmp_path / "mine.toml"
        file.write_text(
            'chip = "h100"\ndims = [{name = "gpu", size = 8, kind = "switch", bandwidth = 4e11, latency_us = 5}]'
        )
        plan.where(target=str(file)).verify()
    with pytest.raises(AuditError, match="v5e is a torus of 2 dimensions"):
        plan.where(target="v5e:8").verify()


@pytest.mark.tpu_compile
def test_topology_that_the_compiler_rejects(empty_cache):
    plan = planned("v5e:3x5", "dp:15", rows=60)
    with pytest.raises(AuditError, match=r"does not support the topology 'v5e:3x5': .*3x5"):
        plan.verify()
    assert not list(empty_cache.iterdir())


def test_plan_without_its_function():
    with pytest.raises(PlanError, match="bind"):
        Plan.from_json(planned().to_json()).verify()


def test_function_that_cannot_be_exported():
    def calls_python(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.asarray, shape, jax.numpy.sin(x), vmap_method="sequential") + 1

    with pytest.warns(AutoshardWarning, match="pure_callback"):
        planned = plan(calls_python, jax.ShapeDtypeStruct((64, 8), "float32"), target="cpu:8", plan="dp:8")
    audit = planned.verify()
    assert audit.kind == "error" and audit.message.startswith("JAX cannot export the program for cpu: ")
    assert "the compiler rejected the program" in str(audit)


def test_exported_bytes_do_not_depend_on_the_callers():
    plan = planned()

    def elsewhere():
        return export_plan(bound_or_error(plan.bound).executable)

    assert (
        export_plan(bound_or_error(plan.bound).executable).program
        == elsewhere().program
        == export_plan(bound_or_error(planned().bound).executable).program
    )


def test_every_gpu_has_a_description_for_the_compiler():
    for name, chip in CHIPS.items():
        if chip.platform == "cuda":
            text = gpu_target_config(name)
            assert "cuda_compute_capability { major: " in text and "like" not in text
            assert f"memory_bandwidth: {chip.memory_bandwidth:.0f}" in text
    with pytest.raises(ValueError, match="no description of 'mi300'"):
        gpu_target_config("mi300")


def test_devices_are_numbered_by_their_coordinates():
    class Device:
        def __init__(self, platform, coords, core=0, slice_index=0):
            self.platform, self.coords, self.core_on_chip, self.slice_index = platform, coords, core, slice_index

    tpus = [
        Device("tpu", (x, y, z), c, s) for s in (1, 0) for c in (1, 0) for x in (1, 0) for y in (0, 1) for z in (1, 0)
    ]
    order = [(d.slice_index, *reversed(d.coords), d.core_on_chip) for d in sorted(tpus, key=device_rank)]
    assert order == sorted(order) and order[1] == (0, 0, 0, 0, 1) and order[2] == (0, 0, 0, 1, 0)
    gpus = [Device("gpu", (0, host, number)) for host in (1, 0) for number in (3, 0, 2, 1)]
    assert [d.coords[1:] for d in sorted(gpus, key=device_rank)] == [(h, n) for h in (0, 1) for n in range(4)]


def test_options_are_dropped_and_added_after_errors_of_the_compiler():
    from autoshard.sharding.audit.compiler_process import NO_TRITON_GEMM, _compiled

    class Lowered:
        def compile(self, compiler_options):
            if "xla_new" in compiler_options:
                raise JaxRuntimeError("No such compile option: 'xla_new'")
            if not compiler_options.keys() & NO_TRITON_GEMM.keys():
                raise JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.88")
            return compiler_options

    result = {"dropped": [], "added": []}
    assert _compiled(Lowered(), {"xla_new": "1", "xla_old": "2"}, result) == {"xla_old": "2", **NO_TRITON_GEMM}
    assert result == {"dropped": ["xla_new"], "added": ["xla_gpu_enable_triton_gemm=False"]}


def test_error_that_no_option_avoids():
    from autoshard.sharding.audit.compiler_process import _compiled

    class Lowered:
        def compile(self, compiler_options):
            raise JaxRuntimeError("No such compile option: 'another_option'")

    with pytest.raises(JaxRuntimeError, match="another_option"):
        _compiled(Lowered(), {"mine": "1"}, {"dropped": [], "added": []})


def attention_planned(target="h100:8"):
    """The plan of the gradients of cuDNN's attention, which JAX exports only by name."""

    def gradients(q, k, v):
        return jax.grad(lambda *args: jax.numpy.sum(attention(*args, causal=True, impl="cudnn")), (0, 1, 2))(q, k, v)

    shapes = [jax.ShapeDtypeStruct((8, 256, heads, 64), "bfloat16") for heads in (4, 2, 2)]
    return plan(gradients, *shapes, target=target, plan="dp:8")


def test_custom_calls_without_a_promise_of_compatibility_are_exported():
    program = deserialize(bytearray(export_plan(bound_or_error(attention_planned().bound).executable).program))
    text = program.mlir_module()
    assert "__cudnn$fmhaSoftmaxBackward" in text and text.count("__cudnn$fmhaSoftmax") >= 2


def grouped_product_planned():
    shapes = [jax.ShapeDtypeStruct(dims, "bfloat16") for dims in ((4096, 256), (4, 256, 512))]
    return plan(grouped_matmul, *shapes, jax.ShapeDtypeStruct((4,), "int32"), target="h100:4", plan="dp:4")


def test_triton_kernels_are_exported_without_a_gpu():
    program = deserialize(bytearray(export_plan(bound_or_error(grouped_product_planned().bound).executable).program))
    assert "xla.gpu.triton" in program.mlir_module()


@pytest.mark.cuda_compile
def test_the_time_of_triton_kernels_is_part_of_the_audit():
    made = grouped_product_planned()
    audit = made.verify()
    assert audit.ok, audit.message
    assert audit.compute_us == pytest.approx(made.estimate.compute_us, rel=0.5)


@pytest.mark.cuda_compile
def test_the_time_of_cudnn_attention_is_part_of_the_audit():
    audit = attention_planned().verify()
    assert audit.ok, audit.message
    assert {name.rpartition("_")[2] for name in audit.kernels} == {"fwd", "bwd"}
    assert audit.compute_us == pytest.approx(attention_planned().estimate.compute_us, rel=0.5)


@pytest.mark.parametrize(("peak", "expected"), [(0, 18), (15, 15), (34, 18)])
def test_the_peak_is_at_most_the_sum_of_its_parts(peak, expected):
    memory = {"argument": 10, "temp": 7, "output": 9, "alias": 8, "host_temp": 16, "peak": peak}
    assert aot_compile.Compiled("ok", memory=memory).peak_bytes == expected


@pytest.mark.parametrize(("device", "expected"), [(0, 15), (13, 13)])
def test_the_size_of_the_devices_memory_space_goes_before_the_peak(device, expected):
    memory = {"argument": 10, "temp": 7, "output": 9, "alias": 8, "host_temp": 5, "peak": 15, "device": device}
    assert aot_compile.Compiled("ok", memory=memory).peak_bytes == expected
