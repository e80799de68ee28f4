"""Prices that programs share: equal operators are priced once in a process, different ones apart."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.prices import known_prices
from autoshard.sharding.cost.prices.operator_price import OperatorPrices

ROWS, WIDTH = 64, 128


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(known_prices, "_prices", {})
    monkeypatch.setattr(known_prices, "_numbers", {})


@pytest.fixture
def computed(monkeypatch):
    """The operators whose prices were computed."""
    names, compute = [], OperatorPrices.__call__

    def counted(prices, op_class, *args):
        names.append(op_class.op.name)
        return compute(prices, op_class, *args)

    monkeypatch.setattr(OperatorPrices, "__call__", counted)
    return names


def layer(x, w, activation=jnp.tanh, axis=1):
    return jnp.sum(activation(x @ w), axis=axis)


def planned(dtype="float32", rows=ROWS, target="v5e:2x2", **options):
    def step(x, w):  # a new function, which no other cache knows
        return layer(x, w, **options)

    shapes = jax.ShapeDtypeStruct((rows, WIDTH), dtype), jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    return plan(step, *shapes, plan="tp:4", target=target)


def test_an_equal_program_computes_no_price(computed):
    first = planned()
    assert "dot_general" in computed
    computed.clear()
    assert planned().estimate == first.estimate
    assert not computed


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"rows": 2 * ROWS}, {"axis": 0}, {"target": "v5p:2x2x1"}], ids=str
)
def test_another_program_has_its_own_prices(options, computed):
    alone = planned(**options)
    known_prices._prices.clear()
    planned()
    computed.clear()
    assert planned(**options).estimate == alone.estimate
    assert computed


def test_the_number_of_prices_is_bounded(monkeypatch):
    monkeypatch.setattr(known_prices, "MOST_KNOWN_PRICES", 2)
    first = planned()
    assert 0 < len(known_prices._prices) <= 2
    assert planned().estimate == first.estimate


def test_the_newest_prices_stay_known_when_there_is_no_more_room(monkeypatch, computed):
    first = planned(rows=2 * ROWS)
    count = len(known_prices._prices)
    other = planned()
    assert len(known_prices._prices) > count
    monkeypatch.setattr(known_prices, "MOST_KNOWN_PRICES", len(known_prices._prices))
    planned(dtype="bfloat16")
    priced = {number for number, *_ in known_prices._prices}
    assert {number for number, _ in known_prices._numbers.values()} <= priced, "classes without prices are deleted, too"
    computed.clear()
    assert planned(dtype="bfloat16") and not computed
    assert (planned().estimate, planned(rows=2 * ROWS).estimate) == (other.estimate, first.estimate)
    assert computed, "the oldest prices are computed again"
