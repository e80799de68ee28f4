"""The figures of the compiled corpus, from rows that are made up."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import plan_rows
import pytest
from bench_formulations import audited
from corpus_figures import figures
from plan_rows import Planned, Row, Store, best, measures_of

from autoshard.sharding.audit import Audit, Compiled
from autoshard.sharding.audit.traffic_diff import Unplanned
from autoshard.sharding.hlo.rematerializations import Rematerialization


def row(side, words, seconds, predicted, gib=8.0, predicted_gib=8.0, **step):
    return Row(
        side, words, words, "own", 1, {}, words, "ok", step={"cycles": seconds, **step}, peak_bytes=gib * 2**30,
        memory_bytes=gib * 2**30, limit_bytes=16 * 2**30,
        predicted={"step": predicted, "memory_bytes": predicted_gib * 2**30},
    )  # fmt: skip


def store(tmp_path, name, chosen, *rows):
    made = Store(name, "v5e:2x4", tmp_path)
    made.rows, made.notes = list(rows), {"chosen": chosen}
    return made


def test_figures_of_two_programs(tmp_path):
    one = store(
        tmp_path, "one", "fsdp:8", row("plan", "fsdp:8", 1.0, 0.9, predicted_gib=6.0), row("plan", "tp:8", 0.8, 1.0),
        row("expert", "fsdp:8", 0.5, 0.6),
    )  # fmt: skip
    other = store(tmp_path, "other", "fsdp:8", row("plan", "fsdp:8", 1.0, 1.0), row("expert", "ep:8", 2.0, 1.0))
    found = figures([one, other])
    by_cycles = found["cycles"]
    assert by_cycles["over_expert"] == {"programs": 2, "worst": 2.0, "mean": pytest.approx(1.0)}  # 2.0 and 0.5
    assert by_cycles["regret"]["median"] == pytest.approx((1.0 / 0.8 - 1) / 2)
    assert by_cycles["errors"]["tp"]["median"] == pytest.approx(0.25)
    assert by_cycles["errors"]["fsdp"]["lowest"] == pytest.approx(-0.1)
    assert by_cycles["expert_errors"]["ep"]["lowest"] == pytest.approx(-0.5)
    assert found["memory_errors"]["fsdp"]["lowest"] == pytest.approx(-0.25)
    assert found["expert_memory_errors"]["ep"]["median"] == 0.0
    assert "ep" not in by_cycles["errors"] and "ep" not in found["memory_errors"]  # only an expert's program has it


def test_the_plan_that_verification_would_choose(tmp_path):
    """The fastest schedule of the plans that may be the fastest by the estimate."""
    one = store(
        tmp_path, "one", "fsdp:8",
        row("plan", "fsdp:8", 1.0, 1.0, roofline=1.0), row("plan", "tp:8", 0.9, 1.2, roofline=0.8),
        row("plan", "cp:8", 0.5, 1.3, roofline=0.5), row("expert", "fsdp:8", 0.75, 1.0, roofline=1.0),
    )  # fmt: skip
    found = figures([one])
    assert found["cycles"]["verified_over_expert"]["worst"] == pytest.approx(0.9 / 0.75)
    assert found["roofline"]["verified_over_expert"] == {"programs": 1, "worst": 0.8, "mean": pytest.approx(0.8)}


def test_programs_that_did_not_compile_do_not_count(tmp_path):
    found = figures([store(tmp_path, "one", "fsdp:8")])
    none = {"programs": 0, "worst": None, "mean": None}
    nothing = {"over_expert": none, "verified_over_expert": none, "regret": {}, "tau": None}
    nothing |= {"errors": {}, "expert_errors": {}}
    assert found["programs"] == 1 and found["cycles"] == found["joined"] == nothing


def test_each_measure_has_its_own_best_rows(tmp_path):
    """A row without a measure does not count in it."""
    one = store(
        tmp_path, "one", "fsdp:8",
        row("plan", "fsdp:8", 1.0, 0.9, joined=0.9), row("plan", "tp:8", 1.1, 1.0, joined=0.6),
        row("expert", "fsdp:8", 2.0, 0.6, joined=1.8), row("expert", "dp:8", 0.5, 0.6),
    )  # fmt: skip
    found = figures([one])
    assert found["cycles"]["over_expert"]["worst"] == 2.0 and found["joined"]["over_expert"]["worst"] == 0.5
    assert found["cycles"]["regret"]["median"] == 0.0 and found["joined"]["regret"]["median"] == pytest.approx(0.5)
    assert found["joined"]["tau"] == -1.0  # tp is predicted as the slowest, the expert's fsdp as the fastest
    assert found["roofline"]["over_expert"]["programs"] == 0


def test_what_the_compiler_added_is_listed_with_its_cause(tmp_path):
    """An unplanned collective under 1 % of the traffic counts in the share only."""
    audit = Audit(
        "ok", wire_bytes=2.0**30,
        unplanned=(
            Unplanned("all-gather", ("fsdp",), "model.py:3 (step)", 2.0**28, 1.0, "a slice of a sharded dimension"),
            Unplanned("all-reduce", ("dp",), "model.py:4 (step)", 2.0**20, 1.0, "small"),
        ),
        remarks=(Rematerialization("f32[8,128]", 4096.0, 0.0, 0.0, "from {dp} to {fsdp}", line="model.py:5 (step)"),),
    )  # fmt: skip
    found = audited(audit)
    assert found["unplanned_share"] == pytest.approx(0.25 + 2**-10, abs=1e-4)
    assert found["unplanned"] == ["all-gather 256.0 MiB model.py:3 (step): a slice of a sharded dimension"]
    assert found["rematerializations"] == ["f32[8,128] model.py:5 (step): from {dp} to {fsdp}"]
    one, other = store(tmp_path, "one", "fsdp:8"), store(tmp_path, "other", "dp:8")
    one.notes |= {"audit": found, "idle": []}
    other.notes |= {"audit": audited(Audit("ok")), "idle": ["only 4 of the 8 devices have work of their own"]}
    assert figures([one, other, store(tmp_path, "third", "dp:8")])["audits"] == {
        "programs": 2,
        "unplanned": {one.case: found["unplanned"]},
        "rematerializations": {one.case: found["rematerializations"]},
        "idle": {other.case: other.notes["idle"]},
    }


def test_rows_without_machine_code_count_by_the_roofline(tmp_path):
    def scheduled(side, words, seconds):
        return replace(row(side, words, 0.0, 0.9), step={"roofline": seconds})

    one = store(tmp_path, "one", "fsdp:8", scheduled("plan", "fsdp:8", 1.2), scheduled("expert", "dp:8", 1.0))
    found = figures([one])
    assert found["roofline"]["over_expert"] == {"programs": 1, "worst": 1.2, "mean": pytest.approx(1.2)}
    assert found["cycles"]["over_expert"]["programs"] == 0
    assert one.rows[0].seconds == 1.2


def test_the_best_row_is_the_fastest_by_a_measure_of_all_rows(tmp_path):
    """The cycles of one program are not compared with the roofline of another. The file lists the common measures."""
    code = row("plan", "fsdp:8", 2.0, 0.9, roofline=1.0)
    scheduled = replace(row("plan", "dp:8", 0.0, 0.9), step={"roofline": 1.5})
    large = replace(row("plan", "tp:8", 0.0, 0.9, gib=17.0), step={"roofline": 0.5})
    assert best([code, scheduled, large]) == code
    assert best([code, replace(scheduled, step={"roofline": 0.9, "cycles": 3.0})]) == code
    assert best([large]) is None
    made = store(tmp_path, "one", "fsdp:8", code, scheduled)
    made.save()
    assert json.loads(made.path.read_text())["measures"] == ["roofline"]
    assert measures_of([code]) == ["cycles", "roofline"] and measures_of([]) == []


def test_a_store_of_schedules_keeps_rows_with_machine_code(tmp_path, monkeypatch):
    """A row without it is compiled again where machine code is asked for."""
    asked = []

    def compile_job(job, timeout_s, until):
        asked.append(until)
        return Compiled("oom", until=until)

    monkeypatch.setattr(plan_rows, "compile_job", compile_job)
    job = SimpleNamespace(digest=lambda more: "digest")
    made = {until: Store("one", "v5e:2x4", tmp_path, until=until) for until in ("schedule", "code")}
    for until, each in made.items():
        each.rows = [replace(row("plan", "fsdp:8", 1.0, 1.0), digest="digest", step={"roofline": 1.0})]
        found = each.finish(Planned("plan", "fsdp:8", "fsdp:8", "own", 1, None), {}, cast(Any, job))
        assert found.kind == ("ok" if until == "schedule" else "oom")
    assert asked == ["code"]
