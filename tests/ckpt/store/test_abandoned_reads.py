"""Which tracebacks are dropped after a failed read: those of Orbax's abandoned reads, and no others."""

import inspect
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.ckpt.store import abandoned_reads

CLOSED = RuntimeError("Event loop is closed")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect what is reported, as in a process in which no read has failed."""
    seen: list[Any] = []
    monkeypatch.setattr(abandoned_reads, "_failed", False)
    monkeypatch.setattr(abandoned_reads, "_hook", None)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_value))
    logger = logging.getLogger("asyncio")
    filters = [*logger.filters]
    yield seen
    logger.filters[:] = filters


def report(error: BaseException, source: Any = None) -> None:
    unraisable: Any = SimpleNamespace(exc_value=error, object=source)
    sys.unraisablehook(unraisable)


def coroutine_in(file: str) -> Any:
    coroutine = unstarted(file, "read")
    coroutine.close()
    return coroutine


def unstarted(file: str, name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(f"async def {name}(): pass", file, "exec"), scope)
    return scope[name]()


def test_the_tracebacks_of_abandoned_reads_are_dropped_after_a_failure(reported: list[Any]) -> None:
    with pytest.raises(OSError), abandoned_reads.silenced():
        raise OSError
    for _ in range(2):
        report(CLOSED)
        report(ValueError("zarr.json does not exist"), coroutine_in("/site-packages/orbax/checkpoint/serialization.py"))
        assert reported == []
        others = [(ValueError("a"), None), (CLOSED, object()), (CLOSED, coroutine_in("/home/me/train.py"))]
        for error, source in others:
            report(error, source)
        assert [reported.pop(0) for _ in others] == [error for error, _ in others]
        with abandoned_reads.silenced():  # changes nothing
            pass


def test_a_read_that_succeeds_leaves_the_hook_of_the_user(reported: list[Any]) -> None:
    hook = sys.unraisablehook
    with abandoned_reads.silenced():
        assert sys.unraisablehook is not hook
    assert sys.unraisablehook is hook


def test_a_hook_that_is_installed_later_is_called(reported: list[Any]) -> None:
    with pytest.raises(OSError), abandoned_reads.silenced():
        raise OSError
    inner, later = sys.unraisablehook, []
    sys.unraisablehook = lambda unraisable: later.append(unraisable.exc_value) or inner(unraisable)
    with abandoned_reads.silenced():
        pass
    report(error := ValueError("a"))
    assert later == reported == [error]


def test_records_of_asyncio(reported: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError), abandoned_reads.silenced():
        raise OSError
    scope: dict[str, Any] = {}
    exec(compile("def read(): raise ValueError", "/site-packages/orbax/handlers.py", "exec"), scope)
    for function, kept in ((scope["read"], 0), (lambda: int("a"), 1)):
        caplog.clear()
        try:
            function()
        except ValueError:
            logging.getLogger("asyncio").exception("Future exception was never retrieved")
        assert len(caplog.records) == kept
    caplog.clear()
    logging.getLogger("asyncio").error("Task was destroyed but it is pending! <Task at /site-packages/orbax/a.py>")
    assert not caplog.records


@pytest.mark.filterwarnings("error")
def test_reads_that_were_not_started_are_closed_after_a_failure(reported: list[Any]) -> None:
    orbax = "/site-packages/orbax/checkpoint/handlers.py"
    reads = [unstarted(orbax, name) for name in ("read", "_async_deserialize", "_get_array_metadatas")]
    others = [unstarted(orbax, "write"), unstarted("/home/me/train.py", "read")]
    with abandoned_reads.silenced():
        pass
    assert {inspect.getcoroutinestate(one) for one in (*reads, *others)} == {inspect.CORO_CREATED}
    with pytest.raises(OSError), abandoned_reads.silenced():
        raise OSError
    assert {inspect.getcoroutinestate(one) for one in reads} == {inspect.CORO_CLOSED}
    assert {inspect.getcoroutinestate(one) for one in others} == {inspect.CORO_CREATED}
    for one in others:
        one.close()
