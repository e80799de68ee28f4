"""`autoshard launch`: start a run on several hosts, and start it again after a loss."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoshard.commands.arguments import parser
from autoshard.errors import ConfigError
from autoshard.launch import gke, local, skypilot, slurm, ssh
from autoshard.launch.job import Job
from autoshard.launch.machine import machine_of
from autoshard.launch.settings import process_settings
from autoshard.launch.volume import read_volume
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.train.config.command_line import option_names, parse_config
from autoshard.train.config.train_config import TrainConfig

_SUMMARY = """Start `autoshard train` on several hosts, and start it again when it asks for it.

The arguments after -- are those of `autoshard train`, with --run-dir. A run continues from its newest checkpoint after
every restart: exit code 75, a process that a signal killed, or a lost host. An error is not repeated.

  --on local      processes on this machine (the default): --processes
  --on ssh        one process on each host: --hosts
  --on slurm      a batch script, one process on each node: --nodes, --target, --sbatch
  --on gke        a JobSet, or a workload of xpk: --target, --image, --volume, --cluster
  --on skypilot   a managed job: --target, --volume, --image"""

_EXAMPLE = "autoshard launch --processes 2 -- train --preset quick --virtual-devices 4 --run-dir runs/mine"

# The options that only some launchers use.
_USES: Mapping[str, tuple[str, ...]] = {
    "processes": ("local",),
    "hosts": ("ssh",),
    "nodes": ("slurm",),
    "sbatch": ("slurm",),
    "target": ("slurm", "gke", "skypilot"),
    "image": ("gke", "skypilot"),
    "cluster": ("gke",),
    "volume": ("gke", "skypilot"),
    "coordinator": ("ssh", "slurm"),
    "elastic": ("local", "ssh", "slurm"),
    "fewest_hosts": ("local", "ssh", "slurm"),
}
_OWN_VARIABLES = frozenset(process_settings("", 1, 0, 0))
_PROGRAMS: Mapping[str, str] = {"ssh": "ssh", "slurm": "sbatch", "gke": "kubectl", "skypilot": "sky"}


def run(arguments: Sequence[str]) -> int:
    """Launch a training run; see `autoshard launch --help`.

    Returns:
        For local processes and SSH: 0 once the run is finished, 75 after SIGTERM, else the exit code of the process
        that failed. For schedulers: the exit code of the command that submits.
    """
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    given = _parser().parse_args(arguments[:cut])
    _check_options(given)
    train = _train_arguments(arguments[cut + 1 :])
    hosts = [host for host in (given.hosts or "").split(",") if host]
    job = _job(given, train, hosts)
    text = _shown(given, job, hosts)
    if given.print:
        print(text, end="")
        return 0
    program = "xpk" if given.on == "gke" and gke.uses_xpk(job, given.cluster) else _PROGRAMS.get(given.on)
    if program is not None and shutil.which(program) is None:
        raise ConfigError(f"--on {given.on} needs `{program}`, which is not on PATH: install it, or use --print")
    if given.on in ("local", "ssh"):
        return local.submit(job) if given.on == "local" else ssh.submit(job, hosts)
    if given.on == "slurm":
        return slurm.submit(job, given.sbatch)
    if given.on == "gke":
        return gke.submit(job, given.image, given.cluster)
    return skypilot.submit(job, given.image)


def _shown(given: argparse.Namespace, job: Job, hosts: Sequence[str]) -> str:
    """Return the text for `--print`: the command lines, batch script or manifest."""
    if given.on in ("local", "ssh"):
        return local.show(job) if given.on == "local" else ssh.show(job, hosts)
    if given.on == "slurm":
        return slurm.show(job, given.sbatch)
    if given.on == "gke":
        if given.cluster is not None and gke.uses_xpk(job, given.cluster):
            return shlex.join(gke.xpk_command(job, given.image, given.cluster)) + "\n"
        return gke.show(job, given.image)
    return skypilot.show(job, given.image)


def _parser() -> argparse.ArgumentParser:
    options = parser("launch", _SUMMARY, _EXAMPLE)
    options.usage = "autoshard launch [OPTIONS] -- train [OPTIONS OF TRAIN]"
    options.add_argument(
        "--on", choices=("local", *_PROGRAMS), default="local", help="where to launch (default: local)"
    )
    options.add_argument("--print", action="store_true", help="print what would be submitted, and submit nothing")
    options.add_argument("--name", help="name of the job (default: that of the run's folder)")
    options.add_argument("--processes", type=int, help="local: number of processes (default: 1)")
    options.add_argument("--hosts", metavar="A,B", help="ssh: the hosts, separated by commas; the first coordinates")
    options.add_argument("--nodes", type=int, help="slurm: number of nodes (default: the hosts of --target)")
    options.add_argument(
        "--sbatch",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="slurm: another option of sbatch; repeatable",
    )
    options.add_argument("--target", help="machine to ask for, such as v5p:4x4x4, v6e:16x16*2 or h100:4x8")
    options.add_argument("--image", help="gke, skypilot: container image in which autoshard is installed")
    options.add_argument("--cluster", help="gke: the cluster, for xpk")
    options.add_argument(
        "--volume",
        metavar="SOURCE:PATH",
        help="gke, skypilot: storage for the run's folder: a persistent volume claim, or a bucket such as gs://runs, "
        "and where it is mounted",
    )
    options.add_argument(
        "--coordinator",
        metavar="HOST[:PORT]",
        help="ssh, slurm: address of the first host on the private network (default: its name)",
    )
    options.add_argument(
        "--folder", type=Path, help="folder in which the run is started (default: this one; for gke, the image's)"
    )
    options.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="environment variable of every process; repeatable",
    )
    options.add_argument(
        "--elastic", action="store_true", help="restart on the hosts that are left, with a new plan and the same batch"
    )
    options.add_argument("--fewest-hosts", type=int, help="with --elastic: hosts that are enough (default: 1)")
    options.add_argument(
        "--max-failures",
        type=int,
        default=3,
        help="attempts in a row without a new checkpoint, after which the run gives up; 0 for no limit (default: 3)",
    )
    return options


def _check_options(given: argparse.Namespace) -> None:
    for name, launchers in _USES.items():
        option = f"--{name.replace('_', '-')}"
        if getattr(given, name) not in (None, False, []) and given.on not in launchers:
            raise ConfigError(f"{option} is for --on {' or '.join(launchers)}, not for --on {given.on}: leave it out")
    for name in ("processes", "nodes", "fewest_hosts"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    if given.max_failures < 0:
        raise ConfigError(f"--max-failures is {given.max_failures}; it must not be negative")
    if given.fewest_hosts is not None and not given.elastic:
        raise ConfigError("--fewest-hosts is for runs that restart on fewer hosts: add --elastic, or leave it out")
    if given.on == "ssh" and not given.hosts:
        raise ConfigError("--on ssh needs the hosts: give --hosts, separated by commas")
    if given.on == "gke" and not given.image:
        raise ConfigError("--on gke needs a container image in which autoshard is installed: give --image")
    if given.on == "slurm" and given.nodes is None and given.target is None:
        raise ConfigError("--on slurm needs the number of nodes: give --nodes, or --target such as h100:4x8")
    slurm.check_options(given.sbatch)


def _train_arguments(arguments: Sequence[str]) -> list[str]:
    if not arguments or arguments[0] != "train":
        what = f"not {arguments[0]!r}" if arguments else "and there is nothing"
        raise ConfigError(f"launch starts `train`, {what} after --: write `{_EXAMPLE}`")
    names = option_names(arguments)
    if "--run-dir" not in names:
        raise ConfigError("a restart must find the run: give --run-dir to train, a folder that all hosts share")
    for name in ("--resume-if-started", "--max-failures"):
        if name in names:
            raise ConfigError(f"{name} is added by launch: leave it out after --")
    return list(arguments[1:])


def _job(given: argparse.Namespace, train: Sequence[str], hosts: Sequence[str]) -> Job:
    folder = _folder(given)
    with warnings.catch_warnings(), contextlib.chdir(folder if folder.is_dir() else Path()):
        warnings.simplefilter("ignore")  # the run itself warns again
        config = parse_config(train, TrainConfig, "autoshard train", "")
    assert config.run_dir is not None
    machine = machine_of(given.target) if given.target is not None else None
    count = given.processes or len(hosts) or given.nodes or (machine.hosts if machine is not None else 1)
    if machine is not None and machine.hosts != count:
        raise ConfigError(
            f"--nodes is {count}, but --target {given.target} has {machine.hosts} hosts: give one of them"
        )
    fewest = (given.fewest_hosts or 1) if given.elastic else count
    if fewest > count:
        raise ConfigError(f"--fewest-hosts is {fewest}, but there are {count} hosts: give at most {count}")
    devices = machine.devices if machine is not None else None
    if given.on == "local" and config.virtual_devices is not None:
        devices = count * config.virtual_devices
    _check_devices(config, devices, count)
    return Job(
        name=given.name or _name_of(config.run_dir),
        train=train,
        run_dir=config.run_dir,
        hosts=count,
        fewest_hosts=fewest,
        max_failures=given.max_failures,
        folder=folder,
        machine=machine,
        coordinator=given.coordinator,
        env=_env(given.env),
        volume=read_volume(given.volume) if given.volume is not None else None,
    )


def _folder(given: argparse.Namespace) -> Path:
    """Return the folder in which the run is started; `.` is that of the image."""
    if given.folder is None:
        return Path() if given.on == "gke" else Path.cwd()
    if given.on in ("gke", "ssh"):  # a folder elsewhere
        return given.folder
    if not given.folder.is_dir():
        raise ConfigError(f"--folder {str(given.folder)!r} is not a folder: give one that exists")
    return given.folder.absolute()


def _check_devices(config: TrainConfig, devices: int | None, hosts: int) -> None:
    """Refuse a plan that needs another number of devices than there are; None is an unknown number."""
    if config.plan is None or devices is None or config.resume:
        return
    needed = parse_request(config.plan).devices
    if needed != devices:
        raise ConfigError(
            f"--plan {config.plan!r} is for {needed} devices, but the launch has {devices}, on {hosts} "
            f"host{'s' * (hosts > 1)}: change the plan, or the number of hosts"
        )


def _env(settings: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not (name.isidentifier() and name.isascii()):
            raise ConfigError(f"--env {setting!r}: write NAME=VALUE")
        if name in _OWN_VARIABLES:
            raise ConfigError(f"--env {name}: the launcher sets it itself; leave it out")
        if name in found:
            raise ConfigError(f"--env names {name!r} twice: give it once")
        found[name] = value
    return found


def _name_of(run_dir: Path) -> str:
    """Return the folder's name as one that schedulers accept."""
    name = re.sub(r"[^a-z0-9]+", "-", run_dir.name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:40].rstrip("-")
