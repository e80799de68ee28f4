"""The table of elementwise operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import primal_tangent_dtype
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from tests.spmdrules.rows import Row, below, bind, exists, f32, numbers, of

X = f32(4, 8)
INTS = of(jnp.int32, 4, 8)

_EXTENDED = primal_tangent_dtype(jnp.float32, jnp.bfloat16)
_NO_ARRAYS = "no array of this type can leave a compiled program"
_COMPILED_ONLY = "it exists in compiled programs only"

_SAME = "a b -> a b"
_LINEAR = "a b -> a b; linear 0"
_MOVED = "a b -> a b; linear 0; moves 0"
_TWO = "a b, a b -> a b"
_JOINT = "a b, a b -> a b; linear 0 1"

_UNARY = {
    "abs": lax.abs, "acos": lax.acos, "acosh": lax.acosh, "asin": lax.asin, "asinh": lax.asinh, "atan": lax.atan,
    "atanh": lax.atanh, "bessel_i0e": lax.bessel_i0e, "bessel_i1e": lax.bessel_i1e, "cbrt": lax.cbrt, "ceil": lax.ceil,
    "cos": lax.cos, "cosh": lax.cosh, "digamma": lax.digamma, "erf": lax.erf, "erf_inv": lax.erf_inv, "erfc": lax.erfc,
    "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor, "is_finite": lax.is_finite,
    "lgamma": lax.lgamma, "log": lax.log, "log1p": lax.log1p, "logistic": lax.logistic, "round": lax.round,
    "rsqrt": lax.rsqrt, "sign": lax.sign, "sin": lax.sin, "sinh": lax.sinh, "sqrt": lax.sqrt, "square": lax.square,
    "tan": lax.tan, "tanh": lax.tanh,
}  # fmt: skip
_BINARY = {
    "atan2": lax.atan2, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    "igamma": lax.igamma, "igammac": lax.igammac, "igamma_grad_a": lax.igamma_grad_a, "max": lax.max, "min": lax.min,
    "pow": lax.pow, "rem": lax.rem, "zeta": lax.zeta,
}  # fmt: skip
_INTEGERS = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "mulhi": getattr(lax, "mulhi", None),
    "shift_left": lax.shift_left, "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
}  # fmt: skip
_TOTAL_ORDER = ("eq_to", "lt_to", "le_to")


def _real(x):
    """The real part by a conversion, as in the gradient of a conversion to complex; `astype` uses `real` instead."""
    return bind("convert_element_type")(x, new_dtype=np.dtype(np.float32), weak_type=False, sharding=None)


def _on_one(axis_type):
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",), axis_types=(axis_type,)), PartitionSpec())


def _constrained(x):
    return lax.with_sharding_constraint(x, _on_one(AxisType.Auto))


def _resharded(x):
    return reshard(x, _on_one(AxisType.Explicit))


def _in_memory(x):
    return bind("with_memory_space_constraint")(x, memory_space=jax.memory.Space.Device)


def _runs_uncompiled(fn):
    """Whether the installed JAX can run a function without compiling it."""
    try:
        fn(jnp.zeros(4))
    except ValueError:
        return False
    return True


ROWS = [
    *(Row(name, fn, (X,), _SAME) for name, fn in _UNARY.items()),
    *(Row(name, fn, (X, X), _TWO) for name, fn in _BINARY.items()),
    *(Row(name, fn, (INTS, below(5, 4, 8)), _TWO) for name, fn in _INTEGERS.items() if fn),
    *(Row(name, bind(name), (X, X), _TWO) for name in _TOTAL_ORDER if exists(name)),
    *(Row("log2", lambda x: bind("log2")(x, accuracy=None), (X,), _SAME) for _ in range(exists("log2"))),
    *(Row("one_minus_square", bind("one_minus_square"), (X,), _SAME) for _ in range(exists("one_minus_square"))),
    # In bfloat16, in which the step to the next number is larger than a rounding error.
    Row("nextafter", lax.nextafter, (of(jnp.bfloat16, 4, 8), of(jnp.bfloat16, 4, 8)), _TWO),
    Row("not", lax.bitwise_not, (of(jnp.bool_, 4, 8),), _SAME),
    Row("clz", lax.clz, (INTS,), _SAME),
    Row("population_count", lax.population_count, (INTS,), _SAME),
    Row("reduce_precision", lambda x: lax.reduce_precision(x, 5, 3), (X,), _SAME),
    Row("integer_pow", lambda x: lax.integer_pow(x, 3), (X,), _SAME),
    Row("integer_pow", lambda x: bind("integer_pow")(x, y=1), (X,), _LINEAR, "one"),
    Row("polygamma", lax.polygamma, (numbers(4, 8, low=1, high=4), numbers(4, 8, low=1, high=4)), _TWO),
    Row("regularized_incomplete_beta", lax.betainc, (X, X, numbers(4, 8, low=0, high=1)), "a b, a b, a b -> a b"),
    *(
        Row("polynomial", lambda x, a, b: bind("polynomial")(x, a, b), (X, f32(), f32()), "a b, [], [] -> a b")
        for _ in range(exists("polynomial"))
    ),
    Row("copy", bind("copy"), (X,), _MOVED),
    *(Row("stop_gradient", bind("stop_gradient"), (X,), _MOVED) for _ in range(exists("stop_gradient"))),
    Row("name", lambda x: checkpoint_name(x, "kept"), (X,), _MOVED),
    Row("xla_metadata_value", lambda x: set_xla_metadata(x, note="kept"), (X,), _MOVED),
    Row("with_memory_space_constraint", _in_memory, (X,), _MOVED,
        unchecked="" if _runs_uncompiled(_in_memory) else _COMPILED_ONLY),
    *(
        Row("relayout", lambda x: bind("relayout")(x, dst_layout=Layout((1, 0))), (X,), _MOVED,
            unchecked=_COMPILED_ONLY)
        for _ in range(exists("relayout"))
    ),
    Row("to_edtype", lambda x: lax.convert_element_type(x, _EXTENDED), (X,), _SAME, unchecked=_NO_ARRAYS),
    Row("from_edtype", lambda x: lax.convert_element_type(lax.convert_element_type(x, _EXTENDED), jnp.float32), (X,),
        _SAME, unchecked=_NO_ARRAYS),
    Row("sharding_constraint", _constrained, (X,), _MOVED),
    Row("reshard", _resharded, (X,), _MOVED),
    Row("layout_constraint", lambda x: with_layout_constraint(x, Layout((1, 0))), (X,), _MOVED),
    Row("device_put", jax.device_put, (X,), _MOVED),
    Row("device_put", lambda x: jax.device_put(x, jax.memory.Space.Host), (X,), _MOVED, "to the host"),
    Row("optimization_barrier", lax.optimization_barrier, (X,), _MOVED),
    Row("optimization_barrier", lambda *xs: lax.optimization_barrier(xs), (X, f32(4), f32()),
        "a b, c, [] -> a b, c, []; linear 0 1 2; moves 0 1 2", "several"),
    *(
        Row("tie", bind("tie"), (f32(4), X), "a, b c -> b c; linear 1; linear 0 1; moves 1")
        for _ in range(exists("tie"))
    ),
    Row("neg", lax.neg, (X,), _LINEAR),
    Row("real", lax.real, (of(jnp.complex64, 4, 8),), _LINEAR),
    Row("imag", lax.imag, (of(jnp.complex64, 4, 8),), _LINEAR),
    Row("conj", lax.conj, (of(jnp.complex64, 4, 8),), _LINEAR),
    Row("add", lax.add, (X, X), _JOINT),
    Row("add", lambda x: x + 2.0, (X,), "a b, [] -> a b; linear 0 1", "a scalar"),
    Row("add", lax.add, (of(jnp.bfloat16, 4, 8), of(jnp.bfloat16, 4, 8)), _JOINT, "bf16"),
    Row("sub", lax.sub, (X, X), _JOINT),
    Row("sub", lambda x, y: x - y, (X, f32(4, 1)), "a b, a 1 -> a b; linear 0 1", "a column"),
    Row("add_any", bind("add_any"), (X, X), _JOINT),
    Row("complex", lax.complex, (X, X), _JOINT),
    Row("mul", lax.mul, (X, X), "a b, a b -> a b; linear 0; linear 1"),
    Row("mul", lambda x: 2.0 * x, (X,), "[], a b -> a b; linear 0; linear 1", "a scalar"),
    Row("mul", lambda x, y: x * y, (X, f32(1, 8)), "a b, 1 b -> a b; linear 0; linear 1", "a row"),
    Row("mul", lax.mul, (f32(0, 8), f32(0, 8)), "a b, a b -> a b; whole a; linear 0; linear 1", "nothing"),
    Row("div", lax.div, (X, numbers(4, 8, low=1, high=2)), "a b, a b -> a b; linear 0"),
    Row("div", lax.div, (INTS, 1 + below(5, 4, 8)), _TWO, "of integers"),
    *(Row(name, _BINARY[name], (np.float32(low), np.float32(high)), "[], [] -> []", f"of {low} and {high}")
      for name in ("max", "min") for low, high in ((1.0, 3.0), (-1.0, 0.25))),
    Row("select_n", lax.select_n, (of(jnp.bool_, 4, 8), X, X), "a b, a b, a b -> a b; linear 1 2; moves 1 2"),
    Row("select_n", lax.select_n, (of(jnp.bool_), X, X), "[], a b, a b -> a b; linear 1 2; moves 1 2", "by a scalar"),
    Row("select_n", lax.select_n, (below(3, 4, 8), X, X, X),
        "a b, a b, a b, a b -> a b; linear 1 2 3; moves 1 2 3", "of three"),
    Row("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (X,), "[], a b, [] -> a b"),
    Row("clamp", lax.clamp, (X, X, X), "a b, a b, a b -> a b", "by arrays"),
    Row("convert_element_type", lambda x: x.astype(jnp.bfloat16), (X,), _SAME, "to less"),
    Row("convert_element_type", lambda x: x.astype(jnp.float32), (of(jnp.bfloat16, 4, 8),), _MOVED, "to more"),
    Row("convert_element_type", lambda x: x.astype(jnp.float16), (of(jnp.bfloat16, 4, 8),), _SAME, "to other"),
    Row("convert_element_type", lambda x: x.astype(jnp.complex64), (X,), _LINEAR, "to complex"),
    Row("convert_element_type", _real, (of(jnp.complex64, 4, 8),), _LINEAR, "to real"),
    Row("convert_element_type", lambda x: x.astype(jnp.float32), (INTS,), _SAME, "of integers"),
    Row("convert_element_type", lambda x: x.astype(jnp.int32), (X,), _SAME, "to integers"),
    Row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,), _SAME),
    Row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,), "a b -> a b w; whole w",
        "to narrower"),
    Row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.float32),
        (below(99, 4, 8, 4, dtype=np.uint8),),
        "a b w -> a b; whole w", "to wider"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected
