"""A plan: everything that was chosen for one program on one machine, and what it is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from autoshard._shown import shown
from autoshard._typed import shortly
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.plan.search_record import SearchRecord
from autoshard.sharding.plan.tensors import Activation, Leaf, Padding

if TYPE_CHECKING:
    from autoshard.sharding.audit import Audit
from autoshard.errors import PlanError

FORMAT = 4


@shown
@dataclass(frozen=True)
class Estimate:
    """What one step is expected to cost on one device: microseconds and bytes."""

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    peak_memory_bytes: float
    memory_bytes: Mapping[str, float] = field(default_factory=dict)


@shown
@dataclass(frozen=True, eq=False)
class Plan:
    """What `plan` returns.

    Attributes:
        mesh: the mesh, abstract: axis names and sizes.
        axis_rules: mesh axis -> the logical axes that it shards, in order of preference.
        storage: role (parameter, optimizer) -> mesh axes over which it is stored beyond the rules.
        inputs: the function's inputs, in flat order.
        outputs: its results, in flat order.
        estimate: expected time, traffic and memory.
        target: the machine it was made for.
        placing: mesh axis -> where it lies: (dimension of the topology, devices, stride), major to minor.
        topology: the target's dimensions and their sizes, outermost first.
        links: dimension of the topology -> how its devices are joined (`ring`, `line` or `switch`) and the bytes per
            second of one link.
        traffic: collectives, heaviest first: (kind, mesh axes, bytes a step, the user's line).
        traffic_us: for each of `traffic` its microseconds a step, and those of them that compute does not hide.
        activations: the largest values that the step makes of its batch, and gradients, largest at its worst moment
            first.
        unknown: primitives without a rule, which are replicated, and where they stand.
        notes: what the reader should know: conflicts, limits, axes that did not divide.
        padding: what padding axes that did not divide would win, where it wins anything.
        compiler_options: options for XLA, by platform.
        fingerprint: digest of the program that the plan fits.
        chosen: the words of the candidate that was chosen, or of the request.
        candidates: the plans that were compared: (words, step time in microseconds, peak bytes).
        history: the search: what was proposed, left out and priced, for each variant.
        function: the name of the function.
        axis_sizes: logical axis -> its size in elements.
        limit_bytes: what one device may hold; 0 if unknown or unlimited.
        alone: what the same step would cost on one device that holds everything; None if unknown.
        variant: the static keywords that were chosen among `variants=`, empty without such. A plan that was read is
            bound to `functools.partial(fn, **plan.variant)`.
        variants: the variants that were compared: (keywords, words of its plan, step time in microseconds, peak bytes).
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
    fingerprint: str = ""
    chosen: str = ""
    candidates: tuple[tuple[str, float, float], ...] = ()
    history: tuple[SearchRecord, ...] = ()
    function: str = ""
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: float = 0.0
    alone: Estimate | None = None
    variant: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[tuple[Mapping[str, Any], str, float, float], ...] = ()
    audits: tuple[Any, ...] = field(default=(), repr=False, compare=False)  # of the candidates that were compiled
    bound: Any = field(default=None, repr=False, compare=False)  # planner.Bound: the function and its layout

    @property
    def fits(self) -> bool:
        """Whether the worst moment of a step fits in the memory of a device."""
        return not self.limit_bytes or self.estimate.peak_memory_bytes <= self.limit_bytes

    @property
    def device_order(self) -> tuple[int, ...]:
        """For each place of the mesh, row by row, the number of its device in the target's row-major order."""
        strides = {n: math.prod(s for _, s in self.topology[i + 1 :]) for i, (n, _) in enumerate(self.topology)}
        order = [0]
        for axis in self.mesh.axis_names:
            for dim, size, stride in self.placing.get(axis, ()):
                order = [base + i * stride * strides[dim] for base in order for i in range(size)]
        return tuple(order) if len(order) == self.mesh.size else tuple(range(self.mesh.size))

    @property
    def in_specs(self) -> Any:
        """`PartitionSpec`s shaped like the arguments (a tuple, one entry for each)."""
        args, kwargs = jax.tree.unflatten(self._bound().traced.in_tree, [leaf.spec for leaf in self.inputs])
        return (*args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """`PartitionSpec`s shaped like the results."""
        return jax.tree.unflatten(self._bound().traced.out_tree, [leaf.spec for leaf in self.outputs])

    @property
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """Path of each input -> the name of the logical axis of each dimension."""
        return {leaf.path: leaf.axes for leaf in self.inputs}

    def _bound(self) -> Any:
        if self.bound is None:
            raise PlanError("this plan has no function (it was read from JSON): give it one with plan.bind(fn, *args)")
        return self.bound

    def jit(self, devices: Any = None) -> Callable[..., Any]:
        """The function, annotated and jitted over these devices (default: the attached ones)."""
        bound = self._bound()
        return bound.wrap(bound.jit(self, devices))

    def bind(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
        """This plan for a function.

        Args:
            fn: the function.
            *args: its arguments, arrays or shapes.
            **options: `donate_argnums`, `static_argnums` as for `plan`.

        Raises:
            PlanError: the function's structure or shapes are not those that the plan was made for.
        """
        from autoshard.sharding.api.entry_points import bind

        return bind(self, fn, args, **options)

    def shardings(self, mesh: Any) -> tuple[Any, Any]:
        """`NamedSharding`s of the flat inputs and of the flat results over a mesh of devices."""
        return (
            [NamedSharding(mesh, leaf.spec) for leaf in self.inputs],
            [NamedSharding(mesh, leaf.spec) for leaf in self.outputs],
        )

    def explain(self, path: str, wish: Any = None) -> str:
        """Why the input or result at `path` is sharded as it is, and what the next best choices cost.

        Args:
            path: a path, `0/params/wq`, the end of one, `wq`, or a glob, `*/mlp/*`.
            wish: how it should be sharded instead, a `PartitionSpec` or names of logical axes as in `fixed=`: whether
                that is cheaper, dearer, infeasible or a tie.

        Raises:
            PlanError: nothing is there, or the wish cannot be read.
        """
        from autoshard.sharding.report import explain

        return explain(self, path, wish)

    def diff(self, other: Plan) -> str:
        """What another plan does differently, a line each.

        Raises:
            PlanError: the other is no plan.
        """
        if not isinstance(other, Plan):
            raise PlanError(f"diff: {shortly(other)} is no plan; give one that plan(...) or Plan.from_json made")
        from autoshard.sharding.report import diff

        return diff(self, other)

    def verify(self, **options: Any) -> Audit:
        """Compiles the plan for its target, in a process of its own and with no such device, and compares.

        Args:
            **options: `timeout_s`, seconds after which the compiler is stopped; `options`, for the compiler instead of
                the plan's own.

        Raises:
            AuditError: the target's compiler is not installed, or it has none; an option that cannot be used.
        """
        from autoshard.sharding.audit import verify

        return verify(self, **options)

    def to_html(self, path: Any) -> None:
        """Writes the plan as one self-contained page."""
        from autoshard.sharding.report import to_html

        to_html(self, path)

    def __repr__(self) -> str:
        mesh = " ".join(f"{a}:{n}" for a, n in zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return (
            f"Plan({self.chosen!r} for {self.function or '?'} on {self.target!r}, mesh {mesh or 'one device'}, "
            f"{len(self.inputs)} inputs)"
        )

    def __str__(self) -> str:
        from autoshard.sharding.report import table

        return table(self)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads on any machine.

        Raises:
            PlanError: a value of its variant is of a kind that JSON does not have.
        """
        from autoshard.sharding.plan.serialization import plan_json

        return plan_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote; the plan has no function until `bind` gives it one.

        Raises:
            PlanError: the text is not a plan, or of a format that this version does not know.
        """
        from autoshard.sharding.plan.serialization import plan_from_json

        return plan_from_json(text)

    def __copy__(self) -> Plan:
        return _like(self, self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:  # the function's trace cannot be copied: it is shared
        return _like(self, {k: v if k == "bound" else deepcopy(v, memo) for k, v in self.__dict__.items()})

    def __getstate__(self) -> dict[str, Any]:  # pickled without its function, as in JSON
        return self.__dict__ | {"bound": None}

    def where(self, **changes: Any) -> Plan:
        """This plan with other attributes."""
        return replace(self, **changes)


def _like(plan: Plan, attributes: Mapping[str, Any]) -> Plan:
    """A plan with these attributes and no others, be it half-built."""
    made = object.__new__(type(plan))
    made.__dict__.update(attributes)
    return made
