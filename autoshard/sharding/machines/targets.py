"""Targets: machines by name (`v5p:4x4x4`, `h100:4x8`, `v5p:8x8x8*2`), from a TOML file, or from attached devices.

A target file:

chip = "h100"                    # optional; figures that the file omits are those of this chip
memory_bytes = 85e9              # likewise any other figure of `chips.Chip`
dims = [                         # outermost first; the product of the sizes is the number of devices
{name = "host", size = 2, kind = "switch", bandwidth = 50e9, latency_us = 15},
{name = "gpu", size = 8, kind = "switch", bandwidth = 450e9, latency_us = 5},
]                                # optional: `wraps = true` for a closed ring, `each_us` (see `topology.Dim`)
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autoshard._shown import shown
from autoshard._typed import Readers, convert, fields_of, finite, short_repr
from autoshard.errors import AutoshardError
from autoshard.sharding.machines.between_slices import SLICE
from autoshard.sharding.machines.chips import ALIASES, CHIPS, STAND_INS, Chip, Platform, chip_name
from autoshard.sharding.machines.constants import CORE_LINKS, CPU_LATENCY_GROWTH, MOST_DEVICES
from autoshard.sharding.machines.device_assignments import DeviceAssignment, assign
from autoshard.sharding.machines.link_prices import LinkPrices, link_prices
from autoshard.sharding.machines.topology import Dim, Topology

__all__ = ["CHIPS", "Target", "TargetError", "chip_name", "find_target", "target_for", "write_target"]

# Attributes of a chip that a target file cannot set. They describe named targets, or the compiler.
_NOT_IN_FILES = (
    "kinds", "hides", "synchronous_gathers", "gather_dims", "keeps_gathers", "keeps_reduce_scatters", "hides_fetches",
    "options", "torus", "wraps_at", "pod", "domain", "cores",
)  # fmt: skip
_FINITE: Readers = {float: finite}


class TargetError(AutoshardError):
    """A target that does not exist or cannot be read."""


@shown
@dataclass(frozen=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: its name, or the path of its file.
        chip: the figures of one device.
        topology: how the devices are connected.
    """

    name: str
    chip: Chip
    topology: Topology

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.topology.devices

    @property
    def platform(self) -> Platform:
        """The JAX platform: tpu, cuda or cpu."""
        return self.chip.platform

    def assign(self, mesh: Mapping[str, int]) -> DeviceAssignment:
        """The default device assignment of a mesh: its last axis on the nearest devices."""
        return assign(self.topology, tuple(mesh.items()))

    @cached_property
    def link_bandwidth(self) -> float:
        """Bytes per second that one device sends over all its links to neighbours, in one direction."""
        near = [d for d in self.topology.dims if d.kind == "ring"] or [self.topology.dims[-1]]
        return sum(d.bandwidth * (2 if d.wraps else 1) for d in near if d.size > 1) or near[-1].bandwidth

    @cached_property
    def link_prices(self) -> LinkPrices:
        """What bytes on the links cost, for the strategies of operators."""
        return link_prices(self.chip.flops / self.link_bandwidth, self.topology)


def find_target(name: str) -> Target:
    """The target called `name`.

    Args:
        name: `v5p:4x4x4` (torus), `h100:4x8` (hosts x GPUs), `cpu:8`, `v5p:4x4x4*2` (two slices), or the path of a
            `.toml` file.

    Raises:
        TargetError: there is no such target, or the file cannot be read.
    """
    check_name(name)
    if name.endswith(".toml"):
        return _read(Path(name))
    name = name.strip().lower()
    word, _, written = name.partition(":")
    key = ALIASES.get(word, word)
    chip = CHIPS.get(key)
    if chip is None:
        near = difflib.get_close_matches(word, CHIPS, n=1)
        guess = f" Did you mean '{near[0]}{f':{written}' if written else ''}'?" if near else ""
        raise TargetError(
            f"target '{name}': there is no chip '{word}'.{guess} Write CHIP:SHAPE, such as v5p:4x4x4, h100:4x8 or "
            f"cpu:8, or the path of a .toml file. The chips are {', '.join(CHIPS)}"
        )
    match = re.fullmatch(r"([0-9]+(?:x[0-9]+)*)(?:\*([0-9]+))?", written)
    if not match:
        wrong = f": {written!r} is not a shape" if written else " has no shape"
        raise TargetError(f"target '{name}'{wrong}; write {_shape_text(key, chip)}")
    shape = [int(n) for n in match[1].split("x")]
    slices = int(match[2] or 1)
    if min(*shape, slices, 1) < 1:
        raise TargetError(f"target '{name}' has no devices; write sizes of at least 1")
    if math.prod(shape) * slices * chip.cores > MOST_DEVICES:
        raise TargetError(f"target '{name}' has more than {MOST_DEVICES} devices; write a smaller one")
    if chip.torus:
        if len(shape) != chip.torus:
            example = f"{key}:{'x'.join(['4'] * chip.torus)}"
            raise TargetError(f"target '{name}': {key} is a torus of {chip.torus} dimensions; write {example}")
        _check_pod(name, key, chip, shape)
        return Target(name, chip, Topology(_torus(chip, shape, slices), chip.keeps_gathers, chip.keeps_reduce_scatters))
    if len(shape) > 2:
        devices = "GPUS" if chip.platform == "cuda" else "DEVICES"
        raise TargetError(f"target '{name}' has more than two numbers; write {key}:HOSTSx{devices}")
    per_switch = shape[-1] * slices if len(shape) == 1 and shape[-1] * slices <= chip.domain else shape[-1]
    if per_switch > chip.domain:
        raise TargetError(
            f"target '{name}': one switch connects at most {chip.domain} {key}; write {key}:HOSTSx{chip.domain}"
        )
    hosts = math.prod(shape) * slices // per_switch
    return Target(name, chip, Topology(_switched(chip, hosts, per_switch)))


def check_name(name: Any) -> None:
    """Raises TargetError if the name of a target is not a string."""
    if not isinstance(name, str):
        raise TargetError(
            f"target is {short_repr(name)}; write its name as text, such as 'v5p:4x4x4', 'h100:4x8', 'cpu:8'"
        )


def _shape_text(key: str, chip: Chip) -> str:
    """How the shape of a chip's targets is written, with examples."""
    if chip.torus:
        example = f"{key}:{'x'.join(['4'] * chip.torus)}"
        return f"the sizes of the {chip.torus} dimensions of the torus, such as {example}, or {example}*2 for 2 slices"
    devices = "GPUs" if chip.platform == "cuda" else "devices"
    return f"the number of {devices}, such as {key}:8, or hosts x {devices}, such as {key}:4x8"


def _check_pod(name: str, key: str, chip: Chip, shape: Sequence[int]) -> None:
    """Raises TargetError if a slice is larger than a pod."""
    side = math.isqrt(chip.pod)
    if math.prod(shape) > chip.pod:
        largest = f"{side}x{side}" if chip.torus == 2 else f"{chip.pod} chips"
    elif chip.torus == 2 and max(shape) > side:
        largest = f"{side}x{side}"
    else:
        return
    raise TargetError(
        f"target '{name}' is larger than a pod of {key}, which is {largest}; write several slices as SHAPE*NUMBER, "
        f"such as {key}:{'x'.join([str(side if chip.torus == 2 else 16)] * chip.torus)}*2"
    )


def _torus(chip: Chip, shape: Sequence[int], slices: int) -> tuple[Dim, ...]:
    dims = [Dim(SLICE, slices, "switch", chip.network_bandwidth, chip.network_latency_us)] if slices > 1 else []
    # Outermost first: in the order of a TPU's devices, x runs fastest.
    for letter, size in reversed(list(zip("xyz", shape, strict=False))):
        wraps = size % chip.wraps_at == 0
        dims.append(Dim(letter, size, "ring", chip.link_bandwidth, chip.link_latency_us, wraps))
    if chip.cores > 1:
        dims.append(Dim("core", chip.cores, "switch", CORE_LINKS * chip.link_bandwidth, chip.link_latency_us))
    return tuple(dims)


def _switched(chip: Chip, hosts: int, per_host: int) -> tuple[Dim, ...]:
    each_us = chip.link_latency_us * CPU_LATENCY_GROWTH if chip.platform == "cpu" else 0.0
    inner = Dim("gpu" if chip.platform == "cuda" else "device", per_host, "switch", chip.link_bandwidth,
                chip.link_latency_us, each_us=each_us)  # fmt: skip
    outer = Dim("host", hosts, "switch", chip.network_bandwidth, chip.network_latency_us)
    return (outer, inner) if hosts > 1 else (inner,)


def target_for(devices: Sequence[Any], count: int) -> Target:
    """The target that attached devices form.

    GPUs have the memory that JAX can allocate (`reported_memory_bytes`), which is less than that of the chip.

    Args:
        devices: the result of `jax.devices()`.
        count: how many devices the target has. If it differs from `len(devices)`, they are assumed to form one line
            or to be on one switch.
    """
    platform, kind = devices[0].platform, devices[0].device_kind
    name = chip_name(kind) or STAND_INS.get(platform, "cpu")
    chip = CHIPS[name]
    if chip.platform == "cuda" and (reported := reported_memory_bytes(devices)):
        chip = replace(chip, memory_bytes=min(chip.memory_bytes, reported))
    if chip.torus:
        shape = _shape(devices, chip) if count == len(devices) else None
        if shape is not None:
            topology = Topology(_torus(chip, shape, 1), chip.keeps_gathers, chip.keeps_reduce_scatters)
            return Target(f"{name}:{'x'.join(map(str, shape))}", chip, topology)
        line = Dim("device", count, "ring", chip.link_bandwidth, chip.link_latency_us)
        return Target(f"{name}:{count}", chip, Topology((line,)))
    hosts = len({d.process_index for d in devices}) if count == len(devices) and platform != "cpu" else 1
    per_host = count // hosts if count % hosts == 0 else count
    text = f"{name}:{hosts}x{per_host}" if hosts > 1 else f"{name}:{count}"
    return Target(text, chip, Topology(_switched(chip, count // per_host, per_host)))


def reported_memory_bytes(devices: Sequence[Any]) -> float | None:
    """The bytes that a program can allocate on each device; None if the devices do not report it.

    On GPUs it is the part of the memory that JAX takes for itself, 75 % by default. The environment variable
    `XLA_PYTHON_CLIENT_MEM_FRACTION` sets another part.

    Args:
        devices: devices of one kind. The first one of this process reports.
    """
    for device in devices:
        if hasattr(device, "memory_stats") and device.process_index == device.client.process_index():
            limit = (device.memory_stats() or {}).get("bytes_limit")
            return None if limit is None else float(limit)
    return None


def is_made_of(target: Target, devices: Sequence[Any]) -> bool:
    """Whether a target has the platform of `devices`, and their chip if both are known."""
    device = devices[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    here, named = chip_name(device.device_kind), target.name.partition(":")[0]
    known = here is not None and named in {*CHIPS, *ALIASES}
    return target.platform == platform and (not known or ALIASES.get(named, named) == here)


def _shape(devices: Sequence[Any], chip: Chip) -> list[int] | None:
    """The shape of the torus that the devices fill; None if they have no coordinates, leave gaps, or span slices."""
    coords = [getattr(d, "coords", None) for d in devices]
    if any(c is None for c in coords) or len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        return None
    columns = list(zip(*coords, strict=True))[: chip.torus]
    shape = [max(column) - min(column) + 1 for column in columns]
    return shape if math.prod(shape) * chip.cores == len(devices) else None


def _read(path: Path) -> Target:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise TargetError(f"target '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise TargetError(f"target '{path}' is not TOML: {error}") from error
    base = data.pop("chip", None)
    dims = data.pop("dims", None)
    known = {name: kind for name, (kind, _) in fields_of(Chip).items() if name not in _NOT_IN_FILES}
    problems = [f"unknown key '{k}'; known: chip, dims, {', '.join(known)}" for k in data if k not in known]
    if base is not None and (not isinstance(base, str) or base not in CHIPS):
        problems.append(f"unknown chip {short_repr(base)}; known: {', '.join(CHIPS)}")
    figures = {k: convert(v, known[k], k, problems, _FINITE) for k, v in data.items() if k in known}
    problems += [f"{k} is {v!r}; give a positive number" for k, v in figures.items() if _is_number(v) and not v > 0]
    needed = ("platform", "flops", "memory_bytes", "memory_bandwidth")
    if base is None:
        problems += [
            f"'{k}' is missing; give it, or name a 'chip' from which to take it" for k in needed if k not in data
        ]
    machine_dims = _read_dims(dims, problems)
    if problems:
        raise TargetError(f"target '{path}': {'; '.join(problems)}")
    innermost = machine_dims[-1]
    given: dict[str, Any] = {"link_bandwidth": innermost.bandwidth, "link_latency_us": innermost.latency_us} | figures
    if base is None:
        chip = Chip(**{"flops_f32": given["flops"], "network_bandwidth": machine_dims[0].bandwidth} | given)
    else:
        chip = replace(CHIPS[base], **given)
    return Target(str(path), chip, Topology(tuple(machine_dims), chip.keeps_gathers, chip.keeps_reduce_scatters))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_dims(dims: Any, problems: list[str]) -> tuple[Dim, ...]:
    if not isinstance(dims, list) or not dims:
        problems.append("'dims' is missing: give the machine's dimensions, outermost first, such as "
                        '[{name = "gpu", size = 8, kind = "switch", bandwidth = 450e9, latency_us = 5}]')  # fmt: skip
        return ()
    before = len(problems)
    found: tuple[Dim, ...] = convert(dims, tuple[Dim, ...], "dims", problems, _FINITE)
    if len(problems) > before:
        return ()
    for n, dim in enumerate(found):
        for name, least in (("size", 1), ("latency_us", 0), ("each_us", 0)):
            if getattr(dim, name) < least:
                problems.append(f"dims[{n}].{name} is {getattr(dim, name)}; it must be at least {least}")
        if not dim.bandwidth > 0:
            problems.append(f"dims[{n}].bandwidth is {dim.bandwidth}; it must be above 0 bytes per second")
        if dim.name in [other.name for other in found[:n]]:
            problems.append(
                f"dims[{n}].name is {dim.name!r}, which another dimension has too; give each dimension its own name"
            )
    if math.prod(dim.size for dim in found) > MOST_DEVICES:
        problems.append(f"'dims' has more than {MOST_DEVICES} devices; give smaller sizes")
    return found


def write_target(target: Target, path: Path) -> None:
    """Writes a target to a file that `find_target` reads."""
    chip = target.chip
    figures = {f.name: getattr(chip, f.name) for f in fields(Chip)
               if f.name not in ("platform", *_NOT_IN_FILES)}  # fmt: skip
    lines = [f'platform = "{chip.platform}"', *(f"{k} = {v!r}" for k, v in figures.items() if v)]
    dims = [
        f'  {{name = "{d.name}", size = {d.size}, kind = "{d.kind}", bandwidth = {d.bandwidth:.6g}, '
        f"latency_us = {d.latency_us:.6g}, wraps = {str(d.wraps).lower()}, each_us = {d.each_us:.6g}}},"
        for d in target.topology.dims
    ]
    path.write_text("\n".join([*lines, "dims = [", *dims, "]", ""]))
