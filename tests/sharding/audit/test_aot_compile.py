"""What goes wrong around the compiler: one result or one error each, and the plan stays."""

import dataclasses
import importlib
import json
import signal

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from autoshard import Plan, plan
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.sharding.audit import AuditError, export_plan
from autoshard.sharding.audit.compiler_process import gpu_text, rank
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.planner.bound_plan import bound_or_error

building = importlib.import_module("autoshard.sharding.audit.aot_compile")  # the package's `build` is its function


def product(x, w):
    return jax.numpy.tanh(x @ w)


def planned(target="cpu:8", words="dp:8", rows=64):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 32), (32, 16))]
    return plan(product, *shapes, target=target, plan=words)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """No program was compiled before."""
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def child_that(monkeypatch, tmp_path, code):
    """Puts another program in the place of the one that compiles."""
    script = tmp_path / "child.py"
    script.write_text(code)
    monkeypatch.setattr(building, "CHILD", script)


def test_a_program_is_compiled_once(empty_cache):
    made = planned()
    first, second = made.verify(), made.verify()
    assert (first.cached, second.cached) == (False, True)
    assert dataclasses.replace(second, cached=False) == first
    assert len(list(empty_cache.iterdir())) == 1
    assert made.verify(options={"xla_cpu_enable_fast_math": "true"}).cached is False


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, below):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / below))
    with pytest.warns(AutoshardWarning, match=f"cannot be kept in .*{below} .*set AUTOSHARD_CACHE"):
        found = planned().verify()
    assert found.ok and found.step_time_us


@pytest.mark.parametrize(
    ("name", "text"),
    [("result.json", "{"), ("result.json", "{}"), ("program.hlo.gz", "no text"), ("result.json", None)],
)
def test_what_was_kept_and_is_damaged_is_compiled_again(empty_cache, name, text):
    planned().verify()
    (file,) = empty_cache.glob(f"*/{name}")
    file.unlink() if text is None else file.write_text(text)
    again, after = planned().verify(), planned().verify()
    assert (again.ok, again.cached, after.ok, after.cached) == (True, False, True, True)


def test_what_the_compiler_reads_of_the_environment_makes_another_program(monkeypatch):
    before = building._decisive()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert building._decisive() != before


def test_a_compiler_that_is_killed(empty_cache, tmp_path, monkeypatch):
    child_that(monkeypatch, tmp_path, "import os, signal, sys\nsys.stderr.write('last words\\n')\nsys.stderr.flush()\n"
               "os.kill(os.getpid(), signal.SIGKILL)")  # fmt: skip
    found = planned().verify()
    assert (found.kind, found.ok) == ("crash", False)
    assert str(-signal.SIGKILL) in found.message and "last words" in found.message
    assert "the compiler crashed" in str(found)
    assert found.predicted_step_time_us and found.step_time_us is None
    assert not list(empty_cache.iterdir())  # nothing is kept of it


def test_a_compiler_that_takes_too_long(empty_cache):
    found = planned().verify(timeout_s=0.05)
    assert (found.kind, found.seconds) == ("timeout", 0.05)
    assert "stopped after 0.05 s" in found.message and "took too long" in str(found)
    assert not list(empty_cache.iterdir())


def test_a_program_that_does_not_fit(empty_cache, tmp_path, monkeypatch):
    result = {"kind": "oom", "message": "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm.",
              "needed_bytes": 20 << 30, "limit_bytes": 1 << 34, "seconds": 1.5}  # fmt: skip
    child_that(monkeypatch, tmp_path, f"import pathlib, sys\npathlib.Path(sys.argv[2], 'result.json').write_text('''"
               f"{json.dumps(result)}''')")  # fmt: skip
    found = planned().verify()
    assert (found.kind, found.peak_bytes, found.collectives) == ("oom", 20 << 30, ())
    assert "does not fit" in str(found) and "20.0 GiB" in str(found)
    assert planned().verify().cached  # an answer like any other


def test_an_option_that_the_compiler_does_not_know():
    found = planned().verify(options={"xla_no_such_option": "1"})
    assert found.ok and found.dropped == ("xla_no_such_option",)
    assert "options that this compiler does not know: xla_no_such_option" in str(found)


def test_a_value_that_the_compiler_refuses(empty_cache):
    found = planned().verify(options={"xla_cpu_enable_fast_math": "perhaps"})
    assert found.kind == "error" and "perhaps" in found.message
    assert not list(empty_cache.iterdir())


@pytest.mark.parametrize(
    ("target", "platform", "extra"), [("v5e:2x4", "tpu", "aot-tpu"), ("h100:8", "cuda", "aot-cuda")]
)
def test_a_compiler_that_is_not_installed(monkeypatch, target, platform, extra):
    made = planned(target)
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    with pytest.raises(AuditError, match=rf"product for {target}.*{platform} is not installed: .*autoshard\[{extra}\]"):
        made.verify()
    assert issubclass(AuditError, AutoshardError)


def test_targets_that_no_compiler_knows(tmp_path):
    made = planned()
    with pytest.raises(AuditError, match="no compiler knows the machine of a file"):
        file = tmp_path / "mine.toml"
        file.write_text(
            'chip = "h100"\ndims = [{name = "gpu", size = 8, kind = "switch", bandwidth = 4e11, latency_us = 5}]'
        )
        made.where(target=str(file)).verify()
    with pytest.raises(AuditError, match="v5e is a torus of 2 dimensions"):
        made.where(target="v5e:8").verify()


@pytest.mark.tpu_compile
def test_a_topology_that_the_compiler_refuses(empty_cache):
    made = planned("v5e:3x5", "dp:15", rows=60)
    with pytest.raises(AuditError, match=r"no machine 'v5e:3x5': .*3x5"):
        made.verify()
    assert not list(empty_cache.iterdir())


def test_a_plan_without_its_function():
    with pytest.raises(PlanError, match="bind"):
        Plan.from_json(planned().to_json()).verify()


def test_a_function_that_cannot_be_exported():
    def asks_python(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.asarray, shape, jax.numpy.sin(x), vmap_method="sequential") + 1

    with pytest.warns(AutoshardWarning, match="pure_callback"):
        made = plan(asks_python, jax.ShapeDtypeStruct((64, 8), "float32"), target="cpu:8", plan="dp:8")
    found = made.verify()
    assert found.kind == "error" and found.message.startswith("not to be exported for cpu: ")
    assert "the compiler refused the program" in str(found)


def test_a_program_is_the_same_bytes_wherever_it_is_exported():
    made = planned()

    def elsewhere():
        return export_plan(bound_or_error(made.bound).executable)

    assert (
        export_plan(bound_or_error(made.bound).executable).program
        == elsewhere().program
        == export_plan(bound_or_error(planned().bound).executable).program
    )


def test_every_gpu_is_told_of():
    for name, chip in CHIPS.items():
        if chip.platform == "cuda":
            text = gpu_text(name)
            assert "cuda_compute_capability { major: " in text and "like" not in text
            assert f"memory_bandwidth: {chip.memory_bandwidth:.0f}" in text
    with pytest.raises(ValueError, match="is not told enough of mi300"):
        gpu_text("mi300")


def test_devices_are_numbered_by_where_they_stand():
    class Device:
        def __init__(self, platform, coords, core=0, slice_index=0):
            self.platform, self.coords, self.core_on_chip, self.slice_index = platform, coords, core, slice_index

    tpus = [
        Device("tpu", (x, y, z), c, s) for s in (1, 0) for c in (1, 0) for x in (1, 0) for y in (0, 1) for z in (1, 0)
    ]
    order = [(d.slice_index, *reversed(d.coords), d.core_on_chip) for d in sorted(tpus, key=rank)]
    assert order == sorted(order) and order[1] == (0, 0, 0, 0, 1) and order[2] == (0, 0, 0, 1, 0)
    gpus = [Device("gpu", (0, host, number)) for host in (1, 0) for number in (3, 0, 2, 1)]
    assert [d.coords[1:] for d in sorted(gpus, key=rank)] == [(h, n) for h in (0, 1) for n in range(4)]


def test_options_are_dropped_and_added_as_the_compiler_asks():
    from autoshard.sharding.audit.compiler_process import PLAIN_PRODUCTS, _compiled

    class Lowered:
        def compile(self, compiler_options):
            if "xla_new" in compiler_options:
                raise JaxRuntimeError("No such compile option: 'xla_new'")
            if not compiler_options.keys() & PLAIN_PRODUCTS.keys():
                raise JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.88")
            return compiler_options

    result = {"dropped": [], "added": []}
    assert _compiled(Lowered(), {"xla_new": "1", "xla_old": "2"}, result) == {"xla_old": "2", **PLAIN_PRODUCTS}
    assert result == {"dropped": ["xla_new"], "added": ["xla_gpu_enable_triton_gemm=False"]}


def test_an_error_that_no_option_mends():
    from autoshard.sharding.audit.compiler_process import _compiled

    class Lowered:
        def compile(self, compiler_options):
            raise JaxRuntimeError("No such compile option: 'somebody_elses'")

    with pytest.raises(JaxRuntimeError, match="somebody_elses"):
        _compiled(Lowered(), {"mine": "1"}, {"dropped": [], "added": []})
