"""The programs of the comparison of predicted and compiled memory, and its rows."""

import jax
import peak_memory
import pytest
from plain_models import PLAIN


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_step_returns_its_state_and_a_loss(name):
    step, state, batch = PLAIN[name]("full")
    returned, loss = jax.eval_shape(step, state, *batch)
    assert loss.shape == ()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), returned) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_every_case_names_a_program():
    names = {program for program, *_ in peak_memory.CASES} - set(peak_memory.OURS)
    assert all(name.split("-")[0] == "plain" and name.split("-")[1] in PLAIN for name in names)


def test_a_number_after_a_plain_program_is_its_rows():
    _, state, batch = peak_memory.made("plain-gpt-8", "none")
    _, as_before, others = peak_memory.made("plain-gpt", "none")
    assert {x.shape[0] for x in jax.tree.leaves(batch)} == {8}
    assert {x.shape[0] for x in jax.tree.leaves(others)} == {64}
    assert jax.tree.leaves(state) == jax.tree.leaves(as_before)


def test_a_row_adds_up_memory_by_kind():
    compiled = {"argument": 4.0, "temp": 3.0, "output": 4.0, "alias": 3.0, "peak": 7.0}
    row = peak_memory.Row("a", "full", "fsdp:8", "v5e:2x4", "ok", {"parameter": 4.0, "temporary": 3.5}, compiled, 7.0)
    assert (row.total, row.upper) == (7.5, 8.0)
    assert " 1.07 " in row.text()


def test_a_stored_row_replaces_the_earlier_one_of_its_name(tmp_path):
    def row(case, predicted, kind="ok"):
        program, remat, words, targets = case
        return peak_memory.Row(program, remat, words, targets[0], kind, {"parameter": predicted}, {}, 7.0)

    file, (first, second, *_) = tmp_path / "rows.json", peak_memory.CASES
    assert peak_memory.stored(file) == []
    for each in (row(second, 1.0), row(first, 2.0), row(second, 3.0), row(("gone", "none", "dp:8", ("v5e:2x4",)), 4.0)):
        peak_memory.store(each, file)
    peak_memory.store(row(first, 5.0, "timeout"), file)
    assert peak_memory.stored(file) == [row(first, 2.0), row(second, 3.0)]
