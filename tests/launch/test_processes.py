"""How processes end decides whether they start again."""

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autoshard.launch.job import Job
from autoshard.launch.processes import Supervisor

JOB = Job("job", (), Path("run"), 3, 3, 3, Path("/data"))


@dataclass
class Fake:
    """A process that ends with `code` at once, or runs until it is stopped or killed."""

    name: str
    code: int | None
    stops_with: int | None = 75

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = self.stops_with

    def kill(self) -> None:
        self.code = -9


def supervise(job: Job, attempts: Sequence[Sequence[int | None]], saved: Sequence[str] = ()) -> tuple[int, list]:
    """Return the exit code, and the hosts and restarts of each attempt; `saved` has what each attempt left behind."""
    started: list[tuple[int, int]] = []
    steps = iter(["", *saved])

    def start(hosts: int, restarts: int) -> list[Fake]:
        started.append((hosts, restarts))
        return [Fake(f"process {n}", code) for n, code in enumerate(attempts[len(started) - 1][:hosts])]

    code = Supervisor(job, start, lambda: [next(steps, "end")], failed_s=0.2, save_s=0.2).run()
    return code, started


def test_a_finished_run_is_not_started_again():
    assert supervise(JOB, [[0, 0, 0]]) == (0, [(3, 0)])


def test_a_run_that_asks_for_a_restart_gets_it(capfd):
    assert supervise(JOB, [[75, 75, 75], [0, 0, 0]], ["10"]) == (0, [(3, 0), (3, 1)])
    assert capfd.readouterr().err == "autoshard launch: the run asked for a restart; restart 1, with 3 of 3\n"


def test_an_error_is_not_repeated(capfd):
    assert supervise(JOB, [[75, 2, None]]) == (2, [(3, 0)])
    assert "process 1 ended with exit code 2, which is an error" in capfd.readouterr().err


def test_processes_that_wait_for_a_lost_one_are_ended(capfd):
    assert supervise(JOB, [[None, -9, None], [0, 0, 0]], ["10"]) == (0, [(3, 0), (3, 1)])
    assert "lost process 1; restart 1, with 3 of 3" in capfd.readouterr().err


def test_an_elastic_run_goes_on_with_what_is_left():
    job = replace(JOB, fewest_hosts=2)
    attempts = [[75, 137, 75], [-9, 75], [-9, 75], [0, 0]]
    assert supervise(job, attempts, ["1", "2", "3"]) == (0, [(3, 0), (2, 1), (2, 2), (2, 3)])


def test_processes_that_jax_aborts_are_not_lost(capfd):
    job = replace(JOB, fewest_hosts=1)
    attempts = [[-9, -6, 134], [-6, 75], [0, 0]]
    assert supervise(job, attempts, ["1", "2"]) == (0, [(3, 0), (2, 1), (2, 2)])
    assert "lost process 0; restart 1" in (said := capfd.readouterr().err) and "lost process 0; restart 2" in said


def test_attempts_that_save_nothing_come_to_an_end(capfd):
    code, started = supervise(JOB, [[75, -9, 75]] * 9, ["1", "2", "2", "2", "2"])
    assert (code, len(started)) == (75, 5)  # two that saved, and three that did not
    saves = supervise(replace(JOB, max_failures=1), [[75, -9, 75]] * 2 + [[0, 0, 0]], ["1", "2"])
    assert saves == (0, [(3, 0), (3, 1), (3, 2)])
    assert "3 attempts in a row saved no new step: the run is not started again" in capfd.readouterr().err
    assert len(supervise(replace(JOB, max_failures=0), [[75, -9, 75]] * 9 + [[0, 0, 0]], ["1"] * 9)[1]) == 10


@pytest.fixture
def default_signals():
    """Signals act as in a terminal: a shell lets its background jobs, such as these tests may be, ignore SIGINT."""
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in stops}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
@pytest.mark.parametrize("stops_with", [75, None])
def test_a_signal_stops_all_processes(number, code, stops_with):
    started: list[Fake] = []

    def start(hosts: int, restarts: int) -> list[Fake]:
        started.extend(Fake(f"process {n}", None, stops_with) for n in range(hosts))
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        return started

    before = signal.getsignal(number)
    assert Supervisor(JOB, start, list, failed_s=0.2, save_s=0.4).run() == code
    assert [fake.code for fake in started] == [-9 if stops_with is None else 75] * 3
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("stops_with", [0, 2])
def test_a_run_that_ends_by_itself_after_a_signal_keeps_its_code(stops_with):
    started: list[Fake] = []

    def start(hosts: int, restarts: int) -> list[Fake]:
        started.append(Fake("process 0", None, stops_with))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started

    assert Supervisor(JOB, start, list).run() == stops_with


@pytest.mark.usefixtures("default_signals")
def test_a_second_interrupt_kills_the_processes():
    fake = Fake("process 0", None, None)

    def start(hosts: int, restarts: int) -> list[Fake]:
        for seconds in (0.2, 0.5):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        return [fake]

    assert Supervisor(JOB, start, list).run() == 130
    assert fake.code == -9
