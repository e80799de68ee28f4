"""`autoshard launch --print`: what schedulers would get, and what wrong input gets."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.launch.job import Job
from autoshard.launch.machine import machine_of
from autoshard.launch.settings import with_port

GOLDEN = Path(__file__).parent / "golden"
TRAIN = "-- train --preset quick --data text.txt --run-dir /data/runs/My_run".split()
CASES = {
    "slurm.sh": "--on slurm --target h100:4x8 --sbatch partition=a3 --elastic --fewest-hosts 2 --coordinator 10.0.0.1",
    "slurm-nodes.sh": "--on slurm --nodes 2 --sbatch=--partition=a3 --sbatch exclusive --env",
    "gke-tpu.yaml": "--on gke --target v5p:4x4x4*2 --image registry/team/image:1 --env",
    "gke-gpu.yaml": "--on gke --target h100:2x8 --image registry/team/image:1",
    "skypilot-tpu.yaml": "--on skypilot --target v6e:4x4 --env",
    "skypilot-gpu.yaml": "--on skypilot --target h100:4x8 --image registry/team/image:1",
    "ssh.txt": "--on ssh --hosts me@one,me@two --env",
}


def arguments(case: str) -> list[str]:
    words = case.split()
    return [*words, "TEXT=two words"] if words[-1] == "--env" else words


@pytest.mark.parametrize("name", CASES)
def test_what_a_scheduler_gets(name, capsys):
    assert main(["launch", *arguments(CASES[name]), "--folder", "/data/work", "--print", *TRAIN]) == 0
    printed = capsys.readouterr().out
    golden = GOLDEN / name
    if os.environ.get("AUTOSHARD_GOLDEN") == "write":  # renews the files
        golden.write_text(printed)
    assert printed == golden.read_text()


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".sh")])
def test_scripts_are_valid(name):
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [("0 0", 0, False), ("0 75", 75, True), ("75 75", 137, True), ("143 0", 143, True), ("2 75", 255, False)],
)
def test_a_slurm_job_is_queued_again_unless_there_was_an_error(codes, code, requeued, tmp_path):
    # Stands for srun: it runs one task after the other, kills those after one that failed, and returns the highest code.
    srun = """#!/bin/bash
shift; highest=0
for CODE in $CODES; do
  if [ $highest -gt 0 ]; then code=137; else CODE=$CODE "$@"; code=$?; fi
  [ $code -gt $highest ] && highest=$code
done
exit $highest
"""
    programs = {"srun": srun, "autoshard": '#!/bin/sh\nexit "$CODE"\n', "scontrol": "#!/bin/sh\ntouch requeued\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODES": codes}
    ran = subprocess.run(["bash", str(GOLDEN / "slurm-nodes.sh")], cwd=tmp_path, env=env, check=False)
    assert (ran.returncode, (tmp_path / "requeued").exists()) == (code, requeued)


def test_a_slurm_task_lets_its_process_save_after_a_signal(tmp_path):
    [line] = [line for line in (GOLDEN / "slurm.sh").read_text().splitlines() if line.startswith("task=")]
    saving = "trap 'sleep 0.3; exit 75' TERM; touch ready; while :; do sleep 0.05; done"
    task = subprocess.Popen(
        ["bash", "-c", f'{line}; exec bash -c "$task" task bash -c "$0"', saving], cwd=tmp_path, start_new_session=True
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.killpg(task.pid, signal.SIGTERM)  # as Slurm does, to every process of the task
    assert task.wait(20) == 75


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".yaml")])
def test_manifests_keep_words_and_values(name):
    read = yaml.safe_load((GOLDEN / name).read_text())
    if "gke" in name:
        [container] = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["autoshard", *TRAIN[1:], "--resume-if-started", "--max-failures", "3"]
        assert all(isinstance(each.get("value", ""), str) for each in container["env"])
    else:
        assert read["run"].split()[:2] == ["autoshard", "train"]
    if "--env" in CASES[name]:
        assert "two words" in str(read)


@pytest.mark.parametrize(
    ("target", "slices", "hosts", "per_host", "devices"),
    [
        ("v5p:4x4x4*2", 2, 32, 4, 128),
        ("v5e:2x2", 1, 1, 4, 4),
        ("v6e:1x1", 1, 1, 1, 1),
        ("tpu7x:4x4x4", 1, 16, 4, 128),
        ("h100:4x8", 1, 4, 8, 32),
        ("h100:8", 1, 1, 8, 8),
    ],
)
def test_the_hosts_of_a_target(target, slices, hosts, per_host, devices):
    machine = machine_of(target)
    assert (machine.slices, machine.hosts, machine.chips_per_host, machine.devices) == (
        slices,
        hosts,
        per_host,
        devices,
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("--processes 2", "a restart must find the run: give --run-dir"),
        ("--processes 2 -- bench", "launch starts `train`, not 'bench' after --"),
        ("--processes 0 -- train --run-dir r", "--processes is 0; it must be at least 1"),
        ("--nodes 2 -- train --run-dir r", "--nodes is for --on slurm, not for --on local"),
        ("--on ssh -- train --run-dir r", "--on ssh needs the hosts"),
        ("--on slurm -- train --run-dir r", "--on slurm needs the number of nodes"),
        (
            "--on slurm --nodes 3 --target h100:4x8 -- train --run-dir r",
            "--nodes is 3, but --target h100:4x8 has 4 hosts",
        ),
        ("--on slurm --nodes 3 --sbatch nodes=4 -- train --run-dir r", "the launcher sets it itself"),
        ("--on slurm --nodes 3 --sbatch=-N4 -- train --run-dir r", "write the long option, NAME=VALUE"),
        ("--on gke --target v5p:4x4x4 -- train --run-dir r", "--on gke needs a container image"),
        ("--on gke --image i -- train --run-dir r", "--on gke needs the machine"),
        ("--on gke --image i --target cpu:8 -- train --run-dir r", "GKE has no cpu"),
        (
            "--on gke --image i --target v5p:4x4x4 --elastic -- train --run-dir r",
            "--elastic is for --on local or ssh or",
        ),
        ("--on skypilot --target v5e:4x4*2 -- train --run-dir r", "SkyPilot starts one TPU slice, not 2"),
        ("--processes 2 --fewest-hosts 1 -- train --run-dir r", "add --elastic"),
        ("--processes 2 --elastic --fewest-hosts 3 -- train --run-dir r", "--fewest-hosts is 3, but there are 2 hosts"),
        ("--processes 2 -- train --run-dir r --resume-if-started", "--resume-if-started is added by launch"),
        ("--processes 2 -- train --run-dir r --stpes 5", "unknown option --stpes"),
        (
            "--processes 2 -- train --run-dir r --virtual-devices 2 --plan fsdp:8",
            "'fsdp:8' is for 8 devices, but the launch",
        ),
        ("--on slurm --target h100:4x8 -- train --run-dir r --plan fsdp:64", "for 64 devices, but the launch has 32"),
        ("--processes 2 --env A -- train --run-dir r", "--env 'A': write NAME=VALUE"),
        ("--name My/run --processes 2 -- train --run-dir r", "--name 'My/run': give at most 40 lower-case"),
        ("--on slurm --nodes 2 -- train --run-dir r", "--on slurm needs `sbatch`, which is not on PATH"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_starts(case, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = case.split()
    assert main(["launch", *words, *([] if "--" in words else ["--", "train"])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_names_that_schedulers_refuse(tmp_path):
    with pytest.raises(ConfigError, match="lower-case letters"):
        Job("-run", (), tmp_path, 1, 1, 3, tmp_path)


def test_addresses_have_a_port():
    assert [with_port(each) for each in ("one", "10.0.0.1:7", "[::1]")] == ["one:8476", "10.0.0.1:7", "[::1]:8476"]
