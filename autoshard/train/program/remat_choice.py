"""A choice of what a layer does with each of its named values, and its price, computed from the prices of its parts.

The price is additive. With `full` recomputation as the base, for one strategy and one number of microbatches:

    time = time(full) - sum over kept and offloaded values of saved(value)
           + sum over offloaded values of copies(value) + exposed host time
    peak = peak(full) + sum over kept values of bytes(value) - bytes(residual), if the residual waits on the host

`saved` is the time of the recomputation that a value makes needless, minus the time to write and read the value.
`bytes` is its memory in all layers. Both come from programs that move one value each to the host (`Parts.values`). On
the way to the host and back, a value is also read and written in the memory of the device: `copies`. The link to the
host is busy with the bytes of all offloaded values, in each direction. A forward pass is a quarter of a step with full
recomputation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.policies import HOST, KEEP

RESIDUAL = "residual"
_FORWARD = 0.25  # of the compute of a step with full recomputation: forward, recomputation, and backward twice as long


@shown
@dataclass(frozen=True)
class Choice:
    """What a layer does with its named values; it recomputes all others.

    Attributes:
        host: the values that wait on the host, in the order of the layer.
        keep: the values that stay on the device. The residual always stays unless it waits on the host.
    """

    host: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    @property
    def remat(self) -> str:
        """The choice as a policy of `remat`.

        >>> Choice(host=("residual",), keep=("qkv", "out_proj")).remat
        'host:residual keep:qkv+out_proj'
        """
        groups = [f"{place}:{'+'.join(names)}" for place, names in ((HOST, self.host), (KEEP, self.keep)) if names]
        return " ".join(groups) or "full"


def choices(names: Sequence[str], host: Sequence[str], must: Sequence[str] = ()) -> Iterator[Choice]:
    """Yield every choice over some values.

    Args:
        names: the values that have an effect.
        host: those of them that may wait on the host.
        must: values that wait there in every choice.
    """
    free = [name for name in NAMED_VALUES if name in names and name not in must]
    actions = [
        [action for action in ("", KEEP, HOST) if _is_possible(name, action, host)]
        for name in free
    ]  # fmt: skip
    for chosen in itertools.product(*actions):
        of = dict(zip(free, chosen, strict=True)) | dict.fromkeys(must, HOST)
        found = {place: tuple(n for n in NAMED_VALUES if of.get(n) == place) for place in (HOST, KEEP)}
        yield Choice(found[HOST], found[KEEP])


def _is_possible(name: str, action: str, host: Sequence[str]) -> bool:
    """Whether a value can have an action. The residual stays on the device where it is not offloaded."""
    return name in host if action == HOST else name != RESIDUAL or not action


@shown
@dataclass(frozen=True)
class Part:
    """The effect of one value under a strategy.

    Attributes:
        saved_us: microseconds that a step saves if the value is kept.
        nbytes: bytes of the value in all layers and microbatches, on one device.
    """

    saved_us: float
    nbytes: float


@shown
@dataclass(frozen=True)
class Parts:
    """The prices under one strategy from which the price of any choice is computed.

    Attributes:
        full_us: microseconds of a step with full recomputation.
        full_bytes: its peak memory.
        compute_us: microseconds of its compute.
        values: named value -> its effect.
        microbatches: the number of microbatches: one of them is in memory at a time.
        host_us_per_byte: microseconds on the link to the host, in one direction.
        copy_us_per_byte: microseconds in which a transfer reads or writes a byte in the device's memory.
    """

    full_us: float
    full_bytes: float
    compute_us: float
    values: Mapping[str, Part]
    microbatches: int = 1
    host_us_per_byte: float = 0.0
    copy_us_per_byte: float = 0.0

    def price(self, choice: Choice) -> tuple[float, float, float]:
        """Return the time of a step, the peak memory, and the time on the link in one direction.

        >>> parts = Parts(1000.0, 80.0, 1000.0, {"residual": Part(0.0, 40.0), "qkv": Part(50.0, 60.0)}, 2, 5.0)
        >>> parts.price(Choice(keep=("qkv",)))
        (950.0, 110.0, 0.0)
        >>> parts.price(Choice(host=("residual",)))
        (1000.0, 60.0, 200.0)
        """
        return self.price_mix(choice, 1.0)

    def price_mix(self, choice: Choice, share: float) -> tuple[float, float, float]:
        """Return the price of a choice in which only a share of the layers offloads.

        The other layers recompute the values that the choice offloads. All layers keep the values that it keeps.

        >>> parts = Parts(1000.0, 80.0, 1000.0, {"residual": Part(0.0, 40.0), "qkv": Part(50.0, 60.0)}, 2, 5.0)
        >>> parts.price(Choice(host=("qkv",)))
        (1000.0, 80.0, 300.0)
        >>> parts.price_mix(Choice(host=("qkv",)), 0.5)
        (975.0, 80.0, 150.0)
        """
        saved = sum(self.values[name].saved_us for name in choice.keep)
        saved += share * sum(self.offload_saved_us(self.values[name]) for name in choice.host)
        kept = sum(self.values[name].nbytes for name in choice.keep)
        if RESIDUAL in choice.host:
            kept -= share * self.values[RESIDUAL].nbytes
        busy = share * sum(self.values[name].nbytes for name in choice.host) * self.host_us_per_byte
        forward = self.hidden_us
        exposed = max(busy - forward, 0.0) + max(busy - (self.compute_us - forward - saved), 0.0)
        return self.full_us - saved + exposed, self.full_bytes + kept / self.microbatches, busy

    def offload_saved_us(self, value: Part) -> float:
        """Return the microseconds that a step saves if a value is offloaded, without the time on the link."""
        return value.saved_us - 2 * value.nbytes * self.copy_us_per_byte

    def host_bytes(self, choice: Choice, share: float = 1.0) -> float:
        """Return the bytes of one microbatch that wait on the host if only a share of the layers offloads.

        >>> parts = Parts(1000.0, 80.0, 1000.0, {"residual": Part(0.0, 40.0), "qkv": Part(50.0, 60.0)}, 2, 5.0)
        >>> parts.host_bytes(Choice(host=("residual", "qkv")))
        50.0
        """
        return share * sum(self.values[name].nbytes for name in choice.host) / self.microbatches

    @property
    def hidden_us(self) -> float:
        """The time on the link in one direction that the forward pass hides."""
        return _FORWARD * self.compute_us
