"""The figures of the compiled corpus, from rows that are made up."""

import pytest
from corpus_figures import figures
from plan_rows import Row, Store


def row(side, words, seconds, predicted, gib=8.0, predicted_gib=8.0):
    return Row(
        side, words, words, "own", 1, {}, words, "ok", step={"cycles": seconds}, peak_bytes=gib * 2**30,
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
    assert found["over_expert"] == {"worst": 2.0, "mean": pytest.approx(1.0)}  # 2.0 and 0.5
    assert found["regret"]["median"] == pytest.approx((1.0 / 0.8 - 1) / 2)
    assert found["errors"]["tp"]["median"] == pytest.approx(0.25)
    assert found["errors"]["fsdp"]["lowest"] == pytest.approx(-0.1)
    assert found["errors"]["ep"]["lowest"] == pytest.approx(-0.5)
    assert found["memory_errors"]["fsdp"]["lowest"] == pytest.approx(-0.25)
    assert found["memory_errors"]["ep"]["median"] == 0.0


def test_programs_that_did_not_compile_do_not_count(tmp_path):
    found = figures([store(tmp_path, "one", "fsdp:8")])
    assert found["programs"] == 1 and found["over_expert"] == {"worst": None, "mean": None} and found["tau"] is None
