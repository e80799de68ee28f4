"""The check of the partitioner finds collectives that a rule does not account for, and wrong results."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.sharding.oracle import partitioner_check
from autoshard.sharding.oracle.cases import Case, collect
from autoshard.spmdrules.core.rule import Rule

A = np.arange(24, dtype=np.float32).reshape(4, 6) / 7 - 1.5


def case_of(fn, *args) -> Case:
    (case,) = collect(fn, args)
    return case


def test_collectives_that_the_rule_does_not_account_for():
    case = case_of(lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), A)
    without_reduction = Rule.parse("a b -> a", A)
    faults = partitioner_check.check_partitioner(case, without_reduction, [{"a": 2}, {"b": 2}, {"a": 2, "b": 2}], [A])
    assert [factors for factors, _ in faults] == [("b",), ("a", "b")]
    assert "1 x all-reduce" in faults[0][1]


def test_gathered_operand_is_found():
    case = case_of(lambda x: lax.cumsum(x, axis=1), A)
    faults = partitioner_check.check_partitioner(case, Rule.parse("a b -> a b; halo b", A), [{"b": 2}], [A])
    assert "gathers the whole of operand 0" in faults[0][1]


def test_silently_wrong_partitioner_is_found():
    class Other(Case):
        """An operator whose result on one device differs from that of its equation."""

        def run(self, operands, params=None):
            return [x + 1 for x in super().run(operands, params)]

    case = case_of(jnp.sin, A)
    strategies = [{"a": 2}, {"b": 2}]
    rule = Rule.parse("a b -> a b", A)
    assert partitioner_check.check_partitioner(case, rule, strategies, [A]) == []
    faults = partitioner_check.check_partitioner(Other(case.eqn, case.operands), rule, strategies, [A])
    assert [factors for factors, _ in faults] == [("a",), ("b",)]
    assert "silently wrong" in faults[0][1]


def test_minor_factors_have_no_spec():
    rule = Rule.parse("(h d) -> (h d); where h=4 d=4", np.ones(16))
    assert partitioner_check._strategy(rule, {"d": 2}) is None
    assert partitioner_check._strategy(rule, {"h": 2, "d": 2}) is None
    assert partitioner_check._strategy(rule, {"h": 2}) is not None
