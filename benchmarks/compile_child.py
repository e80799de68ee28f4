"""Compiles one program for a machine that is not there, in a process of its own.

    python benchmarks/compile_child.py JOB OUT

libtpu takes a lock, reads its environment once and can crash, so only this process loads it (or the CUDA plugin); the
one that asks exports the program over an abstract mesh and needs neither. `compile_cache.py` writes JOB and reads OUT.

JOB, a pickle (`.pkl`) or JSON (`.json`, the program in base64), a mapping:
    program     a serialized `jax.export.Exported`, exported for "tpu" or "cuda"
    topology    `v5e:4x4`, `v4:8x8x8` (a device is a chip: both cores together), `h100:4x8` (hosts x devices of a host)
    mesh        axis name -> size, outermost first
    devices     for each position of the mesh, row by row, the index of its device in the topology; None: 0, 1, 2, ...
    in_specs    for each argument, flat, its PartitionSpec as a list: None, an axis name or a list of them for each
                dimension; None in place of a list leaves that argument's sharding as it was exported
    out_specs   the same of each result
    donated     indices of the arguments whose memory the program may use again; an export forgets them
    options     compiler options, name -> string

OUT gets `program.hlo.gz` (the scheduled HLO) and `result.json`:
    kind        `ok`, `oom` (the program does not fit the device: an answer, not a failure) or `error`
    message     the compiler's words; empty where it had no complaint
    memory      bytes of a device: argument, output, temp, alias, code, peak, and the same on its host
    needed_bytes, limit_bytes   what an `oom` would take and what there is, by the compiler
    coordinates for each partition of the program (its position in the mesh) where its device stands: x, y, z, core on
                a TPU; slice, host, index on a GPU
    dropped     options that this compiler does not have
    seconds     to lower and to compile
    versions    of jax, jaxlib and the compiler's package
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
# One accelerator type does for every topology: what is compiled for comes from the topology's name.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# There is no device to time kernels on.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}
NO_SUCH_OPTION = re.compile(r"No such compile option: '([^']+)'")
# "Used 20.01G of 15.75G hbm"; "... temporaries (20.01G) exceeds available HBM (15.75G)".
SIZES = re.compile(r"([\d.]+)([KMGT]?)\)?(?: of | exceeds available HBM \()([\d.]+)([KMGT]?)(?: hbm|\))")
OUT_OF_MEMORY = re.compile(r"out of memory (?:on|in memory space) hbm", re.IGNORECASE)
MEMORY = {
    "argument": "argument_size_in_bytes",
    "output": "output_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "alias": "alias_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(job: Path, out: Path) -> None:
    """Compiles the job and writes what came of it."""
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_", "TPU_", "LIBTPU_"))]:
        del os.environ[name]  # the job alone decides: flags meant for others would change the program
    os.environ.update(ENVIRONMENT)
    result, text = _result(read_job(job))
    if text:
        (out / "program.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    (out / "result.json").write_text(json.dumps(result) + "\n")


def read_job(path: Path) -> dict[str, Any]:
    """The job that a file holds."""
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    job = json.loads(path.read_text())
    return job | {"program": base64.b64decode(job["program"])}


def _result(job: dict[str, Any]) -> tuple[dict[str, Any], str]:
    result: dict[str, Any] = {"versions": versions(), "message": "", "dropped": []}
    begin = time.perf_counter()
    try:
        mesh = _mesh(job)
        result["coordinates"] = [_coordinates(device) for device in mesh.devices.flat]
        lowered = _lowered(job, mesh)
        result["seconds_lower"] = time.perf_counter() - begin
        begin = time.perf_counter()
        compiled = _compiled(lowered, _options(job), result["dropped"])
    except Exception as error:  # whatever the compiler says is the result
        return result | _failure(str(error)) | {"seconds": time.perf_counter() - begin}, ""
    result |= {"kind": "ok", "seconds": time.perf_counter() - begin, "memory": _memory(compiled)}
    return result, compiled.as_text()


def versions() -> dict[str, str]:
    """The packages that decide what is compiled, of those installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _mesh(job: dict[str, Any]) -> Any:
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = _topology(job["topology"])
    order = job.get("devices") or range(len(devices))
    shape = tuple(job["mesh"].values())
    grid = np.array([devices[index] for index in order], object).reshape(shape)
    return Mesh(grid, tuple(job["mesh"]), axis_types=(AxisType.Auto,) * len(shape))


def _topology(name: str) -> list[Any]:
    from jax.experimental import topologies

    chip, shape = name.split(":")
    if (target := HERE / f"gpu_{chip}.txtpb").exists():
        grid = {"topology_name": shape, "topology": f"1x{shape}", "target_config": target.read_text()}
        return topologies.get_topology_desc(platform="cuda", **grid).devices
    more = {"chip_config_name": "megacore"} if chip == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


def _coordinates(device: Any) -> list[int]:
    core = [device.core_on_chip] if device.platform == "tpu" else []
    return [*device.coords, *core]


def _lowered(job: dict[str, Any], mesh: Any) -> Any:
    import jax
    from jax.export import deserialize

    program = deserialize(bytearray(job["program"]))
    ins = _shardings(job.get("in_specs"), program.in_shardings_jax(mesh), mesh)
    outs = _shardings(job.get("out_specs"), program.out_shardings_jax(mesh), mesh)

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
        return jax.tree.leaves(program.call(*args, **kwargs))

    step = jax.jit(flat, in_shardings=ins, out_shardings=outs, donate_argnums=tuple(job.get("donated") or ()))
    return step.lower(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals])


def _shardings(specs: list[Any] | None, exported: Any, mesh: Any) -> list[Any]:
    from jax.sharding import NamedSharding, PartitionSpec

    def named(spec: Any) -> Any:
        return NamedSharding(mesh, PartitionSpec(*[tuple(axes) if isinstance(axes, list) else axes for axes in spec]))

    pairs = zip(specs or [None] * len(exported), exported, strict=True)
    return [there if spec is None else named(spec) for spec, there in pairs]


def _options(job: dict[str, Any]) -> dict[str, str]:
    base = GPU_OPTIONS if (HERE / f"gpu_{job['topology'].split(':')[0]}.txtpb").exists() else {}
    return base | dict(job.get("options") or {})


def _compiled(lowered: Any, options: dict[str, str], dropped: list[str]) -> Any:
    while True:
        try:
            return lowered.compile(compiler_options=options)
        except Exception as error:
            found = NO_SUCH_OPTION.search(str(error))
            if not found or found[1] not in options:
                raise
            dropped.append(found[1])
            options = {name: value for name, value in options.items() if name != found[1]}


def _memory(compiled: Any) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    device = {key: getattr(analysis, name, 0) for key, name in MEMORY.items()}
    return device | {f"host_{key}": getattr(analysis, f"host_{name}", 0) for key, name in MEMORY.items()}


def _failure(message: str) -> dict[str, Any]:
    if not OUT_OF_MEMORY.search(message):
        return {"kind": "error", "message": message}
    sizes = SIZES.search(message)
    pairs = [sizes.group(1, 2), sizes.group(3, 4)] if sizes else []
    needed, limit = [round(float(number) * UNITS[unit]) for number, unit in pairs] or [None, None]
    return {"kind": "oom", "message": message, "needed_bytes": needed, "limit_bytes": limit}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
