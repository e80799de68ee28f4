"""GKE: a JobSet, or a workload of xpk where that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import PurePosixPath

from autoshard._processes import COORDINATOR_PORT, EXIT_RESTART, RESTARTS
from autoshard.errors import ConfigError
from autoshard.launch.constants import GKE_GPUS, GKE_TPUS, MAX_RESTARTS, SAVE_S, XPK_TPUS
from autoshard.launch.job import Job
from autoshard.launch.machine import Machine
from autoshard.launch.rendering import render
from autoshard.launch.volume import check_outlives


def show(job: Job, image: str) -> str:
    """Return the manifest of the JobSet.

    Args:
        job: The job, with a machine.
        image: Container image in which `autoshard` is installed.

    Raises:
        ConfigError: No machine is given, GKE does not have it, or the run's folder does not outlive a host.
    """
    machine = _machine(job)
    check_outlives(PurePosixPath(job.run_dir), job.volume, "gke")
    return render(
        "jobset.yaml.j2",
        job=job,
        image=image,
        machine=machine,
        accelerator=(GKE_TPUS | GKE_GPUS)[machine.chip],
        max_restarts=MAX_RESTARTS,
        save_s=SAVE_S,
        port=COORDINATOR_PORT,
        restarts=RESTARTS,
    )


def xpk_command(job: Job, image: str, cluster: str) -> list[str]:
    """Return the command line of xpk for a job on TPUs.

    Raises:
        ConfigError: A volume is given, but xpk attaches its own; or GKE does not have the machine.
    """
    machine = _machine(job)
    if job.volume is not None:
        raise ConfigError("--volume: xpk mounts what `xpk storage attach` attached to the cluster; leave it out")
    return [
        "xpk", "workload", "create", "--workload", job.name, "--cluster", cluster, "--docker-image", image,
        "--tpu-type", f"{XPK_TPUS.get(machine.chip, machine.chip)}-{machine.topology}",
        "--num-slices", str(machine.slices), "--max-restarts", str(MAX_RESTARTS),
        "--restart-on-exit-codes", str(EXIT_RESTART),  # besides those above 128
        "--termination-grace-period-seconds", str(SAVE_S),
        *(part for name, value in job.env.items() for part in ("--env", f"{name}={value}")),
        "--command", job.shell_command,
    ]  # fmt: skip


def uses_xpk(job: Job, cluster: str | None) -> bool:
    """Return whether xpk submits the job: xpk is installed, a cluster is named, and the machine is a TPU."""
    return cluster is not None and _machine(job).platform == "tpu" and shutil.which("xpk") is not None


def submit(job: Job, image: str, cluster: str | None) -> int:
    """Submit the job; return the exit code of xpk or kubectl."""
    if cluster is not None and uses_xpk(job, cluster):
        return subprocess.run(xpk_command(job, image, cluster), check=False).returncode
    return subprocess.run(["kubectl", "apply", "-f", "-"], input=show(job, image), text=True, check=False).returncode


def _machine(job: Job) -> Machine:
    if job.machine is None:
        raise ConfigError("--on gke needs the machine: give --target, such as v5p:4x4x4 or h100:4x8")
    if job.machine.chip not in GKE_TPUS | GKE_GPUS:
        known = ", ".join(GKE_TPUS | GKE_GPUS)
        raise ConfigError(f"--target: GKE has no {job.machine.chip}; it has {known}")
    return job.machine
