"""Turns the update of a stacked parameter into a loop over its layers.

The device then holds the moments of one layer at a time. Compilers start a copy from the host as early as its operands
allow. In straight code, all old moments would arrive at the beginning of the step, and all new ones would wait for
their transfer to the host. That takes more device memory than a step without offload. In a loop, a slice arrives when
its iteration begins.

The equations that make a parameter's new value become a loop if each of them works element by element on arrays of the
parameter's shape and on scalars. Equations between scalars are evaluated before the loop.
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
    """Return the equations between scalars, and the loop of the others; None if they cannot be a loop.

    Args:
        eqns: the equations of one parameter's update, in order.
        shape: the parameter's shape.
        taken_later: the variables that other equations, or the program's results, take.
    """
    before = [eqn for eqn in eqns if not any(_shape(v) for v in (*eqn.invars, *eqn.outvars)) and not jaxprs_of(eqn)]
    scalar = {id(eqn) for eqn in before}
    rest = [eqn for eqn in eqns if id(eqn) not in scalar]
    made = {var for eqn in rest for var in eqn.outvars}
    if not all(_is_elementwise(eqn, shape) for eqn in rest):
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


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    if any(_shape(v) != shape for v in eqn.outvars) or eqn.effects:
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and not _shape(eqn.invars[0])
    return eqn.primitive.name in _ELEMENTWISE and all(_shape(v) in ((), shape) for v in eqn.invars)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
