"""Random operators: ranks, sizes, types and parameters, with values for which a wrong rule gives a wrong result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Drawn = tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]
Draw = Callable[..., Any]

SIZES = st.sampled_from([4, 6, 2, 8, 3, 1, 5, 0])
NONZERO = st.sampled_from([4, 6, 2, 3, 1])
FLOATS = ("float32", "bfloat16")
NUMBERS = (*FLOATS, "int32", "int8", "complex64")


def shapes(least: int = 0, most: int = 4, sizes: Any = SIZES) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `least` to `most` dimensions."""
    return st.lists(sizes, min_size=least, max_size=most).map(tuple)


def values(draw: Draw, shape: Sequence[int], dtype: str, special: bool = True) -> np.ndarray:
    """Numbers of both signs with ties; if `special`, floats sometimes include NaN, infinities and signed zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    integers = rng.integers(-4, 5, tuple(shape))
    if dtype == "bool":
        return integers > 0
    if dtype.startswith("int"):
        return integers.astype(dtype)
    floats = integers / 2
    if dtype.startswith("complex"):
        return (floats + 1j * rng.integers(-3, 4, tuple(shape))).astype(dtype)
    if special and draw(st.integers(0, 2)) == 0:
        odd = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], tuple(shape))
        floats = np.where(rng.uniform(size=tuple(shape)) < 0.2, odd, floats)
    return np.asarray(floats, jnp.dtype(dtype))


def unary(draw: Draw) -> Drawn:
    """An elementwise function of one array."""
    real = [lax.sin, lax.exp, lax.tanh, lax.erf_inv, lax.lgamma, lax.digamma, lax.rsqrt, lax.cbrt, lax.floor, lax.round,
            lax.sign, lax.is_finite, lax.logistic, functools.partial(lax.reduce_precision, exponent_bits=5,
            mantissa_bits=4), functools.partial(lax.integer_pow, y=3)]  # fmt: skip
    by_type = {
        **dict.fromkeys(FLOATS, real), "int32": [lax.neg, lax.abs, lax.bitwise_not, lax.population_count, lax.clz],
        "int8": [lax.neg, lax.sign, lambda x: lax.convert_element_type(x, jnp.float32)], "bool": [lax.bitwise_not],
        "complex64": [lax.real, lax.imag, lax.conj, lax.abs, lax.exp],
    }  # fmt: skip
    dtype = draw(st.sampled_from(sorted(by_type)))
    fn = draw(st.sampled_from(by_type[dtype]))
    return "unary", fn, (values(draw, draw(shapes()), dtype),)


def binary(draw: Draw) -> Drawn:
    """An elementwise function of two arrays."""
    real = [lax.add, lax.mul, lax.sub, lax.div, lax.max, lax.min, lax.rem, lax.pow, lax.atan2, lax.nextafter, lax.lt]
    integer = [lax.add, lax.mul, lax.max, lax.bitwise_and, lax.bitwise_xor, lax.shift_left, lax.eq, lax.ge]
    by_type = {**dict.fromkeys(FLOATS, real), "int32": integer, "int8": integer,
               "complex64": [lax.add, lax.mul, lax.eq], "bool": [lax.bitwise_or, lax.bitwise_xor, lax.ne]}  # fmt: skip
    dtype, shape = draw(st.sampled_from(sorted(by_type))), draw(shapes())
    fn = draw(st.sampled_from(by_type[dtype]))
    return "binary", fn, (values(draw, shape, dtype), values(draw, shape, dtype))


def choice(draw: Draw) -> Drawn:
    """A selection among arrays, or a clamp."""
    shape, dtype = draw(shapes()), draw(st.sampled_from(["float32", "int32"]))
    x, y = (values(draw, shape, dtype) for _ in range(2))
    if draw(st.booleans()):
        which = values(draw, shape if draw(st.booleans()) else (), "bool")
        return "select_n", lax.select_n, (which, x, y)
    bound = shape if draw(st.booleans()) else ()
    return "clamp", lax.clamp, (values(draw, bound, dtype), x, values(draw, bound, dtype))


def reduction(draw: Draw) -> Drawn:
    """A reduction over some dimensions."""
    shape = draw(shapes(1))
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int32", "bool"]))
    kinds = [lax.reduce_and, lax.reduce_or, lax.reduce_xor] if dtype == "bool" else [
        lax.reduce_sum, lax.reduce_prod, lax.reduce_max, lax.reduce_min]  # fmt: skip
    fn = draw(st.sampled_from(kinds))
    if fn in (lax.reduce_max, lax.reduce_min) and 0 in shape:
        shape = tuple(n or 2 for n in shape)
    return "reduction", lambda x: fn(x, axes), (values(draw, shape, dtype),)


def position(draw: Draw) -> Drawn:
    """The position of the largest or smallest element, with ties and NaN."""
    shape = draw(shapes(1, 3, NONZERO))
    axis = draw(st.integers(0, len(shape) - 1))
    fn = draw(st.sampled_from([lax.argmax, lax.argmin]))
    dtype = draw(st.sampled_from(["float32", "int32"]))
    return "position", lambda x: fn(x, axis, jnp.int32), (values(draw, shape, dtype),)


def cumulative(draw: Draw) -> Drawn:
    """A running sum, product, maximum, minimum or logsumexp."""
    shape = draw(shapes(1, 3))
    axis, reverse = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    fn = draw(st.sampled_from([lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]))
    return "cumulative", lambda x: fn(x, axis, reverse), (values(draw, shape, "float32"),)


def order(draw: Draw) -> Drawn:
    """A sort of one or more arrays, or the largest few."""
    shape = draw(shapes(1, 3))
    axis = draw(st.integers(0, len(shape) - 1))
    keys = values(draw, shape, draw(st.sampled_from(["float32", "int32"])))
    if draw(st.booleans()):
        payload = np.arange(keys.size, dtype=np.int32).reshape(shape)
        return "sort", lambda *xs: lax.sort(xs, dimension=axis, num_keys=1), (keys, payload)
    return "top_k", lambda x: lax.top_k(x, min(2, shape[-1])), (keys,)


def contraction(draw: Draw) -> Drawn:
    """A `dot_general` with batch, contracted and free dimensions in any order."""
    batch, summed, left, right = (draw(shapes(0, most, SIZES)) for most in (2, 2, 2, 2))
    dtype = draw(st.sampled_from(NUMBERS))

    def operand(free: tuple[int, ...]) -> tuple[tuple[int, ...], list[int]]:
        sizes = (*batch, *summed, *free)
        at = draw(st.permutations(range(len(sizes))))
        return tuple(sizes[i] for i in at), [at.index(i) for i in range(len(sizes))]

    (a, place_a), (b, place_b) = operand(left), operand(right)
    n, k = len(batch), len(batch) + len(summed)
    dims = (place_a[n:k], place_b[n:k]), (place_a[:n], place_b[:n])
    wide = {"bfloat16": jnp.float32, "int8": jnp.int32}.get(dtype)
    fn = functools.partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=wide)
    return "dot_general", fn, (values(draw, a, dtype, False), values(draw, b, dtype, False))


def arrangement(draw: Draw) -> Drawn:
    """An operator that moves elements: reshape, transpose, broadcast, reverse, slice, pad, concatenate, split."""
    shape, dtype = draw(shapes(1, 3)), draw(st.sampled_from([*NUMBERS, "bool"]))
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    kind = draw(st.sampled_from(["reshape", "transpose", "broadcast", "rev", "slice", "pad", "concatenate", "split"]))
    operands: tuple[np.ndarray, ...] = (values(draw, shape, dtype),)
    match kind:
        case "reshape":
            fn = functools.partial(jnp.reshape, shape=_regrouped(draw, shape))
        case "transpose":
            fn = functools.partial(lax.transpose, permutation=draw(st.permutations(range(len(shape)))))
        case "broadcast":
            new = (*draw(shapes(0, 1)), *shape)
            fn = functools.partial(jnp.broadcast_to, shape=new)
        case "rev":
            fn = functools.partial(lax.rev, dimensions=(axis,))
        case "slice":
            start = draw(st.integers(0, size))
            stop, stride = draw(st.integers(start, size)), draw(st.integers(1, 3))
            fn = functools.partial(lax.slice_in_dim, start_index=start, limit_index=stop, stride=stride, axis=axis)
        case "pad":
            low, high = draw(st.integers(-min(1, size), 2)), draw(st.integers(0, 3))
            config = [(low, high, draw(st.integers(0, 2))) if d == axis else (0, 0, 0) for d in range(len(shape))]
            fn = functools.partial(lax.pad, padding_config=config)
            operands = (*operands, values(draw, (), dtype))
        case "concatenate":
            other = (*shape[:axis], draw(SIZES), *shape[axis + 1 :])
            operands = (*operands, values(draw, other, dtype))
            fn = lambda *xs: lax.concatenate(xs, axis)  # noqa: E731
        case _:
            at = draw(st.integers(0, size))
            fn = lambda x: lax.split(x, (at, size - at), axis)  # noqa: E731
    return kind, fn, operands


def _regrouped(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape with the same number of elements: neighbouring dimensions are merged, then one is split."""
    at = draw(st.integers(0, len(shape) - 1))
    merged = (*shape[:at], int(np.prod(shape[at : at + 2])), *shape[at + 2 :])
    part = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if merged[at] % n == 0]))
    return (*merged[:at], part, merged[at] // part, *merged[at + 1 :])


def lookup(draw: Draw) -> Drawn:
    """Reads or writes at positions: several indexed dimensions, batching dimensions, several modes."""
    shape = draw(shapes(1, 3, NONZERO))
    x = values(draw, shape, draw(st.sampled_from(["float32", "int32", "bfloat16"])))
    mode = draw(st.sampled_from(["clip", "fill", "promise_in_bounds"]))
    where = draw(st.sampled_from(["leading", "along", "batched"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    safe = mode == "promise_in_bounds"

    def at(size: int, count: Any) -> np.ndarray:
        return rng.integers(0 if safe else -2, size if safe else size + 2, count).astype(np.int32)

    if where == "along":
        axis = draw(st.integers(0, len(shape) - 1))
        index = at(shape[axis], tuple(4 if d == axis else n for d, n in enumerate(shape)))
        return "along", lambda x, i: jnp.take_along_axis(x, i, axis, mode=mode), (x, index)
    write = draw(st.sampled_from([None, "add", "max", "min", "multiply"]))
    count = draw(shapes(1, 2))
    indices = tuple(at(shape[d], count) for d in range(draw(st.integers(1, len(shape)))))

    def fn(x: Any, *indices: Any) -> Any:
        x = jnp.asarray(x)
        if write is None:
            return x.at[indices].get(mode=mode)
        return getattr(x.at[indices], write)(jnp.ones((), x.dtype), mode=mode)

    if where == "batched":
        rows = draw(NONZERO)
        stacked = tuple(np.stack([at(shape[d], count) for _ in range(rows)]) for d in range(len(indices)))
        return "batched lookup", jax.vmap(fn), (values(draw, (rows, *shape), str(x.dtype)), *stacked)
    return "lookup", fn, (x, *indices)


def dynamic_slice(draw: Draw) -> Drawn:
    """A slice read or written at a position computed at run time."""
    shape = draw(shapes(1, 3, NONZERO))
    sizes = tuple(draw(st.integers(1, n)) for n in shape)
    x, at = values(draw, shape, "float32"), [np.int32(draw(st.integers(-1, n))) for n in shape]
    if draw(st.booleans()):
        return "dynamic_slice", lambda x, *at: lax.dynamic_slice(x, at, sizes), (x, *map(np.asarray, at))
    update = values(draw, sizes, "float32")
    return (
        "dynamic_update_slice",
        lambda x, u, *at: lax.dynamic_update_slice(x, u, at),
        (x, update, *map(np.asarray, at)),
    )


def convolution(draw: Draw) -> Drawn:
    """A convolution with strides, dilation, padding and groups, or a gradient of one."""
    rank, groups = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2]))
    batch, features, filters = (
        draw(NONZERO),
        groups * draw(st.sampled_from([1, 2])),
        groups * draw(st.sampled_from([1, 2])),
    )
    space = draw(st.lists(st.sampled_from([4, 6, 8]), min_size=rank, max_size=rank))
    window = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.sampled_from([1, 2]), min_size=rank, max_size=rank))
    dilated = draw(st.booleans())
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    letters = "HW"[:rank]
    fn = functools.partial(
        lax.conv_general_dilated, window_strides=strides, padding=padding, feature_group_count=groups,
        rhs_dilation=(2 if dilated else 1,) * rank, dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )  # fmt: skip
    x = values(draw, (batch, *space, features), "float32", False)
    kernel = values(draw, (*window, features // groups, filters), "float32", False)
    out = jax.eval_shape(fn, x, kernel).shape
    if 0 in out or draw(st.booleans()):
        return "convolution", fn, (x, kernel)
    return (
        "convolution_grad",
        lambda x, k, ct: jax.vjp(fn, x, k)[1](ct),
        (x, kernel, values(draw, out, "float32", False)),
    )


def window(draw: Draw) -> Drawn:
    """Pooling, or its gradient."""
    shape = (draw(NONZERO), draw(st.sampled_from([4, 6, 8])), draw(NONZERO))
    size, stride, padding = (
        draw(st.sampled_from([2, 3])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(["SAME", "VALID"])),
    )
    kind = draw(st.sampled_from(["max", "sum"]))
    start, op = (-np.inf, lax.max) if kind == "max" else (0.0, lax.add)
    pool = lambda x: lax.reduce_window(x, start, op, (1, size, 1), (1, stride, 1), padding)  # noqa: E731
    x = values(draw, shape, "float32", False)
    if draw(st.booleans()):
        return f"{kind} pooling", pool, (x,)
    ct = values(draw, jax.eval_shape(pool, x).shape, "float32", False)
    return f"{kind} pooling_grad", lambda x, ct: jax.vjp(pool, x)[1](ct), (x, ct)


@st.composite
def exchanges(draw: Draw) -> tuple[str, Callable[..., Any], np.ndarray, Mesh]:
    """A collective between two devices: all-to-all, all-gather, psum, reduce-scatter or a permutation."""
    kind = draw(st.sampled_from(["all_to_all", "all_gather", "psum", "psum_scatter", "ppermute"]))
    sizes = [2, 1, 4] if kind in ("all_gather", "psum_scatter") else [2, 1, 4, 0]  # XLA refuses empty ones
    shape = tuple(2 * n for n in draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=3)))
    held, other = draw(st.permutations(range(len(shape))))[:2]
    sharded = P(*("p" if d == held else None for d in range(len(shape))))
    moved = P(*("p" if d == other else None for d in range(len(shape))))
    local, out = {
        "all_to_all": (lambda x: lax.all_to_all(x, "p", other, held, tiled=True), moved),
        "all_gather": (lambda x: lax.all_gather(x, "p", axis=held, tiled=True), P()),
        "psum": (lambda x: lax.psum(x, "p"), P()),
        "psum_scatter": (lambda x: lax.psum_scatter(x, "p", scatter_dimension=other, tiled=True), moved),
        "ppermute": (lambda x: lax.ppermute(x, "p", [(0, 1), (1, 0)]), sharded),
    }[kind]
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("p",))
    fn = jax.shard_map(local, mesh=mesh, in_specs=sharded, out_specs=out, check_vma=False)
    return kind, fn, values(draw, shape, "float32", False), mesh


OPERATORS = (unary, binary, choice, reduction, position, cumulative, order, contraction, contraction, arrangement,
             arrangement, lookup, lookup, dynamic_slice, convolution, window)  # fmt: skip


@st.composite
def operators(draw: Draw) -> Drawn:
    """A name, a function and its arguments."""
    return draw(st.sampled_from(OPERATORS))(draw)
