"""Rows for the tables of rules: a call, its operands, and the expected map of its main equation.

`families/test_<family>.py` has the table `ROWS` of a family. The oracle also runs every row (`test_oracle_rows.py`).
Dimensions that can be sharded are divisible by 4, so that they can be sharded over 2 and 2 x 2 devices.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.spmdrules import Rule, rule_for
from autoshard.spmdrules.families import FAMILIES


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        primitive: the primitive; the first equation with it is the row's main equation.
        fn: a function that uses the primitive.
        args: its arguments: arrays, and `ShapeDtypeStruct`s where any value will do.
        expected: the text form of the rule.
        note: what distinguishes it from other rows of the same primitive.
        unchecked: why the oracle cannot run it here; empty if it can.
        unpartitioned: why XLA's partitioner fails on it although its shards can be run; empty if it does not.
    """

    primitive: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    expected: str
    note: str = ""
    unchecked: str = ""
    unpartitioned: str = ""

    @property
    def id(self) -> str:
        """What pytest calls the row."""
        return f"{self.primitive}-{self.note}".rstrip("-").replace(" ", "_")

    def rule(self) -> Rule:
        """The rule of the row's main equation."""
        eqn = self.equation()
        rule = rule_for(eqn.primitive, tuple(v.aval for v in eqn.invars), eqn.params)
        assert rule is not None, f"{self.primitive} has no rule"
        return rule

    def equation(self) -> Any:
        """The row's main equation."""
        jaxpr = _compat.open_jaxpr(jax.make_jaxpr(self.fn)(*self.args))
        first = next((e for e in _equations(jaxpr) if e.primitive.name == self.primitive), None)
        assert first is not None, f"{self.id}: no {self.primitive} in {jaxpr}"
        return first


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if _compat.is_jaxpr(value) and eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
                yield from _equations(_compat.open_jaxpr(value))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array of any values."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An array of any values of a type."""
    return jax.ShapeDtypeStruct(shape, dtype)


def below(n: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
    """Positions in a dimension of size `n`."""
    return np.random.default_rng(n + len(shape)).integers(0, n, shape).astype(dtype)


def distinct(n: int, count: int) -> np.ndarray:
    """Distinct positions in a dimension of size `n`."""
    return np.random.default_rng(n).permutation(n)[:count].astype(np.int32)


def numbers(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Floats in a range."""
    return np.random.default_rng(len(shape)).uniform(low, high, shape).astype(np.float32)


def keys(*shape: int) -> jax.Array:
    """Random keys."""
    return jax.random.split(jax.random.key(7), shape) if shape else jax.random.key(7)


def bind(name: str) -> Callable[..., Any]:
    """Returns a function that binds a primitive for which JAX has no public function."""
    primitive = _compat.primitive(name)
    return lambda *operands, **params: primitive.bind(*operands, **params)  # pyright: ignore[reportOptionalMemberAccess]


def exists(name: str) -> bool:
    """Whether the installed JAX has a primitive."""
    return _compat.primitive(name) is not None


def all_rows() -> list[Row]:
    """The rows of every family."""
    rows: list[Row] = []
    for family in FAMILIES:
        name = f"test_{family.__name__.rpartition('.')[2]}"
        if (Path(__file__).parent / "families" / f"{name}.py").exists():
            rows += importlib.import_module(f"tests.spmdrules.families.{name}").ROWS
    return rows
