"""Strategies that are chosen once."""

import pytest

from autoshard.sharding.layout import known_strategies
from autoshard.sharding.layout.operator_strategy import OperandSpecs, choose_strategy
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.machines.targets import find_target
from autoshard.spmdrules.core.rule import Rule

RULE = Rule.parse("m k, k n -> m n; reduce k; where m=4096 k=8 n=64")
OTHER_RULE = Rule.parse("m k, k n -> m n; reduce k; whole m; where m=4096 k=8 n=64")
ROWS, WHOLE = (("a",), ()), ((), ())
COMPUTE, LINKS = LinkPrices(1), LinkPrices(10)  # with which compute costs more, and the links
FIRST = (RULE, [4.0 * 4096 * 8, 4.0 * 8 * 64], [ROWS, WHOLE], [4.0 * 4096 * 64], [WHOLE], {"a": 8}, 4e6, LINKS)
CHANGES = [
    (1, [1.0, 1.0]), (2, [WHOLE, WHOLE]), (3, [1.0]), (4, [ROWS]), (5, {"a": 4}), (6, 4e12), (7, COMPUTE)
]  # fmt: skip


FORCED = [{"a": ("k",)}, {"a": ("n",)}, {"a": (None,)}]


def chosen(rule, operand_bytes, operand_specs, result_bytes, result_specs, mesh, flops, prices, forced=None):
    operands = OperandSpecs(rule.operands, operand_bytes, operand_specs, rule, mesh)
    results = OperandSpecs(rule.results, result_bytes, result_specs, rule, mesh)
    return choose_strategy(rule, operands, results, mesh, flops, prices, forced)


@pytest.mark.parametrize("limit", [1, 1000])
def test_every_argument_counts(monkeypatch, limit):
    """Also with room for one strategy only, when each one takes the place of the one before."""
    monkeypatch.setattr(known_strategies, "MOST_KNOWN_STRATEGIES", limit)
    monkeypatch.setattr(known_strategies, "_known", {})
    cases = [FIRST, *((*FIRST[:i], new, *FIRST[i + 1 :]) for i, new in CHANGES)]
    cases.append((OTHER_RULE, *cases[-1][1:]))  # its rows are whole
    found = [known_strategies.known_strategy(*case) for case in cases]
    assert found == [chosen(*case) for case in cases]
    assert found[0] not in found[1:-1] and found[-1] != found[-2]


def test_forced_factors_count(monkeypatch):
    monkeypatch.setattr(known_strategies, "_known", {})
    cases = [FIRST, *((*FIRST, forced) for forced in FORCED)]
    found = [known_strategies.known_strategy(*case) for case in cases]
    assert found == [chosen(*case) for case in cases]
    assert [one.factors for one in found[1:]] == [{"a": "k"}, {"a": "n"}, {"a": None}]


def test_equal_operators_are_chosen_once(monkeypatch):
    found = known_strategies.known_strategy(*FIRST)
    monkeypatch.setattr(known_strategies, "choose_strategy", None)
    assert known_strategies.known_strategy(*FIRST) is found


def test_the_newest_strategies_stay_known_when_there_is_no_more_room(monkeypatch):
    monkeypatch.setattr(known_strategies, "MOST_KNOWN_STRATEGIES", 4)
    monkeypatch.setattr(known_strategies, "_known", {})
    cases = [(*FIRST[:6], flops, LINKS) for flops in (1e6, 2e6, 3e6, 4e6, 5e6)]
    found = [known_strategies.known_strategy(*case) for case in cases]
    monkeypatch.setattr(known_strategies, "choose_strategy", None)
    assert [known_strategies.known_strategy(*case) for case in cases[2:]] == found[2:]
    with pytest.raises(TypeError):  # the oldest would be chosen again
        known_strategies.known_strategy(*cases[0])


def test_equal_machines_have_the_same_prices():
    assert find_target("v5e:2x4").link_prices is find_target("v5e:2x4").link_prices
    assert find_target("v5e:2x4").link_prices is not find_target("v5e:2x2").link_prices
