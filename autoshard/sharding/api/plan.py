"""`Plan`: what users hold. A `ShardingPlan` with its function, and the verbs that show, verify, compare and run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autoshard._shown import shown
from autoshard._typed import shortly
from autoshard.errors import PlanError
from autoshard.sharding.audit import Audit, verify
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.device_mesh import MeshLike
from autoshard.sharding.plan.serialization import plan_from_json, plan_json
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan, bound_or_error
from autoshard.sharding.planner.variants import Variants
from autoshard.sharding.report import diff, explain, table, to_html
from autoshard.sharding.runtime.plan_options import checked_options
from autoshard.sharding.runtime.planned_function import PlannedFunction


@shown
@dataclass(frozen=True, eq=False)
class Plan(ShardingPlan):
    """What `plan` returns: everything that was chosen for one program on one machine, and what can be done with it.

    Attributes:
        bound: what the plan means for its function; None where the plan was read and not yet bound. The attributes of
            `ShardingPlan` come first.
    """

    bound: BoundPlan | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, bound: BoundPlan) -> Plan:
        """The plan of a bound one."""
        return cls(**vars(bound.plan.data()), bound=bound)

    @property
    def in_specs(self) -> Any:
        """`PartitionSpec`s shaped like the arguments (a tuple, one entry for each)."""
        traced = bound_or_error(self.bound).traced
        args, kwargs = jax.tree.unflatten(traced.in_tree, [leaf.spec for leaf in self.inputs])
        return (*args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """`PartitionSpec`s shaped like the results."""
        return jax.tree.unflatten(bound_or_error(self.bound).traced.out_tree, [leaf.spec for leaf in self.outputs])

    def jit(self, devices: Any = None) -> Callable[..., Any]:
        """The function, annotated and jitted over these devices (default: the attached ones)."""
        executable = self._executable()
        return executable.wrap(executable.jit(devices))

    def _executable(self) -> Executable:
        """The program of this plan, also where its attributes were changed after it was bound."""
        return replace(bound_or_error(self.bound).executable, plan=self)

    def where(self, **changes: Any) -> Plan:
        """This plan with other attributes, bound to the same function."""
        changed = replace(self, **changes)
        if self.bound is None or not changes or "bound" in changes:
            return changed
        return replace(changed, bound=self.bound.where(**changes))

    def bind(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mesh: MeshLike | None = None,
        memory_limit_bytes: float | None = None,
        fixed: Mapping[str, Any] | None = None,
        variants: Variants | None = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        verify: int = 0,
        measure: int = 0,
        strict: bool = False,
        **kwargs: Any,
    ) -> Plan:
        """This plan for a function.

        Args:
            fn: the function.
            *args: its arguments, arrays or shapes.
            mesh: devices to run on, see `autoshard.plan`; the other options mean what they mean there.
            memory_limit_bytes: memory that one device may use.
            fixed: shardings to keep; refused, since a plan says where every input lies.
            variants: see `autoshard.plan`.
            donate_argnums: arguments whose buffers the results may take.
            static_argnums: arguments that are not arrays.
            verify: see `autoshard.plan`.
            measure: see `autoshard.plan`.
            strict: an operator without a rule is an error.
            **kwargs: arguments by keyword.

        Raises:
            PlanError: the function's structure or shapes are not those that the plan was made for.
        """
        if not args:
            raise PlanError("Plan.bind needs the function's arguments or their shapes: plan.bind(fn, state, batch)")
        options = checked_options(verify, measure, mesh=mesh, target=self.target, fixed=fixed, plan=self,
                                  memory_limit_bytes=memory_limit_bytes, strict=strict)  # fmt: skip
        planned = PlannedFunction(fn, options, variants, donate_argnums, static_argnums)
        return Plan.of(planned.entry(args, kwargs).bound)

    def explain(self, path: str, wish: Any = None) -> str:
        """Why the input or result at `path` is sharded as it is, and what the next best choices cost.

        Args:
            path: a path, `0/params/wq`, the end of one, `wq`, or a glob, `*/mlp/*`.
            wish: how it should be sharded instead, a `PartitionSpec` or names of logical axes as in `fixed=`: whether
                that is cheaper, dearer, infeasible or a tie.

        Raises:
            PlanError: nothing is there, or the wish cannot be read.
        """
        return explain(self, self.bound, path, wish)

    def diff(self, other: ShardingPlan) -> str:
        """What another plan does differently, a line each.

        Raises:
            PlanError: the other is no plan.
        """
        if not isinstance(other, ShardingPlan):
            raise PlanError(f"diff: {shortly(other)} is no plan; give one that plan(...) or Plan.from_json made")
        return diff(self, other)

    def verify(self, **options: Any) -> Audit:
        """Compiles the plan for its target, in a process of its own and with no such device, and compares.

        Args:
            **options: `timeout_s`, seconds after which the compiler is stopped; `options`, for the compiler instead of
                the plan's own.

        Raises:
            AuditError: the target's compiler is not installed, or it has none; an option that cannot be used.
        """
        return verify(self._executable(), **options)

    def to_html(self, path: Any) -> None:
        """Writes the plan as one self-contained page."""
        to_html(self, path)

    def __str__(self) -> str:
        return table(self)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads on any machine.

        Raises:
            PlanError: a value of its variant is of a kind that JSON does not have.
        """
        return plan_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote; the plan has no function until `bind` gives it one.

        Raises:
            PlanError: the text is not a plan, or of a format that this version does not know.
        """
        return plan_from_json(text, cls)

    def __copy__(self) -> Plan:
        return _like(self, self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:  # the function's trace cannot be copied: it is shared
        return _like(self, {k: v if k == "bound" else deepcopy(v, memo) for k, v in self.__dict__.items()})

    def __getstate__(self) -> dict[str, Any]:  # pickled without its function, as in JSON
        return self.__dict__ | {"bound": None}


def _like(plan: Plan, attributes: Mapping[str, Any]) -> Plan:
    """A plan with these attributes and no others, be it half-built."""
    made = object.__new__(type(plan))
    made.__dict__.update(attributes)
    return made
