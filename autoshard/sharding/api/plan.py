"""`Plan`: a `ShardingPlan` bound to its function, with methods that show, verify, compare and run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autoshard._shown import shown
from autoshard._tracebacks import hides_own_frames
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.audit import Audit, verify
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.lower.planned_call import PlannedCall
from autoshard.sharding.machines.device_mesh import MeshLike
from autoshard.sharding.plan.serialization import plan_from_json, plan_json
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan, bound_or_error
from autoshard.sharding.planner.variants import Variants
from autoshard.sharding.program.static_leaves import reveal_static
from autoshard.sharding.report import BestOfKind, best_of_kinds, diff, explain, reduce_axes, table, to_html
from autoshard.sharding.runtime.plan_options import checked_options
from autoshard.sharding.runtime.planned_function import PlannedFunction


@shown
@dataclass(frozen=True, eq=False)
class Plan(ShardingPlan):
    """The result of `plan`: everything that was chosen for one program on one machine.

    Attributes:
        bound: the plan applied to its function; None for a plan that was read and not yet bound. The other attributes
            are those of `ShardingPlan`.
    """

    bound: BoundPlan | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, bound: BoundPlan) -> Plan:
        """Return the public plan of a bound plan."""
        return cls(**vars(bound.plan.data()), bound=bound)

    @property
    def in_specs(self) -> Any:
        """`PartitionSpec`s in the structure of the arguments: a tuple with one entry for each."""
        traced = bound_or_error(self.bound).traced
        args, kwargs = reveal_static(jax.tree.unflatten(traced.in_tree, [leaf.spec for leaf in self.inputs]))
        return (*args, kwargs) if kwargs else args

    @hides_own_frames
    def in_shardings(self, devices: Any = None) -> Any:
        """`NamedSharding`s, with memory kinds, in the structure of `in_specs`. `devices` default to the attached ones.

        `jax.device_put(arguments, plan.in_shardings())` moves arguments to where the plan has them.
        """
        bound = bound_or_error(self.bound)
        shardings, _ = self.shardings(bound.executable.mesh_over(devices))
        args, kwargs = reveal_static(jax.tree.unflatten(bound.traced.in_tree, shardings))
        return (*args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """`PartitionSpec`s in the structure of the results."""
        traced = bound_or_error(self.bound).traced
        return reveal_static(jax.tree.unflatten(traced.out_tree, [leaf.spec for leaf in self.outputs]))

    @hides_own_frames
    def jit(self, devices: Any = None) -> Callable[..., Any]:
        """Return the function under `jax.jit` with the plan's shardings. `devices` default to the attached ones.

        It is called like the function itself, and has `.lower`. Arrays of other shapes, dtypes or shardings than the
        planned ones are an error.
        """
        executable = self._executable()
        shardings, _ = self.shardings(executable.mesh_over(devices))
        return executable.wrap(PlannedCall(executable.jit(devices, weak=True), executable.traced, shardings))

    def _executable(self) -> Executable:
        """The executable with this plan, because `where` may have changed attributes since the plan was bound."""
        return replace(bound_or_error(self.bound).executable, plan=self)

    def where(self, **changes: Any) -> Plan:
        """Return a copy with changed attributes, bound to the same function."""
        changed = replace(self, **changes)
        if self.bound is None or not changes or "bound" in changes:
            return changed
        return replace(changed, bound=self.bound.where(**changes))

    @hides_own_frames
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
        """Bind this plan to a function.

        Args:
            fn: the function.
            *args: its arguments, arrays or shapes.
            mesh: devices to run on: the plan's mesh, see `autoshard.plan`.
            memory_limit_bytes: must be None, because a plan is already chosen.
            fixed: must be None or empty, because a plan already fixes the sharding of every input.
            variants: see `autoshard.plan`.
            donate_argnums: arguments whose buffers the results may reuse.
            static_argnums: arguments that are not arrays.
            verify: must be 0; `Plan.verify()` compiles the plan.
            measure: must be 0.
            strict: raise an error, instead of a warning, if a primitive has no rule.
            **kwargs: arguments by keyword.

        Raises:
            PlanError: the plan was made for a function of another structure or other shapes.
        """
        if not args:
            raise PlanError(
                "Plan.bind got no arguments; pass the function's arguments or shapes: plan.bind(fn, state, batch)"
            )
        options = checked_options(verify, measure, mesh=mesh, target=self.target, fixed=fixed, plan=self,
                                  memory_limit_bytes=memory_limit_bytes, strict=strict)  # fmt: skip
        planned = PlannedFunction(fn, options, variants, donate_argnums, static_argnums)
        return Plan.of(planned.entry(args, kwargs).bound)

    @hides_own_frames
    def explain(self, path: str, wish: Any = None) -> str:
        """Explain why an input or result is sharded as it is, and what the next best choices cost.

        Args:
            path: a path (`0/params/wq`), a glob (`*/mlp/*`), or the end of a path (`wq`) that fits one input.
            wish: a sharding to price instead: a `PartitionSpec`, or names of logical axes as in `fixed=`. The text says
                whether it is faster, slower, infeasible or a tie.

        Raises:
            PlanError: no input or result has this path, or the wish is invalid.
        """
        return explain(self, self.bound, path, wish)

    def best_of_kinds(self) -> dict[str, BestOfKind]:
        """Return the fastest plan of each kind that the search priced and that fits the memory.

        The kinds are `dp`, `fsdp`, `tp`, `cp`, `ep`, `pp`, and `hybrid`, which combines two or more of `tp`, `cp`, `ep`
        and `pp`. The fastest kind comes first. `plan(..., plan=best.strategy)` makes such a plan.

        Example:
            >>> import jax, autoshard
            >>> x, w = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
            >>> made = autoshard.plan(lambda w, x: x @ w, w, x, target="cpu:8")
            >>> [(kind, round(best.ratio, 1)) for kind, best in made.best_of_kinds().items()][:1]
            [('dp', 1.0)]
        """
        return best_of_kinds(self)

    @hides_own_frames
    def reduce_axes(self, path: str) -> dict[str, str]:
        """Return the mesh axes over which the gradient of a parameter is reduced, each with the reason.

        A gradient is reduced over a mesh axis if the axis shards something over which the gradient is a sum, such as
        the batch. It is not reduced over an axis that shards the parameter itself: along such an axis, each device
        computes the gradient of its part.

            plan.reduce_axes("params/wq")  # {"dp": "dp shards batch, which the parameter lacks: all-reduce after ..."}

        Args:
            path: the path of a parameter, `0/params/wq`, or its end, `wq`.

        Returns:
            Mesh axis -> the reason; empty if the gradient is reduced over none, or if the function computes none, as of
            a frozen parameter, of integers, or of a learning rate.

        Raises:
            PlanError: no parameter, or more than one, has this path; or the plan has no function.
        """
        return reduce_axes(self, bound_or_error(self.bound), path)

    def diff(self, other: ShardingPlan) -> str:
        """List the differences of another plan, one per line.

        Raises:
            PlanError: `other` is not a plan.
        """
        if not isinstance(other, ShardingPlan):
            raise PlanError(f"diff: {short_repr(other)} is not a plan; pass the result of plan(...) or Plan.from_json")
        return diff(self, other)

    def verify(self, **options: Any) -> Audit:
        """Compile the plan for its target in a separate process, and compare. The target need not be attached.

        Args:
            **options: `timeout_s`: seconds until the compiler is stopped; `options`: compiler options that replace the
                plan's, or the name of an option set, which is added to them; `until`: `code`, or `schedule`, which
                stops the compiler of TPUs before machine code is generated, after seconds instead of minutes.

        Raises:
            AuditError: the target has no compiler, or it is not installed; or an option is invalid.
        """
        return verify(self._executable(), **options)

    def to_html(self, path: Any) -> None:
        """Write the plan as a self-contained HTML page.

        Raises:
            PlanError: the file cannot be written.
        """
        to_html(self, path)

    def __str__(self) -> str:
        return table(self)

    def to_json(self) -> str:
        """Return the plan as JSON. `from_json` reads it on any machine.

        Raises:
            PlanError: JSON cannot express a value of the plan's variant.
        """
        return plan_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text that `to_json` wrote. The plan has no function until `bind` is called.

        Raises:
            PlanError: the text is not a plan, or its format is unknown to this version.
        """
        return plan_from_json(text, cls)

    def __copy__(self) -> Plan:
        return _like(self, self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:  # a trace cannot be copied, so copies share it
        return _like(self, {k: v if k == "bound" else deepcopy(v, memo) for k, v in self.__dict__.items()})

    def __getstate__(self) -> dict[str, Any]:  # pickled without its function, as in JSON
        return self.__dict__ | {"bound": None}


def _like(plan: Plan, attributes: Mapping[str, Any]) -> Plan:
    """Make a plan with exactly these attributes, which may be incomplete."""
    made = object.__new__(type(plan))
    made.__dict__.update(attributes)
    return made
