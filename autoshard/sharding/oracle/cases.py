"""The cases of the oracle: every distinct equation of a function, with the values of its operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.custom_ops.opaque_primitive import defined_at
from autoshard.spmdrules.ir.program import called


@shown
@dataclass(frozen=True, eq=False)
class Case:
    """One equation with concrete operands."""

    eqn: Any
    operands: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def avals(self) -> tuple[Any, ...]:
        """The operands' avals."""
        return tuple(v.aval for v in self.eqn.invars)

    @property
    def results(self) -> tuple[Any, ...]:
        """The results' avals."""
        return tuple(v.aval for v in self.eqn.outvars)

    @property
    def source(self) -> str:
        """The line of user code that the equation came from. For an `@operator`, where its function starts."""
        return _compat.source_line(self.eqn) or defined_at(self.eqn)

    def call(self, operands: Sequence[Any], params: Any = None) -> list[Any]:
        """Runs the operator on these operands, with `params` in place of the equation's parameters if given."""
        return _compat.bind(self.eqn, self.eqn.params if params is None else params, *operands)

    def run(self, operands: Sequence[np.ndarray], params: Any = None) -> list[np.ndarray]:
        """`call` on NumPy operands, with NumPy results (see `to_numpy`)."""
        arrays = [from_numpy(x, like) for x, like in zip(operands, self.operands, strict=True)]
        return [to_numpy(x) for x in self.call(arrays, params)]


def is_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_numpy(x: Any) -> np.ndarray:
    """Converts to a NumPy array. Typed PRNG keys become their words, in a trailing dimension."""
    if not x.size and not is_key(x.dtype):
        return np.zeros(x.shape, x.dtype)  # XLA may return shards of an empty array in wrong shapes
    return np.asarray(jax.random.key_data(x)) if is_key(x.dtype) else np.asarray(x)


def from_numpy(x: np.ndarray, like: Any) -> Any:
    """Undoes `to_numpy`: words become keys if `like` is an array of keys."""
    array = jax.device_put(x)  # `jnp.asarray` compiles a program for each shape and type
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key(like.dtype) else array


def error_summary(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def collect(fn: Any, args: Sequence[Any]) -> list[Case]:
    """Runs `fn` equation by equation; keeps the first equation of each combination of primitive, types and parameters.

    Args:
        fn: any function that JAX can trace.
        args: pytrees of arrays. A `ShapeDtypeStruct` is replaced by random values.
    """
    concrete = jax.tree.map(example, tuple(args), is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
    closed = jax.make_jaxpr(fn)(*concrete)
    cases: dict[Any, Case] = {}
    _interpret(closed, jax.tree.leaves(concrete), cases)
    return list(cases.values())


def example(leaf: Any) -> Any:
    """Returns arrays as they are, and random values for a `ShapeDtypeStruct` (integers are 0 or 1)."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_key(leaf.dtype):
        return jax.random.split(jax.random.key(0), leaf.shape)
    rng = np.random.default_rng(len(leaf.shape))
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype))
    return jax.device_put(rng.integers(0, 2, leaf.shape).astype(leaf.dtype))


def _interpret(closed: Any, args: Iterable[Any], cases: dict[Any, Case]) -> list[Any]:
    """Evaluates a jaxpr, closed or open, and records its equations in `cases`."""
    jaxpr = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        literal = isinstance(atom, _compat.Literal)
        return jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)) if literal else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], cases), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any], cases: dict[Any, Case]) -> list[Any]:
    name = eqn.primitive.name
    if call := called(eqn):  # a call: its equations are checked instead
        return _interpret(call[1], values, cases)
    if name in _NESTED:
        for jaxpr, operands in _NESTED[name](eqn.params, values):
            _interpret(jaxpr, operands, cases)
        return _compat.bind(eqn, eqn.params, *values)
    case = Case(eqn, tuple(jnp.asarray(v) for v in values))
    key = (eqn.primitive, tuple((a.shape, a.dtype) for a in case.avals), str(sorted(eqn.params.items(), key=str)))
    if not any(a.dtype == jax.dtypes.float0 for a in (*case.avals, *case.results)):  # tangents of integers have no data
        cases.setdefault(key, case)
    return case.call(case.operands)


def _scan_body(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """The body, with the slices of the first iteration."""
    if not params["length"]:
        return []
    consts, carry = _compat.scan_arity(params)
    first = -1 if params["reverse"] else 0
    whole, stacked = values[: consts + carry], values[consts + carry :]
    return [(params["jaxpr"], [*whole, *(x[first] for x in stacked)])]


def _while_jaxprs(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """The condition and the body, with the initial carry."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carry = values[n_cond + n_body :]
    body = values[n_cond : n_cond + n_body]
    return [(params["cond_jaxpr"], [*values[:n_cond], *carry]), (params["body_jaxpr"], [*body, *carry])]


def _branches(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Every branch, with the operands."""
    return [(branch, values[1:]) for branch in params["branches"]]


_NESTED = {"scan": _scan_body, "while": _while_jaxprs, "cond": _branches}
