"""Programs as text, the pairing of scans, and the checker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.sharding.rewrite.pairs import check_program, equal_groups, scan_pairs
from autoshard.sharding.rewrite.printed_program import function_text
from autoshard.sharding.rewrite.values import graph_of
from tests.sharding.rewrite.formulations import einsum_where, parameters, rows, step_of


def test_the_text_names_scans_residuals_and_lines() -> None:
    text = function_text(step_of(einsum_where), parameters(), rows())
    assert "iterations in reverse" in text
    assert "formulations.py:" in text
    residuals = text[text.index("residuals: ") :]
    assert "f32[8,4,24,24]" in residuals
    assert " -> operand " in residuals


def test_recomputed_values_have_the_name_of_the_forward_pass() -> None:
    text = function_text(step_of(einsum_where, "full"), parameters(), rows())
    products = [line.strip() for line in text.splitlines() if ":f32[8,4,24,24] = dot_general" in line]
    # The scores in the forward pass and computed again, and the gradient of the weights.
    assert (len(products), len({line.split(":")[0] for line in products})) == (3, 2)


@pytest.mark.parametrize(("policy", "count"), [("none", True), ("full", False)])
def test_scores_cross_without_recomputation_only(policy: str, count: bool) -> None:
    graph = graph_of(rewritten(jax.make_jaxpr(step_of(einsum_where, policy))(parameters(), rows())))
    (pair,) = scan_pairs(graph)
    assert any(r.value.shape == (8, 4, 24, 24) for r in pair.residuals) == count
    assert pair.residuals


def test_equal_layers_are_groups() -> None:
    graph = graph_of(rewritten(jax.make_jaxpr(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x) + 1)(jnp.ones((4, 4)))))
    assert equal_groups(graph.root) == [(0, 2, 2)]


def test_the_checker_finds_wrong_programs() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x))(1.0)
    check_program(closed)
    jaxpr = _compat.open_jaxpr(closed)
    wrong = jaxpr.replace(eqns=jaxpr.eqns[::-1])
    with pytest.raises(PlanError, match="not well formed"):
        check_program(_compat.close(wrong, []))
