"""Over which mesh axes the gradient of a parameter is reduced, and why: `plan.reduce_axes(path)`.

The search goes back from the updated parameter, through values without the batch, to the operators that sum over the
batch. The plan's layout gives the strategy of such an operator. The gradient is reduced over the mesh axes that shard a
factor over which the operator sums. Sums over an axis of the parameter itself, such as those of factored moments, do
not count.
"""

from __future__ import annotations

from collections import defaultdict

import jax.numpy as jnp

from autoshard import _compat
from autoshard._typed import short_repr
from autoshard._units import line_text
from autoshard.errors import PlanError
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import strategy_in_layout
from autoshard.sharding.overlap.gradient_owners import GradientSums
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.program.argument_names import path_forms
from autoshard.sharding.program.path_patterns import AmbiguousPathError, find_paths, last_form, suggestions


def reduce_axes(plan: ShardingPlan, bound: BoundPlan, path: str) -> dict[str, str]:
    """Return the mesh axes over which the gradient of a parameter is reduced.

    Args:
        plan: the plan.
        bound: the plan with its program.
        path: the path of a parameter, or its end.

    Returns:
        Mesh axis -> the reason, in the order of the mesh. Empty for integers, such as a quantized base, and for other
        scalars, such as a learning rate: they have no gradient.

    Raises:
        PlanError: no parameter, or more than one, has this path.
    """
    number = _parameter(plan, path)
    if _is_integer(plan.inputs[number]):
        return {}
    layout = bound.layout
    value, updated = layout.axes.program.inputs[number], _updated(bound, number)
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    shards: dict[str, str] = {}
    factors = dict(zip(map(id, layout.axes.program.ops()), layout.axes.of_op, strict=True))
    own = {c for dim in layout.axes.of_value[value] for c in dim}
    for op, result in GradientSums(layout.axes, layout.roles).of(updated, within_replicas=True, scalars=True):
        strategy = strategy_in_layout(layout, op, bound.executable.link_prices)
        for move in strategy.moves:
            if move.kind not in ("all-reduce", "reduce-scatter") or op.results[-1 - move.array] != result:
                continue
            for axis in move.axes:
                classes = factors[id(op)].get(strategy.factors[axis] or "", ())
                if classes and own.issuperset(classes):
                    continue
                shards[axis] = " and ".join(_name(layout, c) for c in classes) or "an axis without a name"
                line = f"{move.kind} after '{op.name}' at {line_text(_compat.source_line(op.eqn))}"
                if line not in reasons[axis]:
                    reasons[axis].append(line)
    return {
        axis: f"{axis} shards {shards[axis]}, which the parameter lacks: {', '.join(reasons[axis])}"
        for axis in layout.mesh
        if reasons[axis]
    }


def _updated(bound: BoundPlan, number: int) -> list[int]:
    """Return the results that are an update or a gradient of a parameter.

    If the structure of the results does not show which ones, take the gradients with the parameter's axes.
    """
    program, of_value = bound.layout.axes.program, bound.layout.axes.of_value
    value, outputs = program.inputs[number], program.outputs
    like = [(program.inputs[i], outputs[o]) for i, o in bound.problem.traced.state_like]
    paired = [o for i, o in (*like, *bound.problem.state) if i == value]
    return paired or [o for o in outputs if of_value[o] == of_value[value] and o in bound.layout.roles.gradients]


def _name(layout: Layout, cls: int) -> str:
    return layout.axes.names.get(cls) or layout.axes.computed_names.get(cls) or "an axis without a name"


def _is_integer(leaf: Leaf) -> bool:
    return not _is_key(leaf) and not jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_scalar(leaf: Leaf) -> bool:
    """Whether a leaf is a single float, such as a learned temperature."""
    return not leaf.shape and not _is_key(leaf) and not _is_integer(leaf)


def _is_key(leaf: Leaf) -> bool:
    """Whether a leaf has a dtype that NumPy does not know: typed random keys."""
    try:
        jnp.dtype(leaf.dtype)
    except TypeError:
        return True
    return False


def _parameter(plan: ShardingPlan, path: str) -> int:
    """Return the number of the input with this path. It is a parameter, a scalar float, or an array of integers."""
    if not isinstance(path, str):
        raise PlanError(f"reduce_axes: {short_repr(path)} is not a path; give a string such as '0/params/wq'")
    numbers = [n for n, x in enumerate(plan.inputs)
               if x.role == "parameter" or (x.role == "other" and (_is_integer(x) or _is_scalar(x)))]  # fmt: skip
    forms = [path_forms(plan.inputs[n].path, plan.arguments) for n in numbers]
    try:
        found = find_paths(path, forms)
    except AmbiguousPathError as error:
        raise AmbiguousPathError(f"reduce_axes: {error}") from None
    if found is None:
        hint = suggestions(path.strip("/"), [last_form(each) for each in forms]) if forms else "The plan has none"
        raise PlanError(f"reduce_axes: no parameter is called '{path.strip('/')}'. {hint}")
    if len(found.indices) != 1:
        raise PlanError(f"reduce_axes: '{path}' names {len(found.indices)} parameters; give the path of one")
    return numbers[found.indices[0]]
