"""Compiles programs for machines that need not be attached, in a child process, and caches the results on disk.

Only the child loads libtpu or the CUDA plugin: they take locks, read their environment once, and can crash. A program
that does not fit, a crash and a timeout are results, not exceptions. The cache is in `$AUTOSHARD_CACHE`, or else in
`autoshard/compiled` under `$XDG_CACHE_HOME` or `~/.cache`. Its keys cover the program, the machine, the options and the
versions of the compiler.
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
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit.compiler_process import GPUS, versions
from autoshard.sharding.audit.constants import MAX_TIMEOUT_S, SHOWN_CRASH_LINES, TIMEOUT_S
from autoshard.sharding.audit.device_memory import add_device_bytes, dump_flags, uses_host
from autoshard.sharding.audit.export import CompileJob

CHILD = Path(__file__).with_name("compiler_process.py")
Until = Literal["schedule", "code"]  # how far to compile
_PACKAGES = {"tpu": ("libtpu", "aot-tpu"), "cuda": ("jax_plugins.xla_cuda13", "aot-cuda")}


@shown
@dataclass(frozen=True)
class Compiled:
    """The result of compiling a program.

    Attributes:
        kind: `ok`, `oom` (the program does not fit the device), `error` (the compiler rejected it), `crash` or
            `timeout` (of the compiler).
        message: the compiler's error message; empty if `ok`.
        stage: the stage that failed: `topology`, `lower` or `compile`.
        memory: bytes on one device by kind: argument, output, temp, alias, code, peak; on its host with `host_`. For a
            program that places values there, also `device`: the size of the device's memory space, or 0 if the
            compiler does not report it.
        needed_bytes: bytes that a program with `oom` needs, as the compiler reports them.
        limit_bytes: bytes that the device has, as the compiler reports them for an `oom`.
        coordinates: the coordinates of each partition's device in the machine.
        dropped: options that were left out because this compiler does not know them.
        added: options that were added because the compiler fails without them, as `name=value`.
        seconds: compile time.
        versions: versions of the compiler's packages.
        until: `code`, or `schedule` if there is no machine code. Then `memory` has only `device`, and the program
            states no cycles.
        cached: whether the result comes from the cache.
        path: the file with the scheduled program, gzipped; None if there is none.
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
    until: Until = "code"
    cached: bool = False
    path: Path | None = None

    @cached_property
    def text(self) -> str:
        """The text of the scheduled program; empty if there is none."""
        return gzip.decompress(self.path.read_bytes()).decode() if self.path is not None else ""

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of one device, as the compiler reports it; None if it did not compile the program.

        For a program that places values in the host's memory, it is the size of the device's memory space, because the
        compiler's own peak can be that of the host's memory (`device_memory`). Where the compiler reports no peak, it
        is arguments + temporaries + results that do not use donated memory. On a TPU this sum is an upper bound: not
        all temporaries are alive at once. A program can run although the sum exceeds the device's memory.
        """
        if self.kind == "oom":
            return self.needed_bytes
        if self.kind != "ok":
            return None
        if self.until == "schedule":
            return float(self.memory["device"]) or None
        most = self.memory["argument"] + self.memory["output"] - self.memory["alias"] + self.memory["temp"]
        return float(min(self.memory.get("device") or self.memory.get("peak") or most, most))

    @property
    def host_bytes(self) -> float | None:
        """Bytes in host memory that belong to one device; None if the program has no machine code."""
        if self.kind != "ok" or self.until != "code":
            return None
        host = {kind: self.memory.get(f"host_{kind}", 0) for kind in ("argument", "output", "alias", "temp")}
        return float(host["argument"] + host["output"] - host["alias"] + host["temp"])


def missing_compiler(platform: str) -> str | None:
    """Describe what to install to compile for a platform; None if the compiler is installed."""
    if platform not in _PACKAGES:
        return None
    package, extra = _PACKAGES[platform]
    try:
        installed = find_spec(package) is not None
    except ModuleNotFoundError:
        installed = False
    return None if installed else f"the compiler for {platform} is not installed: pip install 'autoshard[{extra}]'"


def cache_folder() -> Path:
    """Return the folder of the cache of compiled programs."""
    if folder := os.environ.get("AUTOSHARD_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoshard" / "compiled"


def compile_job(
    job: CompileJob,
    timeout_s: float = TIMEOUT_S,
    cache: Path | None = None,
    dump: Path | None = None,
    until: Until = "code",
) -> Compiled:
    """Compile a job, or read its result from the cache. Failures of the compiler are results, never exceptions.

    Programs that the compiler rejects are not cached, since the reason may be temporary. Damaged cache entries are
    compiled again. If the cache cannot be written, this process uses a temporary folder and warns.

    Args:
        job: the job to compile.
        timeout_s: seconds after which the child is killed.
        cache: the folder of the cache. Default: `cache_folder()`.
        dump: a folder to which the compiler dumps the program and its reports. A cached program is not dumped.
        until: `schedule` stops libtpu when the program is scheduled and each buffer has its place. That takes seconds
            instead of minutes, and the result has no cycles. A failure of libtpu to make code is then not seen. Other
            compilers always make code.
    """
    until = until if job.platform == "tpu" else "code"
    key = environment_key() | ({"reports": "device_memory"} if uses_host(job) else {})
    key |= {"until": until} if until != "code" else {}
    cache, digest = cache or cache_folder(), job.digest(json.dumps(key, sort_keys=True))
    try:
        return _build(job, timeout_s, cache / digest, dump, until)
    except OSError as error:
        warnings.warn(
            f"compiled programs cannot be cached in {cache} ({error.strerror or error}). Set AUTOSHARD_CACHE to a "
            "writable folder.",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )
        return _build(job, timeout_s, Path(_temporary_cache().name) / digest, dump, until)


@functools.cache
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that is deleted when this process ends."""
    return tempfile.TemporaryDirectory(prefix="autoshard-")


def _build(job: CompileJob, timeout_s: float, folder: Path, dump: Path | None, until: Until) -> Compiled:
    if cached := _read_cache(folder):
        return cached
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        job_file, out = Path(scratch) / "job.json", Path(scratch) / "out"
        out.mkdir()
        needs_report = uses_host(job) or until == "schedule"
        dumped = Path(scratch) / "dump" if needs_report or dump else None  # a folder without earlier dumps
        body = asdict(job) | {"program": base64.b64encode(job.program).decode()}
        body |= {"until": until, "dump": str(dumped or "")}
        job_file.write_text(json.dumps(body, default=list))
        try:
            done = subprocess.run(  # -P: do not import modules from the child's folder
                [sys.executable, "-P", str(CHILD), str(job_file), str(out)], env=_environment(dumped),
                capture_output=True, text=True, errors="replace", timeout=min(timeout_s, MAX_TIMEOUT_S), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            message = f"the compiler was stopped after {timeout_s:g} s"
            return Compiled("timeout", message, seconds=timeout_s, until=until)
        finally:
            if dump and dumped and dumped.exists():
                shutil.copytree(dumped, dump, dirs_exist_ok=True)
        if not (out / "result.json").exists():
            last = "\n".join(done.stderr.strip().splitlines()[-SHOWN_CRASH_LINES:])
            message = f"the compiler ended with exit code {done.returncode}: {last or 'no message'}"
            return Compiled("crash", message, until=until)
        (out / "stderr.txt").write_text(done.stderr)
        if json.loads((out / "result.json").read_text())["kind"] == "error":
            return _read(out, cached=False)
        if dumped and needs_report:
            add_device_bytes(out / "result.json", dumped)
        with contextlib.suppress(OSError):  # another process has stored the same result
            out.rename(folder)
    return _read(folder, cached=False)


def _environment(dump: Path | None) -> dict[str, str]:
    """The environment of the child, with the flags for a dump to this folder."""
    flags = [os.environ.get("XLA_FLAGS", ""), *([dump_flags(dump)] if dump else [])]
    return {**os.environ, "XLA_FLAGS": " ".join(flags).strip()}


def _read_cache(folder: Path) -> Compiled | None:
    """Read a cache entry; None if there is none. A damaged one (full disk, power failure) is deleted."""
    if not folder.exists():
        return None
    try:
        result = _read(folder, cached=True)
        if result.kind == "oom" or (result.kind == "ok" and result.text and result.peak_bytes is not None):
            return result
    except (OSError, EOFError, zlib.error, LookupError, ValueError, TypeError):
        pass
    shutil.rmtree(folder)
    return None


def environment_key() -> dict[str, str]:
    """All that affects compilation besides the job: versions, XLA's and libtpu's variables, the child's code."""
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    child = hashlib.sha256(CHILD.read_bytes() + GPUS.read_bytes()).hexdigest()
    return {**versions(), **flags, "child": child}


def _read(folder: Path, cached: bool) -> Compiled:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    fields = {k: result[k] for k in Compiled.__dataclass_fields__ if k in result}
    path = folder / "program.hlo.gz"
    return Compiled(**{**fields, "cached": cached, "path": path if path.exists() else None})


def partitioner_remarks(compiled: Compiled) -> list[str]:
    """The lines of the compiler's log about tensors that the partitioner replicates in order to reshard them."""
    path = compiled.path and compiled.path.with_name("stderr.txt")
    if not path or not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [line for line in lines if "full rematerialization" in line.lower()]
