"""Hosts over SSH, with an `ssh` that runs the command here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.errors import ConfigError
from autoshard.launch import ssh
from autoshard.launch.job import Job

SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
if grep -qx "$host" "$HERE/gone" 2>/dev/null; then exit 255; fi
exec sh -c "$*"
"""
# Stands for `autoshard`: notes its variables, then ends as the file of its host says.
AUTOSHARD = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["HERE"])
with (here / "started").open("a") as file:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "AUTOSHARD_RESTARTS")
    file.write(json.dumps([os.environ[name] for name in names] + [os.getcwd(), *sys.argv[1:]]) + "\\n")
if (here / "waits").exists():
    def stop(*_):
        (here / "stopped").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    time.sleep(60)
if os.environ["AUTOSHARD_RESTARTS"] == "0" and os.environ["JAX_PROCESS_ID"] == "1" and (here / "loses").exists():
    with (here / "gone").open("a") as file:
        file.write("two\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the two programs, first on the path."""
    for name, text in (("ssh", SSH), ("autoshard", AUTOSHARD)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "a folder").mkdir()
    return tmp_path


def job(here: Path, hosts: int = 2, fewest: int = 2) -> Job:
    return Job("job", ("--run-dir", "a run"), Path("a run"), hosts, fewest, 3, here / "a folder")


def started(here: Path) -> list[list[str]]:
    return sorted(json.loads(line) for line in (here / "started").read_text().splitlines())


def test_each_host_gets_its_place_and_the_command(here):
    assert ssh.submit(job(here), ["me@one", "two"]) == 0
    command = ["train", "--run-dir", "a run", "--resume-if-started", "--max-failures", "3"]
    folder = str(here / "a folder")
    assert started(here) == [["one:8476", "2", str(n), "0", folder, *command] for n in range(2)]


def test_an_elastic_run_restarts_on_the_hosts_that_answer(here, capfd):
    (here / "loses").touch()
    assert ssh.submit(job(here, fewest=1), ["one", "two"]) == 0
    assert [place[:4] for place in started(here)][0] == ["one:8476", "1", "0", "1"]
    assert "lost two; restart 1, with 1 of 2" in capfd.readouterr().err


def test_hosts_that_are_gone_end_the_run(here, capfd):
    (here / "gone").write_text("one\ntwo\n")
    assert ssh.submit(job(here), ["one", "two"]) == 75
    assert "3 attempts in a row saved no new step" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="none of one, two answers"):
        ssh.submit(job(here, fewest=1), ["one", "two"])


def test_an_elastic_run_needs_its_fewest_hosts(here):
    (here / "loses").touch()
    (here / "gone").write_text("three\n")
    with pytest.raises(ConfigError, match=r"--fewest-hosts is 2, but fewer hosts answer \(one\)"):
        ssh.submit(job(here, hosts=3, fewest=2), ["one", "two", "three"])


def test_a_signal_to_the_launcher_reaches_the_hosts(here):
    (here / "waits").touch()
    code = (
        "import sys, pathlib\nfrom autoshard.launch import ssh\nfrom autoshard.launch.job import Job\n"
        f"job = Job('job', (), pathlib.Path('run'), 1, 1, 3, pathlib.Path({str(here)!r}))\n"
        "sys.exit(ssh.submit(job, ['one']))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(600):
        if (here / "started").exists():
            break
        time.sleep(0.1)
    time.sleep(0.5)  # until the process has its handler
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 75
    assert (here / "stopped").exists()
