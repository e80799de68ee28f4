"""SkyPilot: a managed job, which SkyPilot starts again when it is preempted or asks for a restart."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from autoshard._processes import EXIT_RESTART
from autoshard.errors import ConfigError
from autoshard.launch.constants import SKYPILOT_GPUS, SKYPILOT_TPU_CORES, SKYPILOT_TPUS
from autoshard.launch.job import Job
from autoshard.launch.rendering import render
from autoshard.launch.volume import check_outlives


def show(job: Job, image: str | None) -> str:
    """Return the task's YAML.

    Args:
        job: The job, with a machine.
        image: Container image in which `autoshard` is installed; None installs it on the machine.

    Raises:
        ConfigError: No machine is given, or the run's folder does not outlive a machine.
    """
    check_outlives(PurePosixPath(job.run_dir), job.volume, "skypilot")
    return render("skypilot.yaml.j2", job=job, image=image, accelerators=accelerators(job), exit_restart=EXIT_RESTART)


def accelerators(job: Job) -> str:
    """Return the accelerators of a node under SkyPilot's names, such as `H100:8` or `tpu-v5p-64`.

    Raises:
        ConfigError: No machine is given, or it has several slices, which SkyPilot cannot start.
    """
    machine = job.machine
    if machine is None or machine.platform == "cpu":
        raise ConfigError("--on skypilot needs the machine: give --target, such as v6e:4x4 or h100:4x8")
    if machine.platform == "cuda":
        return f"{SKYPILOT_GPUS.get(machine.chip, machine.chip.upper())}:{machine.chips_per_host}"
    if machine.slices > 1:
        raise ConfigError(f"--target: SkyPilot starts one TPU slice, not {machine.slices}: give --on gke, or one slice")
    size = machine.chips_per_slice * SKYPILOT_TPU_CORES.get(machine.chip, 1)
    return f"tpu-{SKYPILOT_TPUS.get(machine.chip, machine.chip)}-{size}"


def submit(job: Job, image: str | None) -> int:
    """Submit the managed job; return the exit code of sky."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{job.name}.yaml"
        path.write_text(show(job, image))
        return subprocess.run(["sky", "jobs", "launch", "--yes", "--name", job.name, str(path)], check=False).returncode
