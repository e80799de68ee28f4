"""Exports a planned program for the compiler of another machine: StableHLO, mesh, shardings, options."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.export import DisabledSafetyCheck
from jax.export import export as export_jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.audit.compiler_process import gpu_figures
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.chips import CHIPS, Options
from autoshard.sharding.machines.targets import Target, find_target

_TRACEBACK_LIMIT = "jax_traceback_in_locations_limit"
_CUSTOM_CALL = re.compile(r"custom_call @([\w$.]+)")  # in JAX's error about custom calls


@shown
@dataclass(frozen=True)
class CompileJob:
    """One program to compile, and the machine to compile it for.

    Attributes:
        program: a serialized `jax.export.Exported` of a function of flat arguments.
        platform: tpu, cuda or cpu.
        topology: the machine, such as `v5p:4x4x4`.
        mesh: mesh axis -> size.
        devices: for each position of the mesh, in row-major order, the number of its device in the machine's row-major
            order.
        donated: indices of the arguments whose memory the results may use.
        options: compiler options.
    """

    program: bytes = field(repr=False)
    platform: str
    topology: str
    mesh: Mapping[str, int]
    devices: tuple[int, ...]
    donated: tuple[int, ...]
    options: Options = field(default_factory=dict)

    def digest(self, *more: str) -> str:
        """A digest of the job and of `more`, such as the versions of the compiler."""
        rest = [self.platform, self.topology, dict(self.mesh), self.devices, self.donated, sorted(self.options.items())]
        text = json.dumps([rest, *more], default=list).encode()
        return hashlib.sha256(self.program + text).hexdigest()[:32]


def export_plan(executable: Executable, options: Options | None = None) -> CompileJob:
    """Export a plan's program over its abstract mesh for its target's platform. Needs no device and no compiler.

    Args:
        executable: a plan with its function.
        options: compiler options. Default: the plan's options for its platform.
    """
    plan, traced = executable.plan, executable.traced
    target = find_target(plan.target)
    options = plan.compiler_options.get(target.platform, {}) if options is None else options
    mesh = _of_gpus(plan.mesh, topology_name(target)) if target.platform == "cuda" else plan.mesh
    with jax.sharding.use_abstract_mesh(mesh) if mesh is not plan.mesh else contextlib.nullcontext():
        program = export(executable.constrained_program(mesh), traced.in_avals, *plan.shardings(mesh), target.platform)
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    donated = tuple(map(int, traced.donated))
    return CompileJob(program, target.platform, topology_name(target), sizes, plan.device_order, donated, options)


def _of_gpus(mesh: Any, topology: str) -> Any:
    """Return the mesh with the kind of its GPUs: newer JAX needs it to lower Pallas kernels without an attached GPU."""
    gpu = gpu_figures(topology.partition(":")[0])
    kind = jax.sharding.AbstractDevice(device_kind=gpu["description"], num_cores=gpu["core_count"], platform="gpu")
    return mesh.update(abstract_device=kind)


def topology_name(target: Target) -> str:
    """The name of a target in one form: `v5p:4x4x4*2` (x, y, z, slices) or `h100:4x8` (hosts, devices of a host)."""
    chip = next(name for name, chip in CHIPS.items() if chip == target.chip)
    sizes = {d.name: d.size for d in target.topology.dims}
    if target.chip.torus:
        shape = "x".join(str(sizes[letter]) for letter in "xyz" if letter in sizes)
        return f"{chip}:{shape}" + (f"*{sizes['slice']}" if "slice" in sizes else "")
    return f"{chip}:{sizes.get('host', 1)}x{target.topology.dims[-1].size}"


def export(
    fn: Any, avals: Sequence[Any], in_shardings: Sequence[Any], out_shardings: Sequence[Any], platform: str
) -> bytes:
    """Export a function of flat arguments with these shardings over an abstract mesh."""
    jitted = jax.jit(lambda *leaves: fn(*leaves), in_shardings=list(in_shardings), out_shardings=list(out_shardings))
    shapes = list(map(_compat.planned_shape, avals, in_shardings))
    with innermost_frames_only():
        return _export_with_custom_calls(jitted, shapes, platform)


def _export_with_custom_calls(jitted: Any, shapes: Sequence[Any], platform: str) -> bytes:
    """Export a jitted function, custom calls without a promise of compatibility included.

    JAX refuses such calls because another version may not know them. Here the same installation compiles the program.
    JAX allows them by name only, and its error names those that are left.
    """
    allowed: set[str] = set()
    while True:
        checks = [DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return bytes(export_jax(jitted, platforms=[platform], disabled_checks=checks)(*shapes).serialize())
        except ValueError as error:
            refused = set(_CUSTOM_CALL.findall(str(error))) - allowed
            if not refused:
                raise
            allowed |= refused


@contextlib.contextmanager
def innermost_frames_only() -> Iterator[None]:
    """Export only the innermost source line of each operator, so that the bytes do not depend on the callers."""
    before = getattr(jax.config, _TRACEBACK_LIMIT)
    jax.config.update(_TRACEBACK_LIMIT, 1)
    try:
        yield
    finally:
        jax.config.update(_TRACEBACK_LIMIT, before)
