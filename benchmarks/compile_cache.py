"""Compiles programs for machines that are not there, each once: the results are kept in `benchmarks/.cache`.

    job = job_of(step, avals, in_specs, out_specs, mesh={"data": 4, "model": 4}, topology="v5e:4x4", donated=[0])
    found = compiled(job)
    found.kind, found.text, found.memory, found.places

A job is exported here, over an abstract mesh, and compiled by `compile_child.py` in a process of its own. Its key is
the SHA-256 of all that decides what comes out: the exported program (with its source lines), topology, mesh, devices,
specs, donated arguments, options, the target's description and the versions of jax and of the compiler. That a program
does not fit, that the compiler refuses it, runs into the time limit or crashes are results; of these, the last two may
be the machine's doing and are not kept.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from compile_child import HERE, versions

CACHE = HERE / ".cache"
FORMAT = 1  # what the child writes; another number makes old results unknown
TIMEOUT_SECONDS = 600.0
Spec = Sequence[Any]  # for each dimension None, an axis or several
Kind = Literal["ok", "oom", "error", "timeout", "crash"]


@dataclass(frozen=True)
class Job:
    """A program to compile, and for what; see `compile_child.py` for each part."""

    program: bytes = field(repr=False)
    topology: str
    mesh: Mapping[str, int]
    in_specs: Sequence[Spec | None] | None = None
    out_specs: Sequence[Spec | None] | None = None
    devices: Sequence[int] | None = None
    donated: Sequence[int] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """What the result is kept under."""
        described = HERE / f"gpu_{self.topology.partition(':')[0]}.txtpb"
        parts = asdict(self) | {"program": hashlib.sha256(self.program).hexdigest(), "mesh": list(self.mesh.items())}
        parts |= {"format": FORMAT, "versions": versions(), "options": sorted(self.options.items())}
        parts["target"] = described.read_text() if described.exists() else ""
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """What came of a job.

    Attributes:
        kind: `ok`; `oom`: it does not fit, by `needed_bytes` of `limit_bytes`; `error`: the compiler refuses it;
            `timeout`, `crash`: of the process that compiles.
        cached: whether it comes from an earlier compilation.
        seconds: that compiling took.
        places: where the device of each partition stands.
        memory: the compiler's analysis, bytes of a device.
        dropped: options that this compiler does not have.
        message: the compiler's words where it was not `ok`.
    """

    kind: Kind
    cached: bool
    seconds: float
    message: str = ""
    places: Sequence[Sequence[int]] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    folder: Path | None = field(default=None, repr=False)

    @cached_property
    def text(self) -> str:
        """The scheduled HLO; empty where there is none."""
        path = self.folder and self.folder / "program.hlo.gz"
        return gzip.decompress(path.read_bytes()).decode() if path and path.exists() else ""


def job_of(
    function: Callable[..., Any],
    avals: Sequence[Any],
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    *,
    mesh: Mapping[str, int],
    topology: str,
    **more: Any,
) -> Job:
    """A job from a function of flat arguments to a tuple of results, whose constraints name the axes of `mesh`.

    Args:
        function: `(*arrays) -> tuple of arrays`.
        avals: shapes and types of the arguments.
        in_specs, out_specs: a spec for each argument and result.
        mesh: axis name -> size.
        topology: the machine.
        more: the other parts of a job.
    """
    import jax
    from jax import export
    from jax.sharding import NamedSharding, PartitionSpec

    abstract = abstract_mesh(mesh)

    def named(specs: Sequence[Spec]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(abstract, PartitionSpec(*map(_axes, spec))) for spec in specs)

    step = jax.jit(function, in_shardings=named(in_specs), out_shardings=named(out_specs))
    platform = "cuda" if (HERE / f"gpu_{topology.partition(':')[0]}.txtpb").exists() else "tpu"
    exported = export.export(step, platforms=[platform])(*avals)
    return Job(bytes(exported.serialize()), topology, dict(mesh), _plain(in_specs), _plain(out_specs), **more)


def abstract_mesh(mesh: Mapping[str, int]) -> Any:
    """The mesh that a job's constraints are stated over."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def compiled(job: Job, timeout: float = TIMEOUT_SECONDS, cache: Path = CACHE) -> Compiled:
    """What the compiler makes of a job, from the cache where it is there."""
    folder = cache / job.key
    if (folder / "result.json").exists():
        return _read(folder, cached=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="tmp") as name:
        failure = _compile(job, Path(name), timeout)
        if failure is None:
            _keep(Path(name), folder)
    return failure or _read(folder, cached=False)


def _compile(job: Job, folder: Path, timeout: float) -> Compiled | None:
    """Runs the compiler's process; a result if it failed to give one."""
    (folder / "job.pkl").write_bytes(pickle.dumps({key: getattr(job, key) for key in Job.__dataclass_fields__}))
    command = [sys.executable, str(HERE / "compile_child.py"), str(folder / "job.pkl"), str(folder)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Compiled("timeout", False, timeout, f"no result within {timeout:g} s", versions=versions())
    (folder / "job.pkl").unlink()
    if run.returncode or not (folder / "result.json").exists():
        return Compiled("crash", False, 0.0, f"exit {run.returncode}: {run.stderr[-2000:]}", versions=versions())
    return None


def _keep(source: Path, folder: Path) -> None:
    """Moves what the child wrote to its place, the result last: whoever finds it finds the rest."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == "result.json"):
        path.replace(folder / path.name)


def _read(folder: Path, cached: bool) -> Compiled:
    found = json.loads((folder / "result.json").read_text())
    places = found.pop("coordinates", [])
    known = {key: found[key] for key in Compiled.__dataclass_fields__ if key in found}
    return Compiled(**known, cached=cached, places=places, folder=folder)


def _axes(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


def _plain(specs: Sequence[Spec]) -> list[list[Any]]:
    """Specs as JSON has them."""
    return [[list(axes) if isinstance(axes, tuple) else axes for axes in spec] for spec in specs]
