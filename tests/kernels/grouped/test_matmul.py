"""Grouped products: values and gradients of the kernels and of plain JAX, on shards and under plans."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.kernels.grouped import call, matmul
from autoshard.kernels.grouped.call import GroupedCall, grouped_call
from autoshard.kernels.grouped.matmul import grouped_matmul, grouped_product
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.models import dropless
from autoshard.models.dropless import operators
from autoshard.sharding.oracle.rule_check import check_rule
from tests.arrays import array

TILED, KERNEL, TRITON = (
    GroupedCall("tiled"),
    GroupedCall("megablox", interpret=True),
    GroupedCall("triton", interpret=True),
)

# rows, inner elements, columns, group sizes
CASES = {
    "sizes that divide no tile": (300, 96, 200, (100, 0, 57, 80)),
    "one group has all rows": (256, 128, 128, (0, 256, 0)),
    "few rows": (37, 24, 40, (5, 7, 0, 9)),
    "no rows in any group": (20, 8, 16, (0, 0)),
    "many tiles": (640, 16, 32, (130, 1, 0, 383, 126)),
}


def operands(case, dtype=jnp.float32):
    count, inner, columns, sizes = CASES[case]
    rng = np.random.default_rng(0)
    shapes = (count, inner), (len(sizes), inner, columns), (count, columns)
    rows, weights, d_out = (array(rng.normal(size=shape), dtype) for shape in shapes)
    return rows, weights, d_out, jnp.asarray(sizes, jnp.int32)


def expected(rows, weights, d_out, sizes):
    """Return the product and its gradients, each group by itself, in float64."""
    rows, weights, d_out = (np.asarray(x, np.float64) for x in (rows, weights, d_out))
    out, d_rows, d_weights = (np.zeros(x.shape) for x in (d_out, rows, weights))
    end = 0
    for group, size in enumerate(np.asarray(sizes)):
        part = slice(end, end := end + size)
        out[part] = rows[part] @ weights[group]
        d_rows[part] = d_out[part] @ weights[group].T
        d_weights[group] = rows[part].T @ d_out[part]
    return out, d_rows, d_weights


@functools.partial(jax.jit, static_argnums=(0, 5))
def run(call, rows, weights, d_out, sizes, own):
    out, pull = jax.vjp(
        lambda rows, weights: grouped_product(call, rows, weights, sizes, jnp.asarray(own, jnp.int32)), rows, weights
    )
    return out, *pull(d_out)


def assert_near(found, right, tolerance):
    for one, other in zip(found, right, strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other)
        assert one.shape == other.shape and error <= tolerance * max(np.linalg.norm(other), 1.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("call", [TILED, KERNEL], ids=["tiled", "megablox"])
@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)], ids=["f32", "bf16"])
def test_values_and_gradients_are_those_of_each_group(case, call, dtype, tolerance):
    args = operands(case, dtype)
    rows, weights, d_out, sizes = args
    found = run(call, rows, weights, d_out, sizes, tuple(range(weights.shape[0])))
    assert all(x.dtype == dtype for x in found)
    assert_near(found, expected(*args), tolerance)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        args = operands("few rows", jnp.float64)
        assert_near(run(TILED, *args, (0, 1, 2, 3)), expected(*args), 1e-14)


@pytest.mark.parametrize("call", [TILED, KERNEL], ids=["tiled", "megablox"])
def test_rows_outside_of_all_groups_do_not_matter(call):
    """They may hold anything: NaNs stay out of values and gradients."""
    rows, weights, d_out, sizes = operands("few rows")
    outside = jnp.arange(rows.shape[0])[:, None] >= jnp.sum(sizes)
    right = expected(rows, weights, d_out, sizes)
    spoiled = run(
        call, jnp.where(outside, jnp.nan, rows), weights, jnp.where(outside, jnp.nan, d_out), sizes, (0, 1, 2, 3)
    )
    assert_near(spoiled, right, 2e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("call", [TILED, KERNEL, TRITON], ids=["tiled", "megablox", "triton"])
def test_parts_of_the_groups_add_up(call):
    """The first part has an empty group, and the second part's rows start inside of a tile."""
    rows, weights, d_out, sizes = operands("many tiles")
    right = expected(rows, weights, d_out, sizes)
    low = run(call, rows, weights[:3], d_out, sizes, (0, 1, 2))
    high = run(call, rows, weights[3:], d_out, sizes, (3, 4))
    assert all(np.linalg.norm(x) > 1 for x in (*low, *high))
    assert_near((low[0] + high[0], low[1] + high[1], jnp.concatenate([low[2], high[2]])), right, 2e-6)


def test_more_rows_in_groups_than_there_are_are_left_out():
    rows, weights, d_out, _ = operands("few rows")
    found = run(TILED, rows, weights, d_out, jnp.asarray([30, 20, 5, 9]), (0, 1, 2, 3))
    assert_near(found, expected(rows, weights, d_out, [30, 7, 0, 0]), 2e-6)


def test_no_rows_at_all():
    rows, weights, d_out, _ = operands("few rows")
    out, d_rows, d_weights = run(TILED, rows[:0], weights, d_out[:0], jnp.zeros(4, jnp.int32), (0, 1, 2, 3))
    assert out.shape == (0, 40) and d_rows.shape == (0, 24) and not np.any(d_weights)


@pytest.mark.slow
def test_the_rules_hold_on_shards():
    """Of the product and of both gradients; the oracle draws sizes of groups that add up to the rows at most."""

    def step(rows, weights, sizes):
        out, gradients = jax.vjp(lambda a, b: matmul.grouped_matmul(a, b, sizes), rows, weights)
        return gradients(jnp.tanh(out))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 4, 6))]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert check_rule(step, *shapes, sizes, partitioner=False) == []


def expert_step(rows=False):
    """Return a step of dropless experts, or of a user's grouped product, its parameters, and a batch."""
    keys = jax.random.split(jax.random.key(1), 6)
    experts, width, ffn = 4, 16, 32
    shapes = {
        "router": (width, experts),
        "up": (experts, width, ffn),
        "gate": (experts, width, ffn),
        "down": (experts, ffn, width),
    }
    params = {
        name: 0.3 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    x = jax.random.normal(keys[5], (8, 6, width))

    def dropless_loss(params, x):
        logits = jnp.einsum("bsd,de->bse", x, params["router"])
        best, chosen = jax.lax.top_k(logits, 2)
        y = dropless.experts(x, jax.nn.softmax(best), chosen, params["up"], params["down"], params["gate"])
        return jnp.mean(jnp.square(x + y))

    def rows_loss(params, x):
        flat = x.reshape(-1, width)
        sizes = jnp.asarray([7, 0, 30, 5], jnp.int32)
        hidden = jax.nn.gelu(grouped_matmul(flat, params["up"], sizes))
        return jnp.mean(jnp.square(flat + grouped_matmul(hidden, params["down"], sizes)))

    return jax.value_and_grad(rows_loss if rows else dropless_loss), params, x


def assert_parity(step, params, x, plan):
    (value, gradients), (loss, right) = autoshard.auto_shard(step, plan=plan)(params, x), jax.jit(step)(params, x)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert_near([gradients[name] for name in params], [np.asarray(right[name]) for name in params], 2e-6)


PLANS = ["dp:8", "fsdp:8", "dp:2 ep:4", "dp:2 tp:4", "ep:4 tp:2", "dp:2 ep:2 tp:2", "fsdp:2 ep:2 tp:2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [*(p if p == "dp:2 ep:2 tp:2" else pytest.param(p, marks=pytest.mark.slow) for p in PLANS)]
)
@pytest.mark.filterwarnings("ignore:.*have work of their own")
def test_plans_of_experts_keep_loss_and_gradients(plan, monkeypatch):
    """With the TPU's kernels, interpreted."""
    monkeypatch.setattr(operators, "grouped_call", lambda dtype: KERNEL)
    assert_parity(*expert_step(), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.filterwarnings("ignore:.*have work of their own")
def test_plans_of_experts_in_plain_jax_keep_loss_and_gradients(plan):
    assert_parity(*expert_step(), plan)


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["dp:2 ep:2 tp:2", "dp:8", pytest.param("fsdp:8", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*have work of their own")
def test_plans_of_a_users_product_keep_loss_and_gradients(plan):
    assert_parity(*expert_step(rows=True), plan)


def test_the_kernel_is_that_of_the_planned_platform():
    rows, weights, _, sizes = operands("few rows")

    def kernels(dtype):
        traced = jax.make_jaxpr(grouped_matmul)(rows.astype(dtype), weights.astype(dtype), sizes)
        (eqn,) = [e for e in traced.jaxpr.eqns if "grouped" in str(e) and e.primitive.name == "custom_vjp_call"]
        return [c for c in ("megablox", "triton", "tiled") if f"kernel='{c}'" in str(eqn)]

    assert kernels(jnp.float32) == ["tiled"]
    with planned_for("tpu"):
        assert kernels(jnp.float32) == ["megablox"] == kernels(jnp.bfloat16)
        with pytest.warns(AutoshardWarning, match="in bfloat16 or float32, not float16.*plain JAX runs instead"):
            assert kernels(jnp.float16) == ["tiled"]
    with planned_for("cuda"):
        assert kernels(jnp.bfloat16) == ["triton"] == kernels(jnp.float16) and kernels(jnp.float32) == ["tiled"]


def test_without_its_kernel_a_gpu_computes_in_plain_jax(monkeypatch):
    with planned_for("cuda"):
        assert grouped_call(jnp.bfloat16) == GroupedCall("triton", 16 * 2**20)
        attached = SimpleNamespace(compute_capability="8.9")
        with monkeypatch.context() as patched, pytest.warns(AutoshardWarning, match="capability 8.0, .*not 8.9"):
            patched.setattr(call, "jax", SimpleNamespace(default_backend=lambda: "gpu", devices=lambda: [attached]))
            assert grouped_call(jnp.bfloat16) == GroupedCall("tiled", launches=True)
        monkeypatch.setattr(call, "triton", None)
        with pytest.warns(AutoshardWarning, match="this version of JAX has no Triton backend"):
            assert grouped_call(jnp.bfloat16) == GroupedCall("tiled", launches=True)


def test_a_kernel_may_use_half_of_the_planned_cores_vector_memory():
    with planned_for(Planned("tpu", 128 * 2**20)):
        assert grouped_call(jnp.bfloat16) == GroupedCall("megablox", 64 * 2**20)
    with planned_for("tpu"):  # an unknown TPU
        assert grouped_call(jnp.bfloat16) == GroupedCall("megablox", 16 * 2**20)


def test_the_stated_result_types_are_those_of_the_functions():
    rows, weights, d_out, sizes = operands("few rows")
    groups = sizes, jnp.arange(2, dtype=jnp.int32), jnp.arange(37, dtype=jnp.int32)
    for transposed in (False, True):
        call = GroupedCall("tiled", transposed=transposed)
        taken, made = (d_out, rows) if transposed else (rows, d_out)
        for operator, args in (
            (matmul.grouped_rows, (taken, weights[:2], *groups)),
            (matmul.grouped_weights_gradient, (taken, made, *groups)),
        ):
            (stated,) = operator.__wrapped__.result_types(*args, call=call)
            traced = jax.eval_shape(lambda *x: operator.__wrapped__(*x, call=call), *args)  # noqa: B023
            assert (stated.shape, stated.dtype) == (traced.shape, traced.dtype)


def test_wrong_operands_are_errors():
    rows, weights, _, sizes = operands("few rows")
    for bad, message in (
        ((rows, weights[:, 1:], sizes), r"rows must be \[m, k\]"),
        ((rows, weights, sizes[1:]), r"group_sizes has shape \(3,\); it must be \(4,\)"),
        ((rows, weights, sizes * 1.0), "group_sizes is float32; it must be an integer type"),
        ((rows, weights.astype(jnp.bfloat16), sizes), "rows are float32 and weights bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_matmul(*bad)
