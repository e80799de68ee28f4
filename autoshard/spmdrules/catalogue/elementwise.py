"""Elementwise operators: arithmetic, rounding, special functions, bits, complex numbers, selection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from autoshard.spmdrules.catalogue.entry import Operator, f32


def lerp(start: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    """`start + weight * (end - start)`."""
    return start + weight * (end - start)


def addcmul(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`x + a * b`."""
    return x + a * b


def addcdiv(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`x + a / b`."""
    return x + a / b


def polar(length: jax.Array, angle: jax.Array) -> jax.Array:
    """Complex numbers with the given moduli and angles."""
    return lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


def _shape_of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _within(low: float, high: float, seed: int = 0) -> np.ndarray:
    """Random numbers between `low` and `high`, inside an operator's domain."""
    return np.random.default_rng(seed).uniform(low, high, (4, 8)).astype(np.float32)


_X, _Y, _BIAS = f32(4, 8), f32(4, 8), f32(8)
_UNIT, _POSITIVE, _ABOVE_1 = _within(-0.9, 0.9), _within(0.2, 3.0), _within(1.1, 4.0)
_FRACTIONS = _within(0.1, 0.9)
_POSITIVE_2 = _within(0.5, 4.0, seed=1)
_INTS, _MORE_INTS = _shape_of(jnp.int32, 4, 8), _shape_of(jnp.int32, 4, 8)
_SHIFTS = np.random.default_rng(2).integers(0, 9, (4, 8)).astype(np.int32)
_COMPLEX = _shape_of(jnp.complex64, 4, 8)
_ZERO_GRADIENT = "the gradient is zero"
_INTEGERS = "no gradient: integers"


def _operators(
    functions: dict[str, Callable[..., Any]], *args: Any, wrt: tuple[int, ...] = (0,), note: str = ""
) -> tuple[Operator, ...]:
    return tuple(Operator(name, fn, args, wrt, note) for name, fn in functions.items())


_UNARY = _operators(
    {
        "abs": jnp.abs,
        "neg": jnp.negative,
        "square": jnp.square,
        "cube": partial(lax.integer_pow, y=3),
        "cbrt": jnp.cbrt,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "asinh": jnp.arcsinh,
        "sinc": jnp.sinc,
        "deg2rad": jnp.deg2rad,
        "rad2deg": jnp.rad2deg,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "i0": special.i0,
        "i0e": special.i0e,
        "i1": special.i1,
        "i1e": special.i1e,
        "ndtr": special.ndtr,
        "log_ndtr": special.log_ndtr,
        "nan_to_num": jnp.nan_to_num,
    },
    _X,
)
_ROUNDING = _operators(
    {
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "trunc": jnp.trunc,
        "sign": jnp.sign,
    },
    _X,
    note=_ZERO_GRADIENT,
)
_OF_POSITIVE = _operators(
    {
        "sqrt": jnp.sqrt,
        "rsqrt": lax.rsqrt,
        "reciprocal": jnp.reciprocal,
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "lgamma": lax.lgamma,
        "digamma": lax.digamma,
        "entr": special.entr,
    },
    _POSITIVE,
)
_OF_A_RANGE = (
    *_operators({"asin": jnp.arcsin, "acos": jnp.arccos, "atanh": jnp.arctanh, "erf_inv": lax.erf_inv}, _UNIT),
    *_operators({"logit": special.logit, "ndtri": special.ndtri}, _FRACTIONS),
    *_operators({"acosh": jnp.arccosh}, _ABOVE_1),
)
_BINARY = (
    *_operators(
        {
            "add": jnp.add,
            "subtract": jnp.subtract,
            "multiply": jnp.multiply,
            "maximum": jnp.maximum,
            "minimum": jnp.minimum,
            "fmax": jnp.fmax,
            "fmin": jnp.fmin,
            "atan2": jnp.arctan2,
            "hypot": jnp.hypot,
            "logaddexp": jnp.logaddexp,
            "logaddexp2": jnp.logaddexp2,
            "copysign": jnp.copysign,
        },
        _X,
        _Y,
        wrt=(0, 1),
    ),
    *_operators(
        {"bias_add": jnp.add, "scale_by": jnp.multiply}, _X, _BIAS, wrt=(0, 1), note="the second operand is broadcast"
    ),
    *_operators(
        {
            "divide": jnp.divide,
            "remainder": jnp.remainder,
            "fmod": jnp.fmod,
            "rem": lax.rem,
            "power": jnp.power,
            "float_power": jnp.float_power,
            "xlogy": special.xlogy,
            "xlog1py": special.xlog1py,
            "betaln": special.betaln,
            "igamma": lax.igamma,
            "igammac": lax.igammac,
        },
        _POSITIVE,
        _POSITIVE_2,
        wrt=(0, 1),
    ),
    Operator("floor_divide", jnp.floor_divide, (_POSITIVE, _POSITIVE_2), (0, 1), _ZERO_GRADIENT),
    Operator("heaviside", jnp.heaviside, (_X, _Y), (0, 1)),
    Operator("ldexp", jnp.ldexp, (_X, _SHIFTS)),
    Operator("nextafter", jnp.nextafter, (_X, _Y), (), "no gradient: JAX has none"),
    Operator("zeta", special.zeta, (_ABOVE_1, _POSITIVE_2), (0, 1)),
    Operator(
        "polygamma",
        special.polygamma,
        (np.int32(2), _POSITIVE),
        (1,),
        "no gradient with respect to the order, an integer",
    ),
)
_TERNARY = (
    Operator("where", jnp.where, (_shape_of(jnp.bool_, 4, 8), _X, _Y), (1, 2)),
    Operator("clip", jnp.clip, (_X, _within(-1.0, -0.2), _within(0.2, 1.0)), (0, 1, 2)),
    Operator("clamp", partial(jnp.clip, min=-0.5, max=0.5), (_X,)),
    Operator("lerp", lerp, (_X, _Y, f32(4, 8)), (0, 1, 2)),
    Operator("addcmul", addcmul, (_X, _Y, f32(4, 8)), (0, 1, 2)),
    Operator("addcdiv", addcdiv, (_X, _Y, _POSITIVE), (0, 1, 2)),
    Operator(
        "betainc",
        special.betainc,
        (_POSITIVE, _POSITIVE_2, _FRACTIONS),
        (2,),
        "no gradient with respect to the parameters: JAX has none",
    ),
)
_BITS = (
    *_operators(
        {
            "bitwise_and": jnp.bitwise_and,
            "bitwise_or": jnp.bitwise_or,
            "bitwise_xor": jnp.bitwise_xor,
            "gcd": jnp.gcd,
            "lcm": jnp.lcm,
        },
        _INTS,
        _MORE_INTS,
        wrt=(),
        note=_INTEGERS,
    ),
    *_operators(
        {
            "left_shift": jnp.left_shift,
            "right_shift": jnp.right_shift,
            "logical_right_shift": lax.shift_right_logical,
        },
        _INTS,
        _SHIFTS,
        wrt=(),
        note=_INTEGERS,
    ),
    *_operators(
        {"bitwise_not": jnp.bitwise_not, "population_count": lax.population_count, "count_leading_zeros": lax.clz},
        _INTS,
        wrt=(),
        note=_INTEGERS,
    ),
)
_COMPLEX_NUMBERS = (
    *_operators(
        {
            "real": jnp.real,
            "imag": jnp.imag,
            "conj": jnp.conj,
            "angle": jnp.angle,
            "complex_abs": jnp.abs,
            "complex_exp": jnp.exp,
        },
        _COMPLEX,
    ),
    Operator("complex", lax.complex, (_X, _Y), (0, 1)),
    Operator("polar", polar, (_X, _Y), (0, 1)),
    Operator("complex_multiply", jnp.multiply, (_COMPLEX, _COMPLEX), (0, 1)),
)
_TYPES = (
    Operator("cast", partial(lax.convert_element_type, new_dtype=jnp.bfloat16), (_X,)),
    Operator("reduce_precision", partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7), (_X,)),
    Operator(
        "bitcast",
        partial(lax.bitcast_convert_type, new_dtype=jnp.int32),
        (_X,),
        (),
        "no gradient: the bits of a number",
    ),
    Operator("stop_gradient", lax.stop_gradient, (_X,), note=_ZERO_GRADIENT),
    Operator("zeros_like", jnp.zeros_like, (_X,), note=_ZERO_GRADIENT),
    Operator("full_like", partial(jnp.full_like, fill_value=3.0), (_X,), note=_ZERO_GRADIENT),
)
OPERATORS: tuple[Operator, ...] = (
    *_UNARY,
    *_ROUNDING,
    *_OF_POSITIVE,
    *_OF_A_RANGE,
    *_BINARY,
    *_TERNARY,
    *_BITS,
    *_COMPLEX_NUMBERS,
    *_TYPES,
)
