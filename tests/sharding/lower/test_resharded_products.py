"""A fault of XLA's partitioner when it reshards the result of a product, and the lowering that avoids it."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard
from autoshard.sharding.layout.operator_sharding import extends_computed_spec
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.lower import lowering
from autoshard.spmdrules.core.placement import to_partition_spec
from autoshard.spmdrules.core.rule import Rule

AXES = ("dp", "fsdp", "tp")
FAULTY = [  # specs of the left operand, the right operand and the requested result
    (P("dp", "tp"), P("tp", "fsdp"), P(("dp", "fsdp"), "tp")),
    (P("dp", "tp"), P("tp", "fsdp"), P("tp", ("dp", "fsdp"))),
    (P("fsdp", "dp"), P("dp", "tp"), P("dp", ("fsdp", "tp"))),
]


def whole_numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, size=shape or (16, 16)).astype(np.float32)


def product(mesh, left, right, *results):
    """`h @ w` with these constraints on the operands and, in turn, on the result."""

    def run(h, w):
        place = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
        out = place(h, left) @ place(w, right)
        for spec in results:
            out = place(out, spec)
        return out

    return jax.jit(run)(whole_numbers(0), whole_numbers(1))


@pytest.mark.parametrize(("left", "right", "want"), FAULTY, ids=str)
def test_the_partitioner_still_computes_wrong_products(mesh_of, left, right, want):
    """If this fails, XLA is fixed. Remove `extends_computed_spec` when no supported version has the fault."""
    mesh = mesh_of(dp=2, fsdp=2, tp=2)
    expected = whole_numbers(0) @ whole_numbers(1)
    assert not np.array_equal(product(mesh, left, right, want), expected)
    np.testing.assert_array_equal(product(mesh, left, right, P(left[0], right[1]), want), expected)


def test_the_partitioner_still_computes_wrong_batched_products_if_the_batch_is_sharded_further(mesh_of):
    """If this fails, XLA is fixed; see the test above."""
    mesh = mesh_of(dp=2, fsdp=2, tp=2)
    place = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
    h, w = whole_numbers(0, 8, 8, 8), whole_numbers(1, 8, 8, 8)

    def run(h, w, first):
        out = place(h, P("dp", None, ("fsdp", "tp"))) @ place(w, P("dp", ("fsdp", "tp")))
        return place(place(out, P("dp")) if first else out, P(("dp", "fsdp")))

    run = jax.jit(run, static_argnums=2)
    assert not np.array_equal(run(h, w, False), h @ w)
    np.testing.assert_array_equal(run(h, w, True), h @ w)


def placements(dims):
    """Every way to shard dimensions over the three mesh axes or fewer."""
    for places in itertools.product(range(dims + 1), repeat=len(AXES)):
        yield tuple(tuple(a for a, p in zip(AXES, places, strict=True) if p == d) for d in range(dims))


PLAIN, BATCHED = "m k, k n -> m n; reduce k", "b m k, b k n -> b m n; reduce k"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "factors"),
    [
        (PLAIN, {"m": ("dp",), "k": ("tp",), "n": ("fsdp",)}),
        (PLAIN, {"m": ("dp",), "k": ("fsdp",), "n": ("tp",)}),
        (PLAIN, {"m": ("fsdp",), "k": ("dp",), "n": ("tp",)}),
        (BATCHED, {"b": ("dp",), "k": ("fsdp", "tp")}),
        (BATCHED, {"b": ("fsdp",), "k": ("dp", "tp")}),
        (BATCHED, {"b": ("fsdp",), "m": ("dp",), "k": ("tp",)}),
    ],
    ids=str,
)
def test_products_are_correct_under_every_computed_and_requested_sharding(mesh_of, text, factors):
    mesh = mesh_of(dp=2, fsdp=2, tp=2)
    rule = Rule.parse(text)
    spec = lambda dims: tuple(sum((factors.get(f, ()) for f in dim), ()) for dim in dims)  # noqa: E731
    x, y = (whole_numbers(seed, *[8] * len(dims)) for seed, dims in enumerate(rule.operands))
    wants = list(placements(len(rule.results[0])))
    place = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, to_partition_spec(spec)))  # noqa: E731

    computed = spec(rule.results[0])
    straight = [extends_computed_spec(rule, rule.results[0], computed, want) for want in wants]
    assert any(straight) and not all(straight)

    def run(x, y):
        left, right = map(spec, rule.operands)
        # One product for each request, because the constraints of other requests would change it.
        products = [place(x, left) @ place(y, right) for _ in wants]
        constrained = [p if s else place(p, computed) for s, p in zip(straight, products, strict=True)]
        return [place(p, want) for p, want in zip(constrained, wants, strict=True)]

    for want, actual in zip(wants, jax.jit(run)(x, y), strict=True):
        np.testing.assert_array_equal(actual, x @ y, err_msg=f"{text} {factors} -> {want}")


def test_a_product_is_constrained_as_computed_before_it_is_resharded(mesh_of, monkeypatch):
    """The lowering follows the rule above: values are correct under a strategy for which XLA's would be wrong."""

    def strategy(layout, op, link_prices):
        (m, k), (_, n) = ((d[0] for d in dims) for dims in op.rule.operands)
        return OperatorStrategy({"dp": m, "fsdp": n, "tp": k}, ())

    monkeypatch.setattr(lowering, "strategy_in_layout", strategy)
    monkeypatch.setattr(lowering, "written_spec", lambda layout, op, value: (("dp", "fsdp"), ("tp",)))
    sharded = auto_shard(lambda x, w: x @ w + 1, mesh=mesh_of(dp=2, fsdp=2, tp=2))
    x, w = whole_numbers(0), whole_numbers(1)
    np.testing.assert_array_equal(sharded(x, w), x @ w + 1)
