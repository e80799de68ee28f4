"""The collectives that the benchmark of reductions lists, and the options that it removes."""

from types import SimpleNamespace

import reductions
from estimate_result import Traffic
from hlo_collectives import Collective


def test_large_collectives_of_a_kind_are_counted():
    sizes = [("all-reduce", 2e6), ("all-reduce", 2e6), ("all-reduce", 1e3), ("all-gather", 2e6)]
    traffic = [Traffic(Collective(kind, "c", (tuple(range(8)),), size), 1.0, 1.0, "", {}) for kind, size in sizes]
    assert reductions.parts_of(traffic) == {"all-reduce of 2.0 MB over 8": 2}


def test_reductions_are_left_to_the_sparse_cores(monkeypatch):
    given = []

    def compile_job(options):
        given.append(options)
        return SimpleNamespace(kind="error", message="")

    monkeypatch.setattr(reductions, "export_plan", lambda executable, options: options)
    monkeypatch.setattr(reductions, "compile_job", compile_job)
    for options in (reductions.OWN, reductions.SPARSE):
        reductions.compiled("tpu7x:2x2x1", "fsdp:8", options)
    own, sparse = given
    assert {*own} - {*sparse} == {*reductions._REDUCTIONS}
    assert {own[name] for name in reductions._REDUCTIONS} == {"false"}
