"""Turns the update of a stacked parameter into a loop over its layers.

The device then holds the moments of one layer at a time. Compilers start a copy from the host as early as its operands
allow. In straight code, all old moments would arrive at the beginning of the step, and all new ones would wait for
their transfer to the host. That takes more device memory than a step without offload. In a loop, a slice arrives when
its iteration begins.

Of the equations that make a parameter's new value, those that work element by element on arrays of the parameter's
shape and on scalars become a loop. All others, such as the norm of all gradients, and the equations that these need,
are evaluated before the loop, and so are equations between scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.offload.edits import jaxprs_of

_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "clamp", "convert_element_type", "copy", "copy_p", "div", "eq", "erf",
    "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "name", "ne", "neg", "not", "or", "pow", "reduce_precision", "rsqrt", "select_n", "sign", "sqrt",
    "square", "stop_gradient", "sub", "tanh", "xor",
})  # fmt: skip


@shown
@dataclass(eq=False)
class UpdateLoop:
    """The update of one stacked parameter.

    Attributes:
        eqns: its equations, in order.
        length: the number of layers.
        scalars: variables without dimensions that it takes.
        stacked: stacked variables that it takes from outside.
        results: stacked variables that it makes for others.
    """

    eqns: list[Any]
    length: int
    scalars: list[Any]
    stacked: list[Any]
    results: list[Any]


def update_loop(
    eqns: Sequence[Any], shape: tuple[int, ...], taken_later: set[Any]
) -> tuple[list[Any], UpdateLoop] | None:
    """Return the equations before the loop, and the loop of the others; None if there are no others.

    Args:
        eqns: the equations of one parameter's update, in order.
        shape: the parameter's shape.
        taken_later: the variables that other equations, or the program's results, take.
    """
    first: set[int] = set()
    needed: set[Any] = set()  # by equations before the loop
    for eqn in reversed(eqns):
        if _is_scalar(eqn) or not _is_elementwise(eqn, shape) or not needed.isdisjoint(eqn.outvars):
            first.add(id(eqn))
            needed.update(v for v in eqn.invars if not isinstance(v, _compat.Literal))
    before, rest = [eqn for eqn in eqns if id(eqn) in first], [eqn for eqn in eqns if id(eqn) not in first]
    made = {var for eqn in rest for var in eqn.outvars}
    if not rest:
        return None
    operands = dict.fromkeys(
        v for eqn in rest for v in eqn.invars if not isinstance(v, _compat.Literal) and v not in made
    )
    scalars = [v for v in operands if not _shape(v)]
    stacked = [v for v in operands if _shape(v)]
    results = [v for eqn in rest for v in eqn.outvars if v in taken_later]
    return before, UpdateLoop(rest, shape[0], scalars, stacked, results)


def stack_lengths(eqns: Sequence[Any]) -> set[int]:
    """The lengths of all scans in these equations and within them."""
    found = {eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"}
    for eqn in eqns:
        for inner in jaxprs_of(eqn):
            found |= stack_lengths(_compat.open_jaxpr(inner).eqns)
    return found


def evaluate_slice(loop: UpdateLoop, env: dict[Any, Any]) -> None:
    """Evaluate the equations of a loop for one layer.

    Args:
        loop: the loop.
        env: the scalars, and the layer's slice of each stacked variable. The results of the equations are added.
    """
    for eqn in loop.eqns:
        args = [v.val if isinstance(v, _compat.Literal) else env[v] for v in eqn.invars]
        params = eqn.params
        if eqn.primitive.name == "broadcast_in_dim":
            params = {**params, "shape": params["shape"][1:]}
        with _compat.source_of(eqn):
            env.update(zip(eqn.outvars, _compat.bind(eqn, params, *args), strict=True))


def _is_scalar(eqn: Any) -> bool:
    return not any(_shape(v) for v in (*eqn.invars, *eqn.outvars)) and not jaxprs_of(eqn)


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    if any(_shape(v) != shape for v in eqn.outvars) or eqn.effects:
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and not _shape(eqn.invars[0])
    return eqn.primitive.name in _ELEMENTWISE and all(_shape(v) in ((), shape) for v in eqn.invars)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
