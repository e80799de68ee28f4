"""`autoshard launch --print`: what schedulers would get, and what wrong input gets."""

import os
import shlex
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
TEXT = "TEXT=two words, \"a\" 'b' $(HOME) \N{GRINNING FACE}\nand a line"
CASES = {
    "slurm.sh": "--on slurm --target h100:4x8 --sbatch partition=a3 --elastic --fewest-hosts 2 --coordinator 10.0.0.1",
    "slurm-nodes.sh": "--on slurm --nodes 2 --sbatch=--partition=a3 --sbatch exclusive --env",
    "gke-tpu.yaml": "--on gke --target v5p:4x4x4*2 --image registry/team/image:1 --volume runs:/data --env",
    "gke-gpu.yaml": "--on gke --target h100:2x8 --image registry/team/image:1 --volume runs:/data/runs",
    "skypilot-tpu.yaml": "--on skypilot --target v6e:4x4 --volume gs://runs:/data --env",
    "skypilot-gpu.yaml": "--on skypilot --target a100-80:4x8 --volume s3://runs:/data --image registry/team/image:1",
    "ssh.txt": "--on ssh --hosts me@one,me@two --env",
}


def arguments(case: str) -> list[str]:
    words = case.split()
    return [*words, TEXT] if words[-1] == "--env" else words


@pytest.mark.parametrize("name", CASES)
def test_what_a_scheduler_gets(name, capsys, tmp_path):
    folder = tmp_path if "slurm" in name or "skypilot" in name else Path("/data/work")
    assert main(["launch", *arguments(CASES[name]), "--folder", str(folder), "--print", *TRAIN]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "/data/work")
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
    # Stands for srun: it runs one task after the other, kills those after a failed one, and returns the highest code.
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
        env = {each["name"]: each.get("value", "") for each in container["env"]}
        assert all(isinstance(each, str) for each in env.values())
    else:
        assert read["run"].split()[:2] == ["autoshard", "train"]
        env = read.get("envs", {})
    if "--env" in CASES[name]:
        assert env["TEXT"].replace("$$", "$") == TEXT.removeprefix("TEXT=")


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
        ("--on gke --image i --target h100:2x8 -- train --run-dir r", "give --volume SOURCE:PATH, and a --run-dir in"),
        ("--on skypilot --target h100:2x8 --volume gs://b:/m -- train --run-dir r", "give a folder in '/m'"),
        ("--on gke --image i --target h100:2x8 --volume b:m -- train --run-dir r", "--volume 'b:m': write SOURCE:PATH"),
        ("--env JAX_PROCESS_ID=1 -- train --run-dir r", "--env JAX_PROCESS_ID: the launcher sets it itself"),
        ("--folder nowhere -- train --run-dir r", "--folder 'nowhere' is not a folder"),
        ("--on gke --image i --target cpu:8 -- train --run-dir r", "GKE has no cpu"),
        (
            "--on gke --image i --target v5p:4x4x4 --elastic -- train --run-dir r",
            "--elastic is for --on local or ssh or",
        ),
        (
            "--on skypilot --target v5e:4x4*2 --volume gs://b:/m -- train --run-dir /m/r",
            "SkyPilot starts one TPU slice, not 2",
        ),
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


def test_xpk_restarts_what_asks_for_it(capsys, tmp_path, monkeypatch):
    (tmp_path / "xpk").write_text("")
    (tmp_path / "xpk").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    given = "--on gke --target v5e:4x4 --image i --cluster c --print".split()
    assert main(["launch", *given, *TRAIN]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["xpk", "workload", "create"]
    assert words[words.index("--restart-on-exit-codes") + 1] == "75"
    assert main(["launch", *given, "--volume", "runs:/data", *TRAIN]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_paths_of_a_run_are_those_of_its_folder(capsys, tmp_path, monkeypatch):
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "settings.toml").write_text("steps = 7\n")
    monkeypatch.chdir(tmp_path / "work" / "sub")
    train = "-- train --config settings.toml --run-dir run".split()
    assert main(["launch", "--folder", "..", "--print", *train]) == 0
    assert "settings.toml" in capsys.readouterr().out
    assert Path.cwd() == tmp_path / "work" / "sub"
