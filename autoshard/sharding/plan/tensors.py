"""Single arrays and axes of a plan: inputs and results, activations, and the gain of padding an axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autoshard._shown import shown

SIZE_ONE = "1"  # in place of a logical axis: a dimension of size 1
KEY_WORDS = "-"  # in place of a logical axis: the words of a random key
NO_AXIS = (SIZE_ONE, KEY_WORDS)


@shown
@dataclass(frozen=True)
class Leaf:
    """One input or result of the planned function: path, shape, dtype, sharding, logical axes, role and memory.

    A dimension of several logical axes has their names, joined by `*`. A dimension without a logical axis has a word of
    `NO_AXIS`.

    Attributes:
        path: where it is in the arguments or results. That of an input begins with the position of its argument,
            `0/params/wq`: a plan also fits a function whose parameters have other names. Reports show the name.
        memory_kind: `device`, or `pinned_host` for host memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    axes: tuple[str, ...] = ()
    role: str = ""
    memory_kind: str = "device"


@shown
@dataclass(frozen=True)
class Activation(Leaf):
    """Values that a step computes and that have the same shape and sharding.

    The path is the operator that computes the first of them.

    Attributes:
        line: the source line of that operator.
        count: how many of them a step computes.
        held_bytes: bytes of them that one device holds at peak memory.
    """

    line: str = ""
    count: float = 1.0
    held_bytes: float = 0.0

    def with_more(self, count: float, held_bytes: float) -> Activation:
        """Adds further values with the same shape and sharding."""
        return replace(self, count=self.count + count, held_bytes=self.held_bytes + held_bytes)


@shown
@dataclass(frozen=True)
class Padding:
    """The gain of padding a logical axis that mesh axes do not divide.

    Attributes:
        axis: the logical axis.
        size: its size.
        ways: the number of shards that was wanted, which does not divide it.
        padded: the padded size.
        words: the strategy that would be best with padding.
        step_time_us: its step time, in microseconds.
        peak_memory_bytes: its peak memory per device.
    """

    axis: str
    size: int
    ways: int
    padded: int
    words: str
    step_time_us: float
    peak_memory_bytes: float
