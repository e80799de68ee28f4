"""The bandwidth of the host link that the scheduler assumes, read from a compiled program."""

import dataclasses
from types import SimpleNamespace

import host_link
import pytest

from autoshard.sharding.machines.options.host_memory import LINK_SPEEDS

PROGRAM = """%body (p: f32[8]) -> f32[8] {
  %dot.0 = f32[8] dot(%p), backend_config={"estimated_cycles":"500"}
  %dynamic-slice-start.1 = (f32[8]) dynamic-slice-start(%stack)
  %dot.1 = f32[8] dot(%dot.0), backend_config={"estimated_cycles":"1000"}
  %call.1 = f32[8] custom-call(%dot.1), backend_config={"estimated_cycles":"9223372036854775807"}
  %dot.2 = f32[8] dot(%call.1), backend_config={"estimated_cycles":"2000"}
  %dynamic-slice-done.1 = f32[8] dynamic-slice-done(%dynamic-slice-start.1)
  ROOT %dot.3 = f32[8] dot(%dot.2), backend_config={"estimated_cycles":"500"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %dot.9 = f32[8] dot(%p), backend_config={"estimated_cycles":"7000"}
}
"""


def test_the_window_of_a_fetch_is_the_compute_between_its_start_and_its_end():
    assert host_link._window_us(PROGRAM, 1e9) == (3.0, 4.0)
    assert host_link._window_us("ENTRY %main { }", 1e9) == (0.0, 0.0)


def test_rows_say_the_bandwidth_or_that_there_is_none():
    row = host_link.Row("v6e:1x1", "", "ok", 3e6, 300.0, 900.0, 28.8e9, {})
    assert "default: 10.0 GB/s; planned 28.8 GB/s" in str(row)
    assert "default: unknown, the fetch starts with the iteration" in str(dataclasses.replace(row, us=899.0))
    assert "error, no compute" in str(dataclasses.replace(row, us=0.0, kind="error"))


def test_rows_replace_older_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(host_link, "PATH", tmp_path / "rows.json")
    row = host_link.Row("v6e:1x1", "", "ok", 3e6, 300.0, 900.0, 28.8e9, {})
    for each in (row, dataclasses.replace(row, value="1"), dataclasses.replace(row, us=1.0)):
        host_link.save(each)
    assert [(r.value, r.us) for r in host_link.stored()] == [("1", 300.0), ("", 1.0)]


def test_other_machines_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_link.py", "v6e:2x4"])
    with pytest.raises(SystemExit):
        host_link.main()
    assert "no machine v6e:2x4; choose from v4:1x1x1" in capsys.readouterr().err


def test_the_sets_lie_between_what_the_scheduler_and_the_planner_expect():
    at = {row.value: row for row in host_link.stored() if row.target.startswith("v6e")}
    fastest = at["1"].bytes / at["1"].us * 1e6
    default = at[""].bytes / at[""].us * 1e6
    for options in LINK_SPEEDS.values():
        assert default < float(options[host_link.LINK_SPEED]) * fastest < at["1"].planned


def test_a_compiler_without_the_option_is_no_figure(monkeypatch):
    found = SimpleNamespace(kind="ok", text=PROGRAM, versions={}, dropped=[host_link.LINK_SPEED])
    monkeypatch.setattr(host_link, "compile_job", lambda job: found)
    monkeypatch.setattr(host_link, "PRODUCTS", 2)
    assert "option refused, no compute" in str(host_link.measured("v6e:1x1", "1"))
