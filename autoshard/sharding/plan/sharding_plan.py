"""A plan: everything that was chosen for one program on one machine, and what it is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from jax.sharding import AbstractMesh, NamedSharding

from autoshard._shown import shown
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.plan.mesh_words import mesh_words, requested_axes
from autoshard.sharding.plan.search_record import SearchRecord
from autoshard.sharding.plan.tensors import Activation, Leaf, Padding
from autoshard.sharding.program.argument_names import ByPath
from autoshard.sharding.program.kernel_records import KernelRecord, KernelWord

FORMAT = 4  # of plans in JSON; readers accept this one only
SEQUENCE_WAYS = ("gather", "ulysses", "ring")  # of attention over a sharded sequence


@shown
@dataclass(frozen=True)
class Estimate:
    """The estimated cost of one step on one device, in microseconds and bytes.

    Attributes:
        step_time_us, compute_us, comm_us: times.
        comm_bytes: bytes that the device sends.
        peak_memory_bytes: peak memory of the device.
        memory_bytes: kind of value -> its bytes in the memory of the device.
        host_memory_bytes: peak bytes in host memory of the device's shards.
        host_traffic_bytes: bytes that the device exchanges with host memory, in both directions.
        host_us: microseconds in which the link to the host is busy.
        host_exposed_us: the part of `host_us` that compute does not hide. It is a part of `step_time_us`.
    """

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    peak_memory_bytes: float
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    host_memory_bytes: float = 0.0
    host_traffic_bytes: float = 0.0
    host_us: float = 0.0
    host_exposed_us: float = 0.0


@shown
@dataclass(frozen=True, eq=False)
class ShardingPlan:
    """A plan as data. It knows no function, no report and no compiler; `autoshard.Plan` adds them.

    Attributes:
        mesh: the abstract mesh: axis names and sizes.
        axis_rules: mesh axis -> the logical axes that it shards, in order of preference.
        storage: role (parameter, optimizer) -> further mesh axes over which it is stored, besides `axis_rules`.
        inputs: the function's inputs, in flat order.
        outputs: its results, in flat order.
        estimate: estimated time, traffic and memory.
        target: the machine it was made for.
        placing: the device assignment: mesh axis -> (dimension of the topology, devices, stride), major to minor.
        topology: the target's dimensions and their sizes, outermost first.
        links: dimension of the topology -> how its devices are joined (`ring`, `line` or `switch`) and the bytes per
            second of one link.
        traffic: collectives, the largest first: (kind, mesh axes, bytes per step, source line).
        traffic_us: for each of `traffic` its time per step and the exposed part of it, in microseconds.
        activations: the largest activations and gradients, those with the most bytes at peak memory first.
        unknown: primitives without a rule, which are replicated, with their source lines.
        notes: what the reader should know: conflicts, limits, axes whose size the mesh axes do not divide.
        padding: what padding such axes would gain, where it would gain something.
        compiler_options: options for XLA, by platform.
        requested_options: those of them that the user requested, for the platform of the target.
        fingerprint: digest of the program that the plan fits.
        chosen: the strategy that was chosen, or that was requested.
        candidates: the plans that were compared: (strategy, step time in microseconds, peak bytes).
        history: the record of the search, for each variant.
        function: the name of the function.
        arguments: the names of its positional parameters, by which reports call its arguments.
        axis_sizes: logical axis -> its size in elements.
        limit_bytes: memory limit of one device; 0 if unknown or unlimited.
        usable_bytes: the memory that its program can use without a slowdown (`memory_doubt`); 0 if there is no limit.
        host_limit_bytes: the bytes of host memory that one device may use; 0 if unknown, or if the plan uses none.
        alone: estimated cost of the same step on one device that holds everything; None if unknown.
        variant: the static keywords that were chosen among `variants=`; empty without variants. A plan that was read
            is bound to `functools.partial(fn, **plan.variant)`.
        variants: the variants that were compared: (keywords, strategy, step time in microseconds, peak bytes).
        gather: the order in which stored parameters are gathered: `prefetch` or `sequential`; empty if the compiler
            chooses it. `once` if the stages of a pipeline gather their layers once a step; `repeat` if the user
            requested that they gather them in each microbatch.
        microbatches: the number of parts of the batch over which the planned step accumulates. `bind` cuts the function
            in the same way.
        replicas: the number of groups of rows whose sums are added after the loop over microbatches.
        stages: the number of stages of the pipeline; 1 if there is none. `bind` cuts the function in the same way.
        schedule: the word of the pipeline's schedule; empty if there is none.
        allow_numerics: whether operators take sums over each microbatch in place of those over the batch. The notes
            name them.
        spread_updates: whether each device updates only some of the matrices, with optimizers such as Muon.
        overlap: the table of `overlap=`: path -> kind of collective -> "on" or "off"; empty without one.
        module_us: with such a table: module -> kind of its collectives -> their microseconds and the exposed part.
        offload: word of `offload=` -> bytes of its values in one step, before sharding; empty if the planner moves
            nothing to the host. Values of the last layer count, too, although they may stay on the device. `bind` moves
            the same values.
        kernel_blocks: shape of a call of splash attention -> its block sizes (`machines.kernel_rules`), which a bound
            plan has, too.
        sequence: mesh axis -> how attention runs over the sequence that it shards, one of `SEQUENCE_WAYS`.
        kernels: the operators that `kernels=` found in the function, replaced or left.
        kernels_word: the word of `kernels=`. `bind` replaces the same operators.
        audits: the audits of the candidates that were compiled. They are neither compared nor written to JSON.
        measured: the plans that were run, the fastest first: (strategy with its variant in parentheses, median time of
            a step in microseconds). They are neither compared nor written to JSON.
    """

    mesh: AbstractMesh
    axis_rules: Mapping[str, tuple[str, ...]]
    storage: Mapping[str, tuple[str, ...]]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    estimate: Estimate
    target: str
    placing: Mapping[str, tuple[tuple[str, int, int], ...]] = field(default_factory=dict)
    topology: tuple[tuple[str, int], ...] = ()
    links: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    traffic: tuple[tuple[str, str, float, str], ...] = ()
    traffic_us: tuple[tuple[float, float], ...] = ()
    activations: tuple[Activation, ...] = ()
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    padding: tuple[Padding, ...] = ()
    compiler_options: Mapping[str, Options] = field(default_factory=dict)
    requested_options: Options = field(default_factory=dict)
    fingerprint: str = ""
    chosen: str = ""
    candidates: tuple[tuple[str, float, float], ...] = ()
    history: tuple[SearchRecord, ...] = ()
    function: str = ""
    arguments: tuple[str, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: float = 0.0
    usable_bytes: float = 0.0
    host_limit_bytes: float = 0.0
    alone: Estimate | None = None
    variant: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[tuple[Mapping[str, Any], str, float, float], ...] = ()
    offload: Mapping[str, float] = field(default_factory=dict)
    gather: str = ""
    microbatches: int = 1
    replicas: int = 1
    stages: int = 1
    schedule: str = ""
    allow_numerics: bool = False
    spread_updates: bool = False
    overlap: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    module_us: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    kernel_blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[KernelRecord, ...] = ()
    kernels_word: KernelWord = "off"
    audits: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    measured: tuple[tuple[str, float], ...] = field(default=(), repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether the memory of a device and its share of the host's memory suffice for a step."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the peak memory of a step is within the limit."""
        return not self.limit_bytes or self.estimate.peak_memory_bytes <= self.limit_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the values in host memory are within their limit."""
        return not self.host_limit_bytes or self.estimate.host_memory_bytes <= self.host_limit_bytes

    @property
    def device_order(self) -> tuple[int, ...]:
        """For each position of the mesh, row by row, the number of its device in the target's row-major order."""
        strides = {n: math.prod(s for _, s in self.topology[i + 1 :]) for i, (n, _) in enumerate(self.topology)}
        order = [0]
        for axis in self.mesh.axis_names:
            for dim, size, stride in self.placing.get(axis, ()):
                order = [base + i * stride * strides[dim] for base in order for i in range(size)]
        return tuple(order) if len(order) == self.mesh.size else tuple(range(self.mesh.size))

    @property
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """Path of each input -> the name of the logical axis of each dimension.

        Paths begin with the name of the parameter, as printed. Those with its position, as in `inputs`, work too.
        """
        return ByPath({leaf.path: leaf.axes for leaf in self.inputs}, self.arguments)

    def shardings(self, mesh: Any) -> tuple[Any, Any]:
        """`NamedSharding`s of the flat inputs and of the flat results over a mesh of devices."""
        return (
            [_sharding(mesh, leaf) for leaf in self.inputs],
            [_sharding(mesh, leaf) for leaf in self.outputs],
        )

    def __repr__(self) -> str:
        mesh = " ".join(mesh_words(requested_axes(self.mesh)))
        return (
            f"Plan({self.chosen!r} for {self.function or '?'} on {self.target!r}, mesh {mesh or 'one device'}, "
            f"{len(self.inputs)} inputs)"
        )

    def where(self, **changes: Any) -> Self:
        """A copy of this plan with some attributes replaced."""
        return replace(self, **changes)

    def data(self) -> ShardingPlan:
        """The same plan as a plain `ShardingPlan`, without the fields and methods of a derived class."""
        return ShardingPlan(**{f.name: getattr(self, f.name) for f in fields(ShardingPlan)})


def _sharding(mesh: Any, leaf: Leaf) -> NamedSharding:
    # Not every platform has a memory that is named `device`, so the default one is not named.
    return NamedSharding(mesh, leaf.spec, memory_kind=None if leaf.memory_kind == "device" else leaf.memory_kind)
