"""Programs that libtpu schedules, without machine code."""

import gzip
import importlib
import json
import os
import re
import threading
from pathlib import Path

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


class Exited(BaseException):
    """In place of the end of the process."""


def watch(dump, out, monkeypatch, result):
    """Run the thread that waits for a dump, until it ends the process."""

    def leave(code: int):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    lock = threading.Lock()
    with pytest.raises(Exited):
        compiler_process._watch(dump, out, result, lock)
    return lock


def test_a_dump_is_the_result(tmp_path, monkeypatch):
    for name in ("after_optimizations.txt", "after_optimizations_after_buffer_assignment.txt", "before.txt"):
        (tmp_path / f"module_0000.jit_flat.{name}").write_text(name)
    lock = watch(tmp_path, tmp_path, monkeypatch, {"dropped": ["option"], "until": "schedule", "stage": "compile"})
    assert lock.locked()  # so the thread that compiles does not write another result
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["kind"], found["stage"], found["memory"], found["dropped"]) == ("ok", "", {}, ["option"])
    assert gzip.decompress((tmp_path / "program.hlo.gz").read_bytes()).decode() == "after_optimizations.txt"


def test_a_dump_that_cannot_be_read_ends_the_process(tmp_path, monkeypatch, capsys):
    """Else the thread that compiles would wait for the lock for ever."""
    (tmp_path / "module_0000.jit_flat.after_optimizations_after_buffer_assignment.txt").write_text("")
    watch(tmp_path, tmp_path, monkeypatch, {})
    assert "FileNotFoundError" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


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
