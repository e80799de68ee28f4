"""Random programs: chains of operators over arrays of random ranks and sizes, and placements of their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from autoshard.spmdrules.core.placement import Placement, Spec

Step = Callable[..., Any]
Draw = Callable[..., Any]

MESHES: tuple[dict[str, int], ...] = ({"x": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 4})
SIZES = st.sampled_from([4, 8, 2, 6, 3, 1, 5, 0])
INDICES = 2  # number of leading arguments of a chain that are positions; the other arguments are floats
_MOST_ELEMENTS = 4096  # chosen


@dataclass(frozen=True)
class Chain:
    """A program: each step is a function of some earlier arrays; the last few arrays are the results.

    Attributes:
        args: the arguments.
        steps: `(name, function, numbers of its operands)`; each step adds one array.
        outputs: the numbers of the arrays that are returned.
    """

    args: tuple[np.ndarray, ...]
    steps: tuple[tuple[str, Step, tuple[int, ...]], ...]
    outputs: tuple[int, ...]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        arrays = list(args)
        for _, fn, operands in self.steps:
            arrays.append(fn(*(arrays[i] for i in operands)))
        return tuple(arrays[i] for i in self.outputs)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.args)
        return f"Chain({shapes}; {'; '.join(f'{name}{list(i)}' for name, _, i in self.steps)}; {self.outputs})"


@st.composite
def chains(draw: Draw, longest: int = 7, branching: bool = False) -> Chain:
    """Chains of up to `longest` operators over two arrays of positions and one to three of floats.

    If `branching`, they include branches, and loops whose number of iterations depends on values.
    """
    shapes = [draw(shapes_of()) for _ in range(draw(st.integers(1, 3)))]
    positions = [positions_of(draw(st.sampled_from([4, 2, 3, 0])), draw(st.integers(0, 99))) for _ in range(INDICES)]
    args = (*positions, *(values(shape, draw(st.integers(0, 99))) for shape in shapes))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    steps: list[tuple[str, Step, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, longest))):
        operand = draw(st.integers(INDICES, len(arrays) - 1))
        step = draw(st.sampled_from(STEPS + BRANCHING if branching else STEPS))
        step_drawn = step(draw, arrays, operand)
        if step_drawn is None:
            continue
        fn, operands = step_drawn
        aval = jax.eval_shape(fn, *(arrays[i] for i in operands))
        if math.prod(aval.shape) <= _MOST_ELEMENTS and len(aval.shape) <= 5:
            steps.append((step.__name__, fn, operands))
            arrays.append(aval)
    last = len(arrays) - 1
    outputs = tuple(sorted({last, *draw(st.lists(st.integers(INDICES, last), max_size=2))}))
    return Chain(args, tuple(steps), outputs)


def shapes_of(most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to `most` dimensions, with even and odd sizes, 1 and 0."""
    return st.lists(SIZES, min_size=0, max_size=most).map(tuple)


def values(shape: Sequence[int], seed: int) -> np.ndarray:
    """Integers and halves of both signs, with ties."""
    return np.asarray(np.random.default_rng(seed).integers(-5, 6, tuple(shape)) / 2, np.float32)


def positions_of(count: int, seed: int) -> np.ndarray:
    """Positions, with duplicates, some of them negative or beyond the end."""
    return np.random.default_rng(seed).integers(-2, 7, count).astype(np.int32)


@st.composite
def placements(draw: Draw, mesh: dict[str, int], shape: Sequence[int], partial: bool = True) -> Placement:
    """Placements of an array: each mesh axis shards a dimension that it divides, is partial, or neither."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    terms: list[tuple[str, str]] = []
    op = draw(st.sampled_from(["sum", "sum", "max", "min"])) if partial else ""
    for axis in draw(st.permutations(list(mesh))):
        fits = [d for d, n in enumerate(shape) if n and n % math.prod(mesh[a] for a in (*spec[d], axis)) == 0]
        choice = draw(st.sampled_from([*fits, *fits, "replicated", *(["partial"] if partial else [])]))
        if choice == "partial":
            terms.append((axis, op))
        elif choice != "replicated":
            spec[choice] = (*spec[choice], axis)
    return Placement(tuple(spec), tuple(sorted(terms)))


@st.composite
def goals(draw: Draw, mesh: dict[str, int], shape: Sequence[int]) -> Spec | None:
    """The requested spec of a result, or None."""
    return draw(placements(mesh, shape, partial=False)).spec if draw(st.booleans()) else None


def _axis(draw: Draw, x: Any) -> int:
    return draw(st.integers(0, len(x.shape) - 1))


def unary(draw: Draw, arrays: list[Any], i: int) -> Any:
    """An elementwise function, linear or not."""
    fns = [jnp.sin, jnp.tanh, jnp.negative, jnp.abs, lambda x: x * 0.5, lambda x: x + 1.0, jnp.sign, jax.nn.relu,
           lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x: (x > 0).astype(jnp.float32)]  # fmt: skip
    return draw(st.sampled_from(fns)), (i,)


def binary(draw: Draw, arrays: list[Any], i: int) -> Any:
    """An elementwise function of two arrays, broadcast against each other."""
    fitting = [j for j, x in enumerate(arrays) if j >= INDICES and _fits(arrays[i].shape, x.shape)]
    j = draw(st.sampled_from(fitting))
    select = lambda x, y: jnp.where(x > y, x, y * 0.5)  # noqa: E731
    fns = [jnp.add, jnp.subtract, lambda x, y: jnp.tanh(x) * y, jnp.maximum, jnp.minimum, select]
    return draw(st.sampled_from(fns)), (i, j)


def _fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def reduction(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A reduction over some dimensions, with or without `keepdims`."""
    x = arrays[i]
    if not x.shape:
        return None
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(x.shape) - 1), min_size=1))))
    fns = [jnp.sum, jnp.sum, jnp.mean] if 0 in x.shape else [jnp.sum, jnp.sum, jnp.mean, jnp.max, jnp.min, _product]
    return functools.partial(draw(st.sampled_from(fns)), axis=axes, keepdims=draw(st.booleans())), (i,)


def _product(x: Any, axis: Any, keepdims: bool) -> Any:
    return jnp.prod(jnp.tanh(x), axis=axis, keepdims=keepdims)


def along(draw: Draw, arrays: list[Any], i: int) -> Any:
    """An operator along one dimension."""
    x = arrays[i]
    if not x.shape:
        return None
    axis = _axis(draw, x)
    fns = [jnp.cumsum, jnp.sort, jnp.flip, jax.nn.softmax, lambda x, axis: lax.cummax(x, axis, reverse=True),
           lambda x, axis: jnp.roll(x, 1, axis), lambda x, axis: jnp.concatenate([x, x * 2], axis),
           lambda x, axis: lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis), jnp.expand_dims,
           lambda x, axis: lax.slice_in_dim(x, 0, x.shape[axis], 2, axis), lambda x, axis: jnp.repeat(x, 2, axis),
           lambda x, axis: jnp.pad(x, [(1, 1) if d == axis else (0, 0) for d in range(x.ndim)])]  # fmt: skip
    if x.shape[axis]:
        fns += [lambda x, axis: jnp.argmax(x, axis).astype(jnp.float32), lambda x, axis: jnp.take(x, 0, axis),
                lambda x, axis: lax.dynamic_slice_in_dim(x, jnp.int32(1), max(1, x.shape[axis] // 2), axis),
                lambda x, axis: lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, 1, axis=axis), 1, axis),
                lambda x, axis: lax.top_k(jnp.moveaxis(x, axis, -1), 1)[0]]  # fmt: skip
    return functools.partial(draw(st.sampled_from(fns)), axis=axis), (i,)


def arrangement(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A transpose, a broadcast, or a reshape that merges two dimensions or splits one."""
    shape = arrays[i].shape
    kind = draw(st.sampled_from(["transpose", "merge", "split", "broadcast"]))
    if kind == "transpose":
        return functools.partial(jnp.transpose, axes=tuple(draw(st.permutations(range(len(shape)))))), (i,)
    if kind == "broadcast":
        return functools.partial(jnp.broadcast_to, shape=(draw(st.sampled_from([2, 4])), *shape)), (i,)
    if len(shape) < (2 if kind == "merge" else 1):
        return None
    at = draw(st.integers(0, len(shape) - (2 if kind == "merge" else 1)))
    if kind == "merge":
        new = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    else:
        part = draw(st.sampled_from([n for n in (1, 2, 3, 4) if shape[at] % n == 0]))
        new = (*shape[:at], part, shape[at] // part, *shape[at + 1 :])
    return functools.partial(jnp.reshape, shape=new), (i,)


def product(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A contraction of an array with another, or with itself."""
    x = arrays[i]
    others = range(INDICES, len(arrays))
    dims = [(j, a, b) for j in others for a in range(len(x.shape)) for b in range(len(arrays[j].shape))]
    pairs = [(j, a, b) for j, a, b in dims if x.shape[a] == arrays[j].shape[b]]
    if not pairs:
        return None
    j, a, b = draw(st.sampled_from(pairs))
    return (lambda x, y: jnp.tanh(jnp.tensordot(x, y, ((a,), (b,))) * 0.25)), (i, j)


def lookup(draw: Draw, arrays: list[Any], i: int) -> Any:
    """Rows read or written at positions, with duplicates and positions beyond the end."""
    x = arrays[i]
    if not x.shape:
        return None
    axis, j = _axis(draw, x), draw(st.integers(0, INDICES - 1))
    if draw(st.booleans()):
        if not x.shape[axis] and arrays[j].shape[0]:
            return None
        mode = draw(st.sampled_from(["clip", "fill", "wrap"]))
        return (lambda at, x: jnp.nan_to_num(jnp.take(x, at, axis, mode=mode))), (j, i)
    where = (slice(None),) * axis
    how = draw(st.sampled_from(["add", "max", "multiply"]))
    return (lambda at, x: getattr(jnp.asarray(x).at[(*where, at)], how)(0.5)), (j, i)


def loop(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A recurrence over the first dimension: its last carry, or its output at each step."""
    shape = arrays[i].shape
    if not shape or not shape[0]:
        return None
    reverse, last = draw(st.booleans()), draw(st.booleans())

    def recurrence(x: Any) -> Any:
        carry, steps = lax.scan(lambda h, x: (jnp.tanh(h + x), h.sum()), jnp.zeros(shape[1:]), x, reverse=reverse)
        return carry if last else steps

    return recurrence, (i,)


def position(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A function of element positions: a ramp or a triangular mask."""
    x = arrays[i]
    if not x.shape:
        return None
    axis = _axis(draw, x)
    ramp = lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, axis)  # noqa: E731
    if len(x.shape) >= 2 and draw(st.booleans()):
        return jnp.tril, (i,)
    return ramp, (i,)


def windows(draw: Draw, arrays: list[Any], i: int) -> Any:
    """Windows read or written at a different position for each element of the first dimension."""
    x = arrays[i]
    rows = [j for j in range(INDICES) if len(x.shape) >= 2 and arrays[j].shape == x.shape[:1]]
    if not rows or not x.shape[1]:
        return None
    size = draw(st.integers(1, x.shape[1]))
    if draw(st.booleans()):
        return (lambda at, x: jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, size, 0))(x, at)), (rows[0], i)
    write = lambda x, at: lax.dynamic_update_slice_in_dim(x, x[:size] * 2.0, at, 0)  # noqa: E731
    return (lambda at, x: jax.vmap(write)(x, at)), (rows[0], i)


def grouped(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A grouped matrix product, with empty groups and rows that belong to no group."""
    x = arrays[i]
    if len(x.shape) != 2 or 0 in x.shape:
        return None
    groups, features, seed = draw(st.sampled_from([4, 2, 3])), draw(st.sampled_from([4, 6])), draw(st.integers(0, 99))
    ends = np.sort(np.random.default_rng(seed).integers(0, x.shape[0] + 1, groups))
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    matrices = values((groups, x.shape[1], features), seed)
    return (lambda x: lax.ragged_dot(jnp.tanh(x), jnp.asarray(matrices), jnp.asarray(sizes))), (i,)


def wrapped(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A function under a transformation: jit, checkpoint, custom_vjp, custom_jvp or vmap."""
    x = arrays[i]
    inner = lambda x: jnp.sin(x) * jnp.cumsum(x, 0) if x.ndim else jnp.sin(x) * x  # noqa: E731
    if not x.shape:
        return jax.checkpoint(inner), (i,)
    own = jax.custom_vjp(inner)
    own.defvjp(lambda x: (inner(x), x), lambda x, g: (g * jnp.cos(x) + jnp.mean(g, 0),))
    tangent = jax.custom_jvp(inner)
    tangent.defjvp(lambda xs, ts: (inner(*xs), ts[0] * jnp.cos(xs[0])))
    mapped = jax.vmap(inner, in_axes=len(x.shape) - 1, out_axes=0)
    return draw(st.sampled_from([jax.jit(inner), jax.checkpoint(inner), own, tangent, mapped])), (i,)


def branch(draw: Draw, arrays: list[Any], i: int) -> Any:
    """One of two functions, depending on the array's values."""
    fns = [jnp.sin, lambda x: jnp.flip(x), lambda x: x - jnp.mean(x) if x.size else x, jnp.zeros_like]
    first, second = draw(st.permutations(fns))[:2]
    return (lambda x: lax.cond(jnp.sum(x) > 0.1234, first, second, x)), (i,)


def until(draw: Draw, arrays: list[Any], i: int) -> Any:
    """A while loop whose end depends on the values that it carries; it is not differentiated."""
    axes = (0,) * bool(arrays[i].shape)

    def run(x: Any) -> Any:
        unfinished = lambda state: (jnp.sum(jnp.abs(state[1])) > 1.0) & (state[0] < 5)  # noqa: E731
        step = lambda state: (state[0] + 1, 0.5 * state[1] - jnp.sum(state[1], axes, keepdims=True) * 0.125)  # noqa: E731
        return lax.while_loop(unfinished, step, (jnp.int32(0), lax.stop_gradient(x)))[1]

    return run, (i,)


STEPS = (unary, binary, binary, reduction, along, along, arrangement, product, product, lookup, loop, position,
         windows, grouped, wrapped)  # fmt: skip
BRANCHING = (branch, until)
