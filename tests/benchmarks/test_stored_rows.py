"""The command line of benchmarks that compile cases and store a row for each."""

from dataclasses import dataclass, replace

import pytest
from stored_rows import run_cases, stored

CASES = [("v5e", "a"), ("v5e", "b"), ("v6e", "a")]


@dataclass(frozen=True)
class Row:
    target: str
    name: str
    time: int


def run(path, *arguments, time=1):
    """Run the command; return the cases that it compiled, and the stored rows."""
    done = []

    def compiled(target, name):
        done.append((target, name))
        return Row(target, name, time)

    def case_of(row):
        return row.target, row.name

    run_cases("About", arguments, path, Row, CASES, compiled, case_of, lambda row: replace(row, time=-row.time))
    return done, stored(path, Row)


def test_a_new_row_replaces_that_of_its_case(tmp_path):
    path = tmp_path / "rows.json"
    assert run(path) == (CASES, [Row(*case, 1) for case in CASES])
    done, rows = run(path, "v5e", time=2)
    assert done == CASES[:2]
    assert sorted((row.target, row.name, row.time) for row in rows) == [
        ("v5e", "a", 2),
        ("v5e", "b", 2),
        ("v6e", "a", 1),
    ]


def test_stored_rows_are_shown_or_predicted_without_compiling(tmp_path, capsys):
    path = tmp_path / "rows.json"
    run(path)
    capsys.readouterr()
    assert run(path, "--show") == ([], [Row(*case, 1) for case in CASES])
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)
    done, rows = run(path, "--predict", "v6e")
    assert not done and [row.time for row in rows] == [1, 1, -1]
    with pytest.raises(SystemExit):
        run(path, "--show", "--predict")
    assert "not allowed with" in capsys.readouterr().err


def test_an_unknown_target_is_an_error_that_lists_the_targets(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "rows.json", "v9")
    assert "no case is for target 'v9'; choose from v5e, v6e" in capsys.readouterr().err
