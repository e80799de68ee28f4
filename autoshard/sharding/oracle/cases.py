"""What the oracle examines: every different equation of a function, with the values that flow into it."""

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
        """The user's line that the equation came from; of an operator that is itself examined, where it starts."""
        return _compat.source_line(self.eqn) or defined_at(self.eqn)

    def call(self, operands: Sequence[Any], params: Any = None) -> list[Any]:
        """Runs the operator on other operands, and with other parameters if some are given."""
        return _compat.bind(self.eqn, self.eqn.params if params is None else params, *operands)

    def run(self, operands: Sequence[np.ndarray], params: Any = None) -> list[np.ndarray]:
        """`call` on plain operands, with plain results (see `plain`)."""
        arrays = [typed(x, like) for x, like in zip(operands, self.operands, strict=True)]
        return [plain(x) for x in self.call(arrays, params)]


def is_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def plain(x: Any) -> np.ndarray:
    """An array as NumPy has it; typed PRNG keys as their words, in a trailing dimension."""
    if not x.size and not is_key(x.dtype):
        return np.zeros(x.shape, x.dtype)  # pieces of nothing may come back from XLA in odd shapes
    return np.asarray(jax.random.key_data(x)) if is_key(x.dtype) else np.asarray(x)


def typed(x: np.ndarray, like: Any) -> Any:
    """Undoes `plain`: words become keys where `like` is made of keys."""
    array = jnp.asarray(x)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key(like.dtype) else array


def brief(error: Exception) -> str:
    """An error's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def collect(fn: Any, args: Sequence[Any]) -> list[Case]:
    """Runs `fn` equation by equation and keeps the first of each kind (primitive, operands' types, parameters).

    Args:
        fn: any traceable function.
        args: pytrees of arrays; a `ShapeDtypeStruct` stands for random values.
    """
    concrete = jax.tree.map(example, tuple(args), is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
    closed = jax.make_jaxpr(fn)(*concrete)
    cases: dict[Any, Case] = {}
    _interpret(closed, jax.tree.leaves(concrete), cases)
    return list(cases.values())


def example(leaf: Any) -> Any:
    """A value that stands for a shape: zeros-like data that the oracle may run on."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_key(leaf.dtype):
        return jax.random.split(jax.random.key(0), leaf.shape)
    rng = np.random.default_rng(len(leaf.shape))
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)


def _interpret(closed: Any, args: Iterable[Any], cases: dict[Any, Case]) -> list[Any]:
    """Evaluates a jaxpr, closed or open, and notes its equations in `cases`."""
    jaxpr = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        known = isinstance(atom, _compat.Literal)
        return jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)) if known else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], cases), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any], cases: dict[Any, Case]) -> list[Any]:
    name = eqn.primitive.name
    if call := called(eqn):  # its equations are the caller's own: it is entered, not examined
        return _interpret(call[1], values, cases)
    if name in _BLOCKS:
        for jaxpr, operands in _BLOCKS[name](eqn.params, values):
            _interpret(jaxpr, operands, cases)
        return _compat.bind(eqn, eqn.params, *values)
    case = Case(eqn, tuple(jnp.asarray(v) for v in values))
    key = (eqn.primitive, tuple((a.shape, a.dtype) for a in case.avals), str(sorted(eqn.params.items(), key=str)))
    if not any(a.dtype == jax.dtypes.float0 for a in (*case.avals, *case.results)):  # tangents of integers: no numbers
        cases.setdefault(key, case)
    return case.call(case.operands)


def _scan_blocks(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """The body, on the slices of the first step."""
    if not params["length"]:
        return []
    consts, carry = _compat.scan_arity(params)
    first = -1 if params["reverse"] else 0
    whole, stacked = values[: consts + carry], values[consts + carry :]
    return [(params["jaxpr"], [*whole, *(x[first] for x in stacked)])]


def _while_blocks(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """The condition and the body, on the initial carry."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carry = values[n_cond + n_body :]
    body = values[n_cond : n_cond + n_body]
    return [(params["cond_jaxpr"], [*values[:n_cond], *carry]), (params["body_jaxpr"], [*body, *carry])]


def _cond_blocks(params: Any, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Every branch."""
    return [(branch, values[1:]) for branch in params["branches"]]


_BLOCKS = {"scan": _scan_blocks, "while": _while_blocks, "cond": _cond_blocks}
