"""Gradients whose shards have 128 columns are computed with those as rows, so that XLA:TPU reduce-scatters them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.layout.operator_strategy import Move, MoveKind, OperatorStrategy
from autoshard.sharding.lower.products.lane_shards import is_lane_sharded
from autoshard.sharding.lower.products.scattered_products import scattered_product
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.program.tracing import trace
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op

ROWS = 8192  # with few rows, the planner reshards these instead of the weights
Weights = dict[str, jax.Array]


def step(weights: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
    def loss(weights: Weights) -> jax.Array:
        y = jnp.tanh(x @ weights["up"]) @ weights["down"]
        return (y.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def shapes(inputs: int, outputs: int, rows: int = ROWS) -> tuple[dict[str, Any], Any]:
    sizes = {"up": (inputs, outputs), "down": (outputs, inputs)}
    weights = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return weights, jax.ShapeDtypeStruct((rows, inputs), jnp.float32)


def gradient_shapes(inputs: int, outputs: int, words: str) -> list[tuple[int, ...]]:
    """Return the shapes of products over the batch in the lowered program."""
    made = autoshard.plan(step, *shapes(inputs, outputs), plan=words, target="v5e:2x4")
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    jaxpr = jax.make_jaxpr(program)(*jax.tree.leaves(shapes(inputs, outputs)))
    return [
        eqn.outvars[0].aval.shape
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general" and ROWS not in eqn.outvars[0].aval.shape
    ]


@pytest.mark.parametrize(
    ("inputs", "outputs", "words", "swapped"),
    [
        (1024, 512, "fsdp:8", True),
        (512, 1024, "fsdp:8", True),
        (256, 128, "dp:4 fsdp:2", True),
        (2048, 512, "fsdp:8", False),
        (576, 512, "fsdp:8", False),
    ],
)
def test_only_shards_of_128_columns_are_computed_as_rows(inputs: int, outputs: int, words: str, swapped: bool) -> None:
    sizes = (inputs, outputs), (outputs, inputs)
    of_down, of_up = gradient_shapes(inputs, outputs, words)
    if inputs > outputs:  # the columns of the gradient of `up` are sharded
        assert (of_down, of_up) == (sizes[0], sizes[0] if swapped else sizes[1])
    else:
        assert (of_down, of_up) == (sizes[1] if swapped else sizes[0], sizes[1])


def test_the_rows_are_scattered() -> None:
    made = autoshard.plan(step, *shapes(1024, 512), plan="fsdp:8", target="v5e:2x4")
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    jaxpr = jax.make_jaxpr(program)(*jax.tree.leaves(shapes(1024, 512)))
    products = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}
    after = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint" and eqn.invars[0] in products]
    gradients = [eqn.params["sharding"].spec for eqn in after if eqn.outvars[0].aval.shape == (1024, 512)]
    assert [tuple(spec)[:1] for spec in gradients] == [("fsdp",)] * 2


def product(subscripts: str, *shapes: tuple[int, ...]) -> Op:
    """Return the only operator of an einsum."""
    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program = analyse(trace(lambda *xs: jnp.einsum(subscripts, *xs), arrays, {})).axes.program
    return next(op for op in program.ops() if op.name == "dot_general")


COLUMNS: Spec = ((), ("fsdp",))


def test_only_products_of_two_operands_with_the_columns_of_one_are_computed_transposed() -> None:
    matrices = product("ka,kb->ab", (4096, 256), (4096, 1024))
    assert is_lane_sharded(matrices, ((), ()), COLUMNS, {"fsdp": 8})
    both = product("k,kab->ab", (4096,), (4096, 256, 1024))  # both dimensions of one operand
    assert not is_lane_sharded(both, ((), ()), COLUMNS, {"fsdp": 8})
    heads = product("kab,kc->abc", (4096, 4, 128), (4096, 1024))
    assert is_lane_sharded(heads, ((),) * 3, ((), (), ("fsdp",)), {"fsdp": 8})
    assert not is_lane_sharded(heads, ((),) * 3, ((), ("fsdp",), ()), {"fsdp": 8})
    of_result = product("kc,kab->cab", (4096, 1024), (4096, 4, 128))
    assert not is_lane_sharded(of_result, ((),) * 3, ((), (), ("fsdp",)), {"fsdp": 1})


def test_the_gradient_of_a_weight_of_heads() -> None:
    """`[heads, head_dim, in]` is computed as `[in, heads, head_dim]`, scattered along its first dimension."""
    op = product("kab,kc->abc", (64, 4, 16), (64, 1024))
    assert op.rule is not None
    ((summed,), *_) = op.rule.operands[0]
    chosen = OperatorStrategy({"fsdp": summed}, (Move("reduce-scatter", ("fsdp",), -1, 0.0, 0.0),))
    made: list[tuple[tuple[int, ...], Spec]] = []
    dy = jax.random.normal(jax.random.key(0), (64, 4, 16))
    x = jax.random.normal(jax.random.key(1), (64, 1024))
    layout: Any = SimpleNamespace(mesh={"fsdp": 8})
    want: Spec = ((), (), ("fsdp",))
    got = scattered_product(layout, op, (dy, x), chosen, want, lambda y, spec: made.append((y.shape, spec)) or y)
    assert made == [((1024, 4, 16), (("fsdp",), (), ()))]
    np.testing.assert_allclose(got, jnp.einsum("kab,kc->abc", dy, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-reduce"])
def test_only_scattered_sums_are_computed_transposed(kind: MoveKind) -> None:
    op = product("ka,kb->ab", (4096, 256), (4096, 1024))
    assert op.rule is not None
    ((summed,),) = ({*op.rule.operands[0][0]},)
    chosen = OperatorStrategy({"fsdp": summed}, (Move(kind, ("fsdp",), -1, 0.0, 0.0),))
    made: list[Spec] = []
    arrays = jnp.ones((4096, 256)), jnp.ones((4096, 1024))
    layout: Any = SimpleNamespace(mesh={"fsdp": 8})
    got = scattered_product(layout, op, arrays, chosen, COLUMNS, lambda x, spec: made.append(spec) or x)
    assert made == ([COLUMNS[::-1]] if kind == "reduce-scatter" else [])
    assert (got is None) == (kind == "all-reduce")


@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:4", "fsdp:4 tp:2"])
def test_values_and_gradients_equal_one_device(words: str) -> None:
    inputs = 128 * int(words.split("fsdp:")[1][0])
    weights, x = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(s.shape[0]), s.shape) / 16, shapes(inputs, 64, 1024)
    )
    new, value = autoshard.auto_shard(step, plan=words)(weights, x)
    want, loss = jax.jit(step)(weights, x)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), new, want)


@pytest.mark.slow
def test_the_tpu_compiler_reduce_scatters_them() -> None:
    audit = autoshard.plan(step, *shapes(1024, 1024, 32768), plan="fsdp:8", target="v5e:2x4").verify()
    assert {c.kind for c in audit.collectives if c.wire_bytes > 1000} == {"all-gather", "reduce-scatter"}
    assert audit.unplanned_bytes < 1000
