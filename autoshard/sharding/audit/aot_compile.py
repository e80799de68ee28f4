"""Runs the compiler of a machine that is not there, in a child process, and keeps what it gave on disk.

Only the child loads libtpu or the CUDA plugin: they take locks, read their environment once, and can crash. A program
that does not fit, a crash and a timeout are results. Programs that were compiled before (same program, machine, options
and versions of the compiler) are read from the cache: `$AUTOSHARD_CACHE`, or `autoshard` in `$XDG_CACHE_HOME`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from autoshard._shown import shown
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit.compiler_process import GPUS, versions
from autoshard.sharding.audit.export import CompileJob

CHILD = Path(__file__).with_name("compiler_process.py")
TIMEOUT_S = 900.0
LONGEST_S = 1e6  # that a process can be waited for
_PACKAGES = {"tpu": ("libtpu", "aot-tpu"), "cuda": ("jax_plugins.xla_cuda13", "aot-cuda")}


@shown
@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program.

    Attributes:
        kind: `ok`; `oom`: it does not fit the device; `error`: the compiler refused it; `crash`, `timeout`: of it.
        message: the compiler's words where it is not ok.
        stage: what failed: `topology`, `lower` or `compile`.
        memory: bytes of a device: argument, output, temp, alias, code, peak; and the same with `host_`.
        needed_bytes: what an `oom` would take, by the compiler.
        limit_bytes: what there is, by the compiler.
        coordinates: where the device of each partition stands.
        dropped: options that this compiler does not know.
        added: options without which it fails, `name=value`.
        seconds: to compile.
        versions: of the compiler's packages.
        cached: whether it was compiled before.
        path: the scheduled program, gzipped; None if there is none.
    """

    kind: Literal["ok", "oom", "error", "crash", "timeout"]
    message: str = ""
    stage: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    coordinates: Sequence[Sequence[int]] = ()
    dropped: Sequence[str] = ()
    added: Sequence[str] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    path: Path | None = None

    @cached_property
    def text(self) -> str:
        """The scheduled program; empty if there is none."""
        return gzip.decompress(self.path.read_bytes()).decode() if self.path is not None else ""

    @property
    def peak_bytes(self) -> float | None:
        """What one device holds at most, by the compiler.

        Where it does not say: arguments, results that take no argument's memory, temporaries. That is more on a TPU,
        where not all temporaries are alive at once: programs run of which it is above what the device has.
        """
        if self.kind == "oom":
            return self.needed_bytes
        if self.kind != "ok":
            return None
        if self.memory.get("peak"):
            return float(self.memory["peak"])
        return float(self.memory["argument"] + self.memory["output"] - self.memory["alias"] + self.memory["temp"])


def missing_compiler(platform: str) -> str | None:
    """What to install to compile for a platform; None if it is there."""
    if platform not in _PACKAGES:
        return None
    package, extra = _PACKAGES[platform]
    try:
        found = find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"the compiler for {platform} is not installed: pip install 'autoshard[{extra}]'"


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    if given := os.environ.get("AUTOSHARD_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoshard" / "compiled"


def build(job: CompileJob, timeout_s: float = TIMEOUT_S, cache: Path | None = None) -> Compiled:
    """Compiles a job, or takes it from the cache. Never raises for what the compiler does.

    What does not compile is not kept: the reason may be gone next time. What was kept and cannot be read is compiled
    again. Where nothing can be kept, a folder of this process's own does, with a warning.

    Args:
        job: what to compile.
        timeout_s: seconds after which the child is killed.
        cache: the folder of compiled programs; default `cache_folder()`.
    """
    kept, digest = cache or cache_folder(), job.digest(json.dumps(_decisive(), sort_keys=True))
    try:
        return _build(job, timeout_s, kept / digest)
    except OSError as error:
        warnings.warn(
            f"compiled programs cannot be kept in {kept} ({error.strerror or error}): set AUTOSHARD_CACHE to a folder "
            "that can be written",
            AutoshardWarning,
            stacklevel=3,
        )
        return _build(job, timeout_s, Path(_own_folder().name) / digest)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when this process ends."""
    return tempfile.TemporaryDirectory(prefix="autoshard-")


def _build(job: CompileJob, timeout_s: float, folder: Path) -> Compiled:
    if found := _kept(folder):
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        given, out = Path(scratch) / "job.json", Path(scratch) / "out"
        out.mkdir()
        body = asdict(job) | {"program": base64.b64encode(job.program).decode()}
        given.write_text(json.dumps(body, default=list))
        try:
            done = subprocess.run(  # -P: the folder of the child is no place to import from
                [sys.executable, "-P", str(CHILD), str(given), str(out)],
                capture_output=True, text=True, errors="replace", timeout=min(timeout_s, LONGEST_S), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Compiled("timeout", f"the compiler was stopped after {timeout_s:g} s", seconds=timeout_s)
        if not (out / "result.json").exists():
            last = "\n".join(done.stderr.strip().splitlines()[-3:])
            return Compiled("crash", f"the compiler ended with exit code {done.returncode}: {last or 'no message'}")
        (out / "stderr.txt").write_text(done.stderr)
        if json.loads((out / "result.json").read_text())["kind"] == "error":
            return _read(out, cached=False)
        with contextlib.suppress(OSError):  # another process was faster
            out.rename(folder)
    return _read(folder, cached=False)


def _kept(folder: Path) -> Compiled | None:
    """What was compiled before; None, and nothing is left of it, if it is damaged: a full disk, a lost power supply."""
    if not folder.exists():
        return None
    try:
        found = _read(folder, cached=True)
        if found.kind == "oom" or (found.kind == "ok" and found.text and found.peak_bytes is not None):
            return found
    except (OSError, EOFError, zlib.error, LookupError, ValueError, TypeError):
        pass
    shutil.rmtree(folder)
    return None


def _decisive() -> dict[str, str]:
    """What decides how a job is compiled besides the job: versions, XLA's and libtpu's own variables, the child."""
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    child = hashlib.sha256(CHILD.read_bytes() + GPUS.read_bytes()).hexdigest()
    return {**versions(), **flags, "child": child}


def _read(folder: Path, cached: bool) -> Compiled:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    known = {k: result[k] for k in Compiled.__dataclass_fields__ if k in result}
    path = folder / "program.hlo.gz"
    return Compiled(**{**known, "cached": cached, "path": path if path.exists() else None})


def remarks(compiled: Compiled) -> list[str]:
    """What the partitioner complained about: tensors that it could only reshard by making them whole."""
    path = compiled.path and compiled.path.with_name("stderr.txt")
    if not path or not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [line for line in lines if "full rematerialization" in line.lower()]
