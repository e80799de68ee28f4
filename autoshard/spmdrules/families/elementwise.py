"""Elementwise operators. Operands of rank 0 and dimensions of size 1 are broadcast."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax

from autoshard import _compat
from autoshard._compat import primitive, primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Body, Dims, LocalParams, Rule
from autoshard.spmdrules.core.rule_builder import RuleBuilder, drops_sharding, pass_through

_UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clz", "cos",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p",
    "log2", "logistic", "not", "one_minus_square", "population_count", "reduce_precision", "round", "rsqrt", "sign",
    "sin", "sinh", "sqrt", "square", "tan", "tanh",
)  # fmt: skip
_IDENTITY = ("copy", "stop_gradient", "name", "xla_metadata_value")
_MEMORY_PLACEMENT = ("with_memory_space_constraint", "relayout")
_CONSTRAINTS = ("sharding_constraint", "reshard", "layout_constraint")
_LINEAR = ("neg", "real", "imag", "conj")
_NARY = (
    "atan2", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "igamma", "igammac",
    "igamma_grad_a", "max", "min", "mulhi", "nextafter", "polygamma", "pow", "regularized_incomplete_beta", "rem",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "zeta", "polynomial",
)  # fmt: skip


def pointwise(
    *avals: Any,
    results: int = 1,
    linear: tuple[tuple[int, ...], ...] = (),
    moves: tuple[int, ...] = (),
    local: LocalParams | None = None,
    body: Body | None = None,
) -> Rule:
    """Returns the rule of an elementwise operator, with its operands broadcast against each other."""
    shape = np.broadcast_shapes(*(a.shape for a in avals if a.shape))
    build, dims = pass_through(shape)
    operands = [_broadcast(a.shape, shape, dims) for a in avals]
    return build.rule(operands, (dims,) * results, linear, moves, local, body)


def _broadcast(shape: tuple[int, ...], full: tuple[int, ...], dims: Dims) -> Dims:
    if not shape:
        return ()
    return tuple(dim if size == whole else () for size, whole, dim in zip(shape, full, dims, strict=True))


@rule(*primitives(*_UNARY))
def unary(x: Any, **_: Any) -> Rule:
    """``a b -> a b``: a function of each element.

    https://openxla.org/stablehlo/spec#exponential
    """
    return pointwise(x)


@rule(*primitives(*_IDENTITY))
def identity(x: Any, **_: Any) -> Rule:
    """``a b -> a b; linear 0; moves 0``: the elements, unchanged.

    https://openxla.org/stablehlo/spec#optimization_barrier
    """
    return pointwise(x, linear=((0,),), moves=(0,))


@rule(*primitives(*_MEMORY_PLACEMENT))
def memory_placement(x: Any, **_: Any) -> Rule:
    """``a b -> a b; linear 0; moves 0``: the elements, in the memory space or layout that the program requests.

    https://docs.jax.dev/en/latest/pallas/tpu/details.html
    """
    return pointwise(x, linear=((0,),), moves=(0,), body=lambda shard, x: x)


@rule(*primitives(*_CONSTRAINTS))
def constraint(x: Any, **_: Any) -> Rule:
    """``a b -> a b; linear 0; moves 0``: the elements, unchanged; the planner reads the sharding from its parameters.

    https://openxla.org/shardy/sdy_dialect#sdysharding_constraint_sdyshardingconstraintop
    """
    return pointwise(x, linear=((0,),), moves=(0,), body=lambda shard, x: x)


@rule(*primitives(*_LINEAR))
def linear_unary(x: Any, **_: Any) -> Rule:
    """``a b -> a b; linear 0``: a linear function of each element.

    https://openxla.org/stablehlo/spec#negate
    """
    return pointwise(x, linear=((0,),))


@rule(lax.integer_pow_p)
def integer_pow(x: Any, *, y: int, **_: Any) -> Rule:
    """``a b -> a b``: each element raised to a constant power; linear if the power is 1.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.integer_pow.html
    """
    return pointwise(x, linear=((0,),) if y == 1 else ())


@rule(*primitives(*_NARY))
def nary(*xs: Any, **_: Any) -> Rule:
    """``a b, a b -> a b``: a function of the operands' elements at the same position.

    https://openxla.org/stablehlo/spec#compare
    """
    return pointwise(*xs)


@rule(lax.add_p, lax.sub_p, lax.complex_p, *primitives("add_any"))
def add(x: Any, y: Any, **_: Any) -> Rule:
    """``a b, a b -> a b; linear 0 1``: linear in both operands jointly.

    https://openxla.org/stablehlo/spec#add
    """
    return pointwise(x, y, linear=((0, 1),))


@rule(lax.mul_p)
def mul(x: Any, y: Any, **_: Any) -> Rule:
    """``a b, a b -> a b; linear 0; linear 1``: linear in either operand while the other is not partial.

    https://openxla.org/stablehlo/spec#multiply
    """
    return pointwise(x, y, linear=((0,), (1,)))


@rule(lax.div_p)
def div(x: Any, y: Any, **_: Any) -> Rule:
    """``a b, a b -> a b; linear 0``: linear in the numerator; not linear for integers, which are rounded.

    https://openxla.org/stablehlo/spec#divide
    """
    return pointwise(x, y, linear=((0,),) if jnp.issubdtype(x.dtype, jnp.inexact) else ())


@rule(lax.select_n_p)
def select_n(which: Any, *cases: Any, **_: Any) -> Rule:
    """``a b, a b, a b -> a b; linear 1 2; moves 1 2``: linear in all cases jointly; `which` may be a scalar.

    https://openxla.org/stablehlo/spec#select
    """
    operands = tuple(range(1, len(cases) + 1))
    return pointwise(which, *cases, linear=(operands,), moves=operands)


@rule(lax.clamp_p)
def clamp(low: Any, x: Any, high: Any, **_: Any) -> Rule:
    """``[], a b, [] -> a b``: the bounds may be scalars.

    https://openxla.org/stablehlo/spec#clamp
    """
    return pointwise(low, x, high)


@rule(lax.convert_element_type_p)
def convert_element_type(x: Any, *, new_dtype: Any, sharding: Any = None, **_: Any) -> Rule:
    """``a b -> a b; linear 0; moves 0``: linear if the new type represents every value of the old one exactly.

    Conversions between real and complex types are linear too. But they let only sums pass, because complex numbers have
    no order.

    https://openxla.org/stablehlo/spec#convert
    """
    exact = _represents(new_dtype, x.dtype)
    ordered = _is_complex(new_dtype) == _is_complex(x.dtype)
    linear = ((0,),) if exact else ()
    return pointwise(x, linear=linear, moves=(0,) if exact and ordered else (), local=drops_sharding(sharding))


def _represents(new: Any, old: Any) -> bool:
    """Whether `new` represents every value and every sum of `old`: it is the same type or a wider float."""
    if new == old:
        return True
    if any(jnp.issubdtype(t, dtypes.extended) for t in (new, old)):
        return False
    if not (jnp.issubdtype(new, jnp.inexact) and jnp.issubdtype(old, jnp.inexact)):
        return False
    wide, narrow = jnp.finfo(new), jnp.finfo(old)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


@rule(lax.bitcast_convert_type_p)
def bitcast_convert_type(x: Any, *, new_dtype: Any, **_: Any) -> Rule:
    """``a b -> a b``: a narrower type adds a trailing dimension, a wider one removes it; that dimension is whole.

    https://openxla.org/stablehlo/spec#bitcast_convert
    """
    old, new = (dtypes.itemsize_bits(np.dtype(t)) for t in (x.dtype, new_dtype))
    if old == new:
        return pointwise(x)
    build, dims = pass_through(x.shape if old > new else x.shape[:-1])
    packed = (*dims, build.whole(max(old, new) // min(old, new)))
    return build.rule([dims], [packed]) if old > new else build.rule([packed], [dims])


@rule(primitive("to_edtype"))
def to_edtype(x: Any, *, edtype: Any, **_: Any) -> Rule:
    """``a w -> a; whole w``: elements of an extended type from their representation, which may add dimensions.

    https://docs.jax.dev/en/latest/jax.dtypes.html
    """
    build, dims = pass_through(x.shape[: len(x.shape) - len(_compat.element_shape(edtype))])
    return build.rule([(*dims, *map(build.whole, x.shape[len(dims) :]))], [dims])


@rule(primitive("from_edtype"))
def from_edtype(x: Any, **_: Any) -> Rule:
    """``a -> a w; whole w``: the representation of elements of an extended type.

    https://docs.jax.dev/en/latest/jax.dtypes.html
    """
    build, dims = pass_through(x.shape)
    return build.rule([dims], [(*dims, *map(build.whole, _compat.element_shape(x.dtype)))])


@rule(lax.optimization_barrier_p)
def optimization_barrier(*xs: Any, **_: Any) -> Rule:
    """``a b, c, [] -> a b, c, []; linear 0 1 2; moves 0 1 2``: each operand, unchanged.

    https://openxla.org/stablehlo/spec#optimization_barrier
    """
    return _unchanged(xs)


@rule(primitive("device_put"))
def device_put(*xs: Any, **_: Any) -> Rule:
    """``a b -> a b; linear 0; moves 0``: each operand, unchanged; the planner decides where it goes.

    https://docs.jax.dev/en/latest/_autosummary/jax.device_put.html
    """
    return _unchanged(xs).where(body=lambda shard, *xs: list(xs))


def _unchanged(xs: tuple[Any, ...]) -> Rule:
    build = RuleBuilder()
    dims = [build.dims(x.shape) for x in xs]
    everything = tuple(range(len(xs)))
    return build.rule(dims, dims, (everything,) if xs else (), everything)


@rule(primitive("tie"))
def tie(x: Any, y: Any, **_: Any) -> Rule:
    """``a, b c -> b c; linear 1; linear 0 1; moves 1``: the second operand, after the first has been computed.

    https://openxla.org/stablehlo/spec#optimization_barrier
    """
    build = RuleBuilder()
    first, second = build.dims(x.shape), build.dims(y.shape)
    return build.rule([first, second], [second], ((1,), (0, 1)), (1,))
