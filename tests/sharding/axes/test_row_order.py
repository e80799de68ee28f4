"""Operators of the list: if the elements of the operands are permuted, so are those of the results."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.sharding.axes.merged import row_order
from autoshard.sharding.axes.merged.proven_operators import PROVEN
from autoshard.sharding.axes.merged.row_order import unordered_factors
from autoshard.sharding.oracle.cases import Case, collect, to_numpy
from autoshard.spmdrules import Rule, rule_for
from autoshard.spmdrules.core import registry
from autoshard.spmdrules.core.registry import registered
from tests.spmdrules.rows import Row, all_rows

VARIED = ("gather", "ragged_dot_general", "scatter", "scatter-add")  # groups and indices depend on positions
PARTS = 4  # chosen: as many tests check the rows, each of them as large a part of the rows


@cache
def unordered_rows() -> list[Row]:
    """The rows whose operator treats the elements along some dimension alike."""
    return [row for row in all_rows() if not row.unchecked and unordered_factors(row.equation(), row.rule())]


def quick_rows() -> list[Row]:
    """The first such row of each primitive, and all rows of some primitives, without elementwise operators."""
    first = {row.primitive: row for row in reversed(unordered_rows())}
    chosen = (row for row in unordered_rows() if row is first[row.primitive] or row.primitive in VARIED)
    return [row for row in chosen if not is_elementwise(row)]


def is_elementwise(row: Row) -> bool:
    """Whether all operands and results have the same dimensions, scalars aside."""
    rule = row.rule()
    return len({*rule.operands, *rule.results} - {()}) < 2


def test_a_row_proves_each_operator_of_the_list() -> None:
    here = {primitive.name for primitive, _ in registered()}  # some operators exist in newer versions of JAX only
    assert not (PROVEN & here) - {row.primitive for row in unordered_rows()}


def test_an_operator_outside_of_the_list_keeps_the_order() -> None:
    others = [row for row in all_rows() if row.primitive not in PROVEN and not row.unchecked]
    assert "custom_partitioning" in {row.primitive for row in others}
    assert not [row.id for row in others if unordered_factors(row.equation(), row.rule())]


def test_a_primitive_of_the_user_with_a_listed_name_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    own = jax.extend.core.Primitive("square")
    own.def_abstract_eval(lambda x: x)
    of_square = dict(registered())[lax.square_p]
    monkeypatch.setitem(registry._RULES, own, lambda *avals, **params: of_square(*avals, **params))
    row_order._proven_primitives.cache_clear()
    x = jnp.ones((8, 3))
    ours, theirs = (next(iter(jax.make_jaxpr(fn)(x).eqns)) for fn in (lax.square, own.bind))
    rule = rule_for(lax.square_p, (jax.typeof(x),), {})
    assert rule is not None
    assert unordered_factors(ours, rule) and not unordered_factors(theirs, rule)
    row_order._proven_primitives.cache_clear()


def permuted(x: np.ndarray, dims: tuple[tuple[str, ...], ...], name: str, order: np.ndarray) -> np.ndarray:
    """`x` with the elements of each dimension of a factor in another order."""
    for d, factors in enumerate(dims):
        x = np.take(x, order, axis=d) if factors == (name,) else x
    return x


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether arrays are equal; floats up to rounding."""
    if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
        return np.array_equal(x, y)
    return np.allclose(x.astype(complex), y.astype(complex), rtol=1e-3, atol=1e-3, equal_nan=True)


def wrong_factors(case: Case, rule: Rule) -> list[str]:
    """The factors along which a permutation of the operands does something else to the results."""
    operands = [to_numpy(x) for x in case.operands]
    results = case.run(operands)
    wrong = []
    for name in sorted(unordered_factors(case.eqn, rule)):
        size = rule.factor(name).size or 0
        order = np.roll(np.random.default_rng(size).permutation(size), 1)
        changed = [permuted(x, dims, name, order) for x, dims in zip(operands, rule.operands, strict=True)]
        expected = [permuted(x, dims, name, order) for x, dims in zip(results, rule.results, strict=True)]
        if not all(map(equal, expected, case.run(changed))):
            wrong.append(name)
    return wrong


def check(rows: list[Row]) -> None:
    assert rows
    found = []
    for row in rows:
        for case in collect(row.fn, row.args):
            if case.name == row.primitive:
                rule = rule_for(case.eqn.primitive, case.avals, case.eqn.params)
                assert rule is not None
                if wrong := wrong_factors(case, rule):
                    found.append(f"the order of {', '.join(wrong)} matters to {row.id}: {rule}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_permute_results_as_operands(part: int) -> None:
    check(quick_rows()[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_variants_permute_results_as_operands(part: int) -> None:
    check([row for row in unordered_rows() if row not in quick_rows()][part::PARTS])


def unordered_in(fn: Any, name: str, *args: Any) -> frozenset[str]:
    case = next(case for case in collect(fn, args) if case.name == name)
    rule = rule_for(case.eqn.primitive, case.avals, case.eqn.params)
    assert rule is not None
    return unordered_factors(case.eqn, rule)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_sorted_indices_keep_their_order(is_sorted: bool) -> None:
    def summed(x: Any, indices: Any) -> Any:
        numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return lax.scatter_add(jnp.zeros((4, 3)), indices, x, numbers, indices_are_sorted=is_sorted)

    indices = jnp.arange(8).reshape(8, 1) // 2
    names = unordered_in(summed, "scatter-add", jnp.ones((8, 3)), indices)
    assert names == ({"d"} if is_sorted else {"n", "d"})


def test_prints_keep_their_order() -> None:
    def printed(x: Any) -> Any:
        jax.debug.callback(lambda x: None, x, partitioned=True)
        return x

    assert not unordered_in(printed, "debug_callback", jnp.ones((8, 3)))
