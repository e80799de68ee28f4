"""Compiles one program for a machine that need not be attached. Runs as a script in a process of its own.

    python compiler_process.py JOB OUT

libtpu takes a lock, reads its environment once and can crash, so only this process loads it (or the CUDA plugin). It
imports nothing from autoshard. `aot_compile.compile_job` writes JOB and reads OUT.

JOB is JSON, a mapping:
    program     a serialized `jax.export.Exported` of a function of flat arguments, in base64
    platform    tpu, cuda or cpu
    topology    `v5e:4x4`, `v5p:4x4x4*2` (two slices), `v4:8x8x8` (a device is a chip: both cores together), `h100:4x8`
                (hosts x devices of a host), `cpu:8`
    mesh        axis name -> size, outermost first
    devices     for each position of the mesh, in row-major order, the number of its device in the machine's row-major
                order: slice, z, y, x, core of a TPU; host, index of a GPU
    donated     indices of the arguments whose memory the results may use; an exported program does not store them
    options     compiler options, name -> string
    dump        for `schedule`, the folder to which the compiler dumps the program; it is empty before
    until       `code`, the default, for the whole compilation, or `schedule`: a TPU's program is scheduled and its
                buffers have places, but there is no machine code for it. That takes seconds instead of minutes.

OUT gets `program.hlo.gz` (the scheduled HLO) and `result.json`:
    kind        `ok`, `oom` (the program does not fit the device: a result, not a failure) or `error`
    stage       the stage that failed: `topology`, `lower` or `compile`; empty if none did
    message     the error message; empty if there is none
    memory      bytes on one device by kind: argument, output, temp, alias, code, peak; on its host with `host_`. Empty
                without machine code
    until       `schedule` if there is no machine code, else `code`
    needed_bytes, limit_bytes   for an `oom`, the bytes that the program needs and that the device has, as reported
    coordinates for each partition of the program (its position in the mesh) the coordinates of its device: x, y, z,
                core of a TPU, and slice if there are several; slice, host, index of a GPU; number of a CPU
    dropped     options that were left out because this compiler does not know them
    added       options that were added because the compiler fails without them, as `name=value`
    seconds     time to lower and to compile
    versions    versions of jax, jaxlib and the compiler's packages
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
import threading
import time
import tomllib
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GPUS = Path(__file__).with_name("gpus.toml")
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
# One accelerator type serves every topology: the name of the topology decides what is compiled for.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "1",  # else the partitioner's remarks go to a file
    "TPU_LOG_DIR": "disabled",
}
DEVICE_COUNT = "--xla_force_host_platform_device_count"
# No device is attached to time kernels on. This also keeps XLA from looking for kernels in CUDA's libraries.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}
# Without timing, XLA 0.10 picks the first tile sizes for a matrix product, and fails if they do not fit its shape.
NO_TILES = "Couldn't find output tile sizes"
NO_TRITON_GEMM = {"xla_gpu_enable_triton_gemm": "False"}
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
SCHEDULED = ".after_optimizations.txt"  # the end of the name of the dump of a scheduled program
# The end of the name of the dump that libtpu writes after it has assigned buffers. The schedule and the memory report
# are complete then, and machine code comes next.
PLACED = ".after_optimizations_after_buffer_assignment.txt"
POLL_S = 0.05  # seconds between two checks for the dump. Source: chosen, short compared with any compilation
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(job: Path, out: Path) -> None:
    """Compile the job and write the result."""
    contents = json.loads(job.read_text())
    set_environment(contents)
    result: dict[str, Any] = {"versions": versions(), "message": "", "dropped": [], "added": [], "stage": "topology"}
    result["until"] = contents.get("until", "code")
    if result["until"] == "schedule":
        _until_scheduled(contents, result, out)
    else:
        _write(out, result, _compile(contents, result))


def _write(out: Path, result: dict[str, Any], text: str) -> None:
    if text:
        (out / "program.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    # Renamed when it is complete. With `schedule`, the compiler is still running, and a crash must not leave a partial
    # result.
    (out / "result.json.part").write_text(json.dumps(result) + "\n")
    (out / "result.json.part").rename(out / "result.json")


def _until_scheduled(job: dict[str, Any], result: dict[str, Any], out: Path) -> None:
    """Compile the job in another thread, write the first result that there is, and end the process.

    The first result is the dump of the scheduled program, or the compiler's result if it fails or finishes before. The
    process has to end because the compiler cannot be interrupted.
    """
    texts: list[str] = []
    compiler = threading.Thread(target=lambda: texts.append(_compile(job, result)), daemon=True)
    begin, code = time.perf_counter(), 1
    compiler.start()
    try:
        while compiler.is_alive() and not (placed := list(Path(job["dump"]).glob(f"*{PLACED}"))):
            compiler.join(POLL_S)
        if compiler.is_alive():
            scheduled = placed[0].with_name(placed[0].name.removesuffix(PLACED) + SCHEDULED)
            done = {"kind": "ok", "stage": "", "seconds": time.perf_counter() - begin, "memory": {}}
            _write(out, result | done, scheduled.read_text())
        else:
            _write(out, result, texts[0])
        code = 0
    finally:
        if code:
            traceback.print_exc()  # `os._exit` does not print the error
        os._exit(code)


def set_environment(job: dict[str, Any]) -> None:
    """Set the variables that JAX and libtpu read when they are loaded."""
    os.environ.update(ENVIRONMENT)
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(DEVICE_COUNT)]
    if job["platform"] == "cpu":
        flags.append(f"{DEVICE_COUNT}={len(job['devices'])}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def _compile(job: dict[str, Any], result: dict[str, Any]) -> str:
    """Compile a job, and return its text; empty after a failure. The figures go into `result`."""
    begin = time.perf_counter()
    try:
        mesh = _mesh(job)
        sliced = "*" in job["topology"]
        places = [coordinates(device, sliced=sliced) for device in mesh.devices.flat]
        result.update({"coordinates": places, "stage": "lower"})
        lowered = _lowered(job, mesh)
        result.update({"seconds_lower": time.perf_counter() - begin, "stage": "compile"})
        compiled = _compiled(lowered, _options(job), result)
    # Errors of the compiler (JaxRuntimeError) and of JAX are results. Other errors end the process with a traceback.
    except (RuntimeError, ValueError, TypeError) as error:
        result.update(_failure(str(error)) | {"seconds": time.perf_counter() - begin})
        return ""
    seconds = time.perf_counter() - begin
    result.update({"kind": "ok", "stage": "", "seconds": seconds, "memory": _memory(compiled), "until": "code"})
    return compiled.as_text()


def versions() -> dict[str, str]:
    """Versions of the installed packages that affect compilation."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _mesh(job: dict[str, Any]) -> Any:
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = sorted(_devices(job), key=device_rank)
    shape = tuple(job["mesh"].values())
    if len(devices) != len(job["devices"]):
        raise ValueError(f"{job['topology']} has {len(devices)} devices, but the mesh has {len(job['devices'])}")
    grid = np.array([devices[index] for index in job["devices"]], object).reshape(shape)
    return Mesh(grid, tuple(job["mesh"]), axis_types=(AxisType.Auto,) * len(shape))


def _devices(job: dict[str, Any]) -> Any:
    import jax
    from jax.experimental.topologies import get_topology_desc

    chip, shape = job["topology"].split(":")
    if job["platform"] == "cpu":
        return jax.devices("cpu")
    if job["platform"] == "cuda":
        grid = "x".join(["1"] * (2 - shape.count("x")) + [shape])  # slices x hosts x devices of a host
        return get_topology_desc(
            platform="cuda", topology_name=grid, topology=grid, target_config=gpu_target_config(chip)
        ).devices
    shape, _, slices = shape.partition("*")
    options: dict[str, Any] = {"num_slices": int(slices)} if slices else {}
    if chip == "v4":
        options["chip_config_name"] = "megacore"
    if set(shape.split("x")) == {"1"}:  # by default, a host has four chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    return get_topology_desc(platform="tpu", topology_name=f"{chip}:{shape}", **options).devices


def gpu_figures(chip: str) -> dict[str, Any]:
    """Return the figures of a GPU for XLA's compiler: the fields of its `gpu_device_info`, and a description.

    Raises:
        ValueError: the table has no figures of this GPU.
    """
    table = tomllib.loads(GPUS.read_text())
    if chip not in table:
        raise ValueError(
            f"no description of '{chip}' for XLA's GPU compiler in {GPUS.name}; it has "
            f"{', '.join(k for k in table if k != 'all')}"
        )
    own = table[chip]
    return table["all"] | table.get(own.pop("like", ""), {}) | own


def gpu_target_config(chip: str) -> str:
    """Describe a GPU to XLA's compiler, as the text of its `GpuTargetConfigProto`."""
    figures = gpu_figures(chip)
    major, minor = figures.pop("capability")
    description = figures.pop("description")
    lines = [f"  cuda_compute_capability {{ major: {major} minor: {minor} }}"]
    lines += [f"  {key}: {value}" for key, value in figures.items()]
    body = "\n".join(lines)
    return f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{description}"\n'


def device_rank(device: Any) -> tuple[int, ...]:
    """The sort key that numbers devices: slice, z, y, x, core of a TPU; slice, host, index of a GPU; else ids."""
    if device.platform == "tpu":
        return (getattr(device, "slice_index", 0) or 0, *reversed(device.coords), device.core_on_chip)
    return tuple(getattr(device, "coords", None) or (device.process_index, device.id))


def coordinates(device: Any, *, sliced: bool = False) -> list[int]:
    """The coordinates of a device in its machine: x, y, z, core of a TPU; slice, host, index of a GPU; else its id.

    With `sliced`, the number of its slice comes last.
    """
    core = [device.core_on_chip] if device.platform == "tpu" else []
    return [*(getattr(device, "coords", None) or [device.id]), *core, *([device.slice_index] if sliced else [])]


def _lowered(job: dict[str, Any], mesh: Any) -> Any:
    import jax
    from jax.export import deserialize

    program = deserialize(bytearray(base64.b64decode(job["program"])))

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
        return jax.tree.leaves(program.call(*args, **kwargs))

    shardings = list(program.in_shardings_jax(mesh))
    # Unused arguments are kept, so that the program's parameters correspond to the plan's inputs one to one.
    step = jax.jit(
        flat,
        in_shardings=shardings,
        out_shardings=list(program.out_shardings_jax(mesh)),
        donate_argnums=tuple(job["donated"]),
        keep_unused=True,
    )
    on_host = [getattr(s, "memory_kind", None) == "pinned_host" for s in shardings]
    return step.lower(*[
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if host else None)
        for aval, sharding, host in zip(program.in_avals, shardings, on_host, strict=True)
    ])  # fmt: skip


def _options(job: dict[str, Any]) -> dict[str, str]:
    return (GPU_OPTIONS if job["platform"] == "cuda" else {}) | dict(job["options"])


def _compiled(lowered: Any, options: dict[str, str], result: dict[str, Any]) -> Any:
    import jax

    while True:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            unknown = NO_SUCH_OPTION.search(str(error))
            if unknown and unknown[1] in options:
                result["dropped"].append(unknown[1])
                options = {name: value for name, value in options.items() if name != unknown[1]}
            elif NO_TILES in str(error) and not NO_TRITON_GEMM.keys() & options.keys():
                result["added"] += [f"{name}={value}" for name, value in NO_TRITON_GEMM.items()]
                options = options | NO_TRITON_GEMM
            else:
                raise


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
