"""The hosts and chips of a target, as schedulers count them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.launch.constants import CHIPS_PER_HOST
from autoshard.sharding.machines.targets import find_target


@shown
@dataclass(frozen=True)
class Machine:
    """A machine of several hosts.

    Attributes:
        chip: The chip, such as `v5p` or `h100`.
        platform: `tpu`, `cuda` or `cpu`.
        topology: The shape of a TPU slice, such as `4x4x4`; empty for others.
        slices: Number of slices; 1 for others.
        hosts_per_slice: Hosts of a slice; all hosts if there are no slices.
        chips_per_host: Chips of a host.
        devices: Number of JAX devices of all hosts together.
    """

    chip: str
    platform: str
    topology: str
    slices: int
    hosts_per_slice: int
    chips_per_host: int
    devices: int

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.slices * self.hosts_per_slice

    @property
    def chips_per_slice(self) -> int:
        """The number of chips of a slice."""
        return self.hosts_per_slice * self.chips_per_host


def machine_of(target: str) -> Machine:
    """Return the hosts of a target.

    Args:
        target: A target by name, such as `v5p:4x4x4*2` or `h100:4x8`.

    Raises:
        TargetError: There is no such target.
        ConfigError: The target is a file, which does not name a machine that a scheduler has.

    Example:
        >>> machine_of("v5p:4x4x4*2").hosts
        32
    """
    found = find_target(target)
    chip, _, shape = target.lower().partition(":")
    if not shape or shape[0] not in "0123456789":
        raise ConfigError(
            f"--target {target!r} has no name of a machine: write CHIP:SHAPE, such as v5p:4x4x4 or h100:4x8"
        )
    shape, _, slices = shape.partition("*")
    sizes = [int(size) for size in shape.split("x")]
    if found.platform == "tpu":
        chips = math.prod(sizes)
        per_host = min(chips, CHIPS_PER_HOST)
        return Machine(chip, "tpu", shape, int(slices or 1), -(-chips // per_host), per_host, found.devices)
    hosts, per_host = sizes if len(sizes) == 2 else (1, sizes[0])
    return Machine(chip, found.platform, "", 1, hosts, per_host, found.devices)
