"""What a process does with the outcomes and the leaves of other processes, which are simulated."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.ckpt.state import process_agreement, snapshot
from autoshard.ckpt.state.process_agreement import in_all_processes
from autoshard.ckpt.state.snapshot import check_same_in_all_processes, savable_leaves, take_snapshot
from autoshard.errors import CheckpointError

Answer = Callable[[str, str], list[str]]  # (subject, own text) -> the texts of all processes


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Answer], list[tuple[str, str]]]:
    """Simulate three processes in a module: each exchange is answered by a function. Returns the exchanges made."""

    def simulate(module: Any, answer: Answer) -> list[tuple[str, str]]:
        made: list[tuple[str, str]] = []

        def exchange(what: str, text: str) -> list[str]:
            made.append((what, text))
            return answer(what, text)

        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(module, "exchange", exchange)
        return made

    return simulate


def attempt(action: Callable[[], Any]) -> Any:
    return in_all_processes("save step 4", action, lambda failed: CheckpointError(f"step 4 cannot be saved: {failed}"))


def failing() -> None:
    raise CheckpointError("my disk is full")


def test_an_action_that_succeeds_everywhere_returns_its_result(processes: Any) -> None:
    made = processes(process_agreement, lambda _, text: [text, "done", "done"])
    assert attempt(lambda: 17) == 17
    assert made == [("save step 4", "done")]


def test_a_failure_in_other_processes_is_an_error_here(processes: Any) -> None:
    processes(process_agreement, lambda _, text: [text, "failed", "failed"])
    with pytest.raises(CheckpointError, match="step 4 cannot be saved: processes 1, 2 failed: see its message"):
        attempt(lambda: 17)


def test_a_failure_here_is_published_and_raised_as_it_is(processes: Any) -> None:
    made = processes(process_agreement, lambda _, text: [text, "failed", "done"])
    with pytest.raises(CheckpointError, match="my disk is full"):
        attempt(failing)
    assert made == [("save step 4", "failed")], "the other processes would wait"


def test_one_process_exchanges_nothing(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = processes(process_agreement, lambda _, text: pytest.fail(f"exchanged {text}"))
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert attempt(lambda: 17) == 17 and made == []


@pytest.fixture
def host_leaves() -> Any:
    state = {"a": np.arange(3), "text": "same", "own": 2.5}
    return take_snapshot(savable_leaves(state), copy=True)


def test_host_leaves_that_are_the_same_take_one_short_exchange(processes: Any, host_leaves: Any) -> None:
    made = processes(snapshot, lambda _, text: [text] * 3)
    check_same_in_all_processes(4, host_leaves)
    assert [what for what, _ in made] == ["compare the host leaves of step 4"]
    assert len(made[0][1]) == 64  # a hash, not the leaves


@pytest.mark.parametrize("change", ["digest", "spec", "missing"])
def test_host_leaves_that_differ_are_named(processes: Any, host_leaves: Any, change: str) -> None:
    def answer(_: str, text: str) -> list[str]:
        if not text.startswith("["):
            return [text, "another hash", text]
        leaves = json.loads(text)
        if change == "missing":
            return [text, json.dumps([leaf for leaf in leaves if leaf[0] != ["own"]]), text]
        column = {"spec": 1, "digest": 2}[change]
        for leaf in leaves:
            if leaf[0] == ["own"]:
                leaf[column] = "int32 [7]" if change == "spec" else leaf[column] + 1
        return [text, json.dumps(leaves), text]

    made = processes(snapshot, answer)
    with pytest.raises(CheckpointError, match=r"1 leaves of the state are in the memory(?s:.*)\n  own\nGather them"):
        check_same_in_all_processes(4, host_leaves)
    assert len(made) == 2


def test_one_process_compares_no_host_leaves(processes: Any, host_leaves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = processes(snapshot, lambda _, text: pytest.fail(f"exchanged {text}"))
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    check_same_in_all_processes(4, host_leaves)
    assert made == []
