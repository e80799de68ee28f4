"""The price of one run of an operator."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from autoshard import plan
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout
from autoshard.sharding.cost.prices.operator_price import lookup_moves
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.cost.test_equivalence_classes import STRATEGIES, layout, problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_kernel_is_faster_than_its_least_time(strategy):
    cost, chosen = problem().cost, layout(strategy)
    canonical, devices = CanonicalLayout(chosen, cost.queries), cost.target.devices
    ratios = []
    for number, each in enumerate(cost.classes):
        specs = canonical(number)
        time_us = cost.prices(each, specs.sizes, specs.specs, specs.sequence).time_us
        least_us = cost.prices.least_us(each, devices)
        assert 0 <= least_us <= time_us * (1 + 1e-9), each.op.name
        ratios.append(least_us / time_us if time_us else 1.0)
    assert max(ratios) == pytest.approx(1.0), "some kernels divide their work over all devices"
    assert min(ratios) < 0.5, "others do not"


@pytest.mark.parametrize(
    ("want", "kind", "wire_bytes"),
    [
        (((), ("dp",), ()), "all-reduce", 14.0),  # behind four tables
        ((("cp",), ("dp",), ()), "all-reduce", 14.0),  # behind two of them
        ((("tp",), ("dp",), ()), "reduce-scatter", 7.0),
        ((("dp",), (), ()), "reduce-scatter", 7.0),
    ],
)
def test_rows_that_are_scattered_behind_several_tables_are_all_reduced(want, kind, wire_bytes):
    moves = Move("reduce-scatter", ("dp",), -1, 8.0, 7.0), Move("all-gather", ("dp",), 1, 1.0, 7.0)
    found = lookup_moves(moves, (4, 64, 8), want, {"dp": 8, "cp": 2, "tp": 4})
    assert [(m.kind, m.wire_bytes) for m in found] == [(kind, wire_bytes), ("all-gather", 7.0)]


def lookup_price(target, words, tables=()):
    """The price of a lookup `[*tables, rows]`, and the bytes that the chip reads or writes in a microsecond.

    The table is stored along its rows.
    """

    def step(state, tokens):
        loss = lambda p: jnp.mean((p["table"][tokens.T] @ p["w"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    params = {"table": (1 << 22, 128), "w": (128, 128)}
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in params.items()}
    tokens = jax.ShapeDtypeStruct((1 << 18, *tables), "int32")
    options = {"target": target, "plan": words, "fixed": {"state/table": PartitionSpec("dp")}}
    bound = bound_or_error(plan(step, shapes, tokens, donate_argnums=0, **options).bound)
    cost = bound.problem.cost
    canonical = CanonicalLayout(bound.layout, cost.queries)
    (number,) = [n for n, each in enumerate(cost.classes) if each.op.name == "gather"]
    specs = canonical(number)
    price = cost.prices(cost.classes[number], specs.sizes, specs.specs, specs.sequence)
    return price, cost.target.chip.memory_bandwidth * BANDWIDTH_REACHED / 1e6


def test_on_tpu_a_lookup_in_a_sharded_table_writes_its_rows_twice():
    """Each device looks up all rows and zeros those that other devices have."""
    price, per_us = lookup_price("v5e:2x4", "dp:8 state")
    assert [m.kind for m in price.moves if m.array < 0] == ["reduce-scatter"]
    rows = 4 * 128 * 2**18
    assert price.time_us * per_us == pytest.approx(4 * rows, rel=0.02)  # read and written twice
    price, per_us = lookup_price("h100:1x8", "dp:8 state")
    assert price.time_us * per_us == pytest.approx(2 * rows, rel=0.02)


def test_on_tpu_a_lookup_behind_tables_is_all_reduced():
    price, _ = lookup_price("v5e:2x4", "dp:8 state", tables=(4,))
    assert [m.kind for m in price.moves if m.array < 0] == ["all-reduce"]
    price, _ = lookup_price("h100:1x8", "dp:8 state", tables=(4,))
    assert [m.kind for m in price.moves if m.array < 0] == ["reduce-scatter"]


def test_operators_with_empty_results_cost_nothing():
    """`associative_scan` slices no positions at all where its levels become short. XLA removes such slices."""

    def step(w, x):
        def loss(w):
            return (jax.lax.associative_scan(jnp.multiply, x @ w, axis=1) ** 2).mean()

        return w - 0.1 * jax.grad(loss)(w)

    args = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 16, 256), "float32")
    made = plan(step, *args, plan="dp:8", target="v5e:2x4")
    assert {kind for kind, *_ in made.traffic} == {"all-reduce"}
    bound = bound_or_error(made.bound)
    cost = bound.problem.cost
    canonical, avals = CanonicalLayout(bound.layout, cost.queries), bound.problem.program.avals
    empty = [n for n, each in enumerate(cost.classes) if each.op.results and 0 in avals[each.op.results[0]].shape]
    assert empty
    for number in empty:
        specs = canonical(number)
        price = cost.prices(cost.classes[number], specs.sizes, specs.specs, specs.sequence)
        assert price.time_us == cost.prices.least_us(cost.classes[number], 8) == 0.0 and not price.moves
