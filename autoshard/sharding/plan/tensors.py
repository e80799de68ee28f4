"""What a plan says of single arrays and axes: inputs and results, activations, and what padding an axis would win."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Leaf:
    """One input or result of the planned function: its path, type, role, logical axes and sharding."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    axes: tuple[str, ...] = ()
    role: str = ""


@shown
@dataclass(frozen=True)
class Activation(Leaf):
    """Values that a step makes and that lie alike; the path is the operator that makes the first of them.

    Attributes:
        line: the user's line of that operator.
        count: how many are made in a step.
        held_bytes: bytes of those that one device holds at the worst moment of a step.
    """

    line: str = ""
    count: float = 1.0
    held_bytes: float = 0.0

    def with_more(self, count: float, held_bytes: float) -> Activation:
        """These values and others like them."""
        return replace(self, count=self.count + count, held_bytes=self.held_bytes + held_bytes)


@shown
@dataclass(frozen=True)
class Padding:
    """What padding a logical axis that mesh axes do not divide would win: the step with it, and by which words.

    Attributes:
        axis: the logical axis.
        size: its size.
        ways: the devices that do not divide it.
        padded: the size to which it would be padded.
        words: the candidate that would be the best then.
        step_time_us: of that.
        peak_memory_bytes: of that.
    """

    axis: str
    size: int
    ways: int
    padded: int
    words: str
    step_time_us: float
    peak_memory_bytes: float
