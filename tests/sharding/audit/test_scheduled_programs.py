"""Programs that libtpu schedules, without machine code."""

import gzip
import importlib
import json
import os
import re
import threading
from pathlib import Path
from unittest import mock

import pytest

from autoshard.sharding.audit import compiler_process, export_plan
from autoshard.sharding.audit.device_memory import device_bytes
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.audit.test_compilers import layers_planned

aot_compile = importlib.import_module("autoshard.sharding.audit.aot_compile")
# In place of the compiler: it writes a report to the folder of the job, and a result.
CHILD = """
import json, os, pathlib, sys
job, out = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
result = dict(kind="ok", until=job["until"], memory=dict(argument=1, output=0, alias=0, temp=1))
if job["until"] == "schedule":
    dump = pathlib.Path(job["dump"])
    assert f"--xla_dump_to={dump}" in os.environ["XLA_FLAGS"]
    dump.mkdir()
    (dump / "a.memory-usage-report.txt").write_text("Memory Space: default (color=0)\\nTotal bytes: 7 (7B)\\n")
    result["memory"] = {}
(out / "result.json").write_text(json.dumps(result))
"""


def job_for(target, strategy="fsdp:4"):
    return export_plan(bound_or_error(layers_planned(strategy, target).bound).executable)


def computed(text):
    """The opcodes of the instructions in the order of the program, without what only code has."""
    return re.findall(r" = .*? ([\w-]+)\(", text)


@pytest.mark.tpu_compile
def test_the_schedule_is_that_of_the_whole_compilation(tmp_path):
    job = job_for("v5e:2x2")
    scheduled = aot_compile.compile_job(job, cache=tmp_path, until="schedule")
    compiled = aot_compile.compile_job(job, cache=tmp_path, dump=tmp_path / "dump")
    assert (scheduled.kind, scheduled.until, compiled.kind, compiled.until) == ("ok", "schedule", "ok", "code")
    assert not scheduled.cached and not compiled.cached
    assert computed(scheduled.text) == computed(compiled.text)
    assert "estimated_cycles" in compiled.text and "estimated_cycles" not in scheduled.text
    assert scheduled.coordinates == compiled.coordinates
    assert scheduled.peak_bytes == device_bytes(tmp_path / "dump")
    assert scheduled.host_bytes is None
    assert aot_compile.compile_job(job, cache=tmp_path, until="schedule").cached


@pytest.mark.parametrize(("target", "until"), [("v5e:2x2", "schedule"), ("h100:1x4", "code"), ("cpu:4", "code")])
def test_only_programs_of_tpus_are_stopped(tmp_path, monkeypatch, target, until):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(aot_compile, "CHILD", tmp_path / "child.py")
    found = aot_compile.compile_job(job_for(target), cache=tmp_path / "cache", until="schedule")
    assert (found.kind, found.until) == ("ok", until)
    assert found.peak_bytes == (7 if until == "schedule" else 2)


class ExitedError(Exception):
    """In place of the end of the process."""


def run_child(tmp_path, monkeypatch, compiler):
    """Run the child with this function as the compiler; return its exit code and its result, None if it has none."""
    codes = []

    def leave(code: int):
        codes.append(code)
        raise ExitedError

    (tmp_path / "dump").mkdir()
    job = {"platform": "tpu", "until": "schedule", "dump": str(tmp_path / "dump"), "devices": []}
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(compiler_process, "_compile", compiler)
    with pytest.raises(ExitedError), mock.patch.dict(os.environ):
        compiler_process.main(tmp_path / "job.json", tmp_path)
    result = tmp_path / "result.json"
    return codes, json.loads(result.read_text()) if result.exists() else None


@pytest.fixture
def code():
    """The time at which a compiler that makes code for ever ends: that of the test."""
    ended = threading.Event()
    yield ended
    ended.set()


def program_text(folder):
    return gzip.decompress((folder / "program.hlo.gz").read_bytes()).decode()


def test_a_dump_is_the_result(tmp_path, monkeypatch, code):
    def compiler(job, result):
        result.update({"dropped": ["option"], "stage": "compile"})
        for name in ("after_optimizations.txt", "after_optimizations_after_buffer_assignment.txt", "before.txt"):
            (tmp_path / "dump" / f"module_0000.jit_flat.{name}").write_text(name)
        code.wait()
        return "code"

    codes, found = run_child(tmp_path, monkeypatch, compiler)
    assert codes == [0] and found is not None
    assert (found["kind"], found["until"], found["stage"], found["memory"]) == ("ok", "schedule", "", {})
    assert found["dropped"] == ["option"] and program_text(tmp_path) == "after_optimizations.txt"


@pytest.mark.parametrize("kind", ["ok", "oom", "error"])
def test_a_compiler_that_ends_before_the_dump_has_its_own_result(tmp_path, monkeypatch, kind):
    def compiler(job, result):
        result.update({"kind": kind, "until": "code"})
        return "code" if kind == "ok" else ""

    codes, found = run_child(tmp_path, monkeypatch, compiler)
    assert codes == [0] and found is not None
    assert (found["kind"], found["until"]) == (kind, "code")
    assert kind != "ok" or program_text(tmp_path) == "code"


def test_a_dump_that_cannot_be_read_ends_the_process(tmp_path, monkeypatch, code, capsys):
    def compiler(job, result):
        (tmp_path / "dump" / "module_0000.jit_flat.after_optimizations_after_buffer_assignment.txt").write_text("")
        code.wait()

    assert run_child(tmp_path, monkeypatch, compiler) == ([1], None)
    assert "FileNotFoundError" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_compiling_thread_ends_the_process(tmp_path, monkeypatch):
    def compiler(job, result):
        raise KeyError("topology")

    assert run_child(tmp_path, monkeypatch, compiler) == ([1], None)


def test_schedules_and_code_are_cached_apart(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD.replace("(out /", "(out / 'program.hlo.gz').write_bytes(TEXT)\n(out /"))
    text = (tmp_path / "child.py").read_text()
    (tmp_path / "child.py").write_text(text.replace("TEXT", repr(gzip.compress(b"HloModule"))))
    monkeypatch.setattr(aot_compile, "CHILD", tmp_path / "child.py")
    job = job_for("v5e:2x2")
    found = [aot_compile.compile_job(job, cache=tmp_path / "cache", until=until) for until in ("schedule", "code") * 2]
    assert [(each.until, each.cached) for each in found] == [
        ("schedule", False), ("code", False), ("schedule", True), ("code", True),
    ]  # fmt: skip


def test_an_earlier_dump_is_no_result(tmp_path, monkeypatch):
    """The compiler writes to an empty folder. The dump is copied to the given one."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(aot_compile, "CHILD", tmp_path / "child.py")
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "b.memory-usage-report.txt").write_text(
        "Memory Space: default (color=0)\nTotal bytes: 99 ()\n"
    )
    found = aot_compile.compile_job(
        job_for("v5e:2x2"), cache=tmp_path / "cache", dump=tmp_path / "dump", until="schedule"
    )
    assert found.peak_bytes == 7
    assert len(list((tmp_path / "dump").iterdir())) == 2


def test_a_program_that_does_not_fit_is_a_failure_as_before(tmp_path, monkeypatch):
    """The compiler fails before the dump that the thread waits for."""
    child = CHILD.replace('kind="ok"', 'kind="oom", needed_bytes=9')
    (tmp_path / "child.py").write_text(child)
    monkeypatch.setattr(aot_compile, "CHILD", tmp_path / "child.py")
    found = aot_compile.compile_job(job_for("v5e:2x2"), cache=Path(tmp_path / "cache"), until="schedule")
    assert (found.kind, found.peak_bytes) == ("oom", 9)
