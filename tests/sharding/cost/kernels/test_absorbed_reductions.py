"""Which reductions the kernels of products compute, as `benchmarks/absorbed_reductions.py` finds them compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.sharding.cost.constants import PASS_OPS, SOFTMAX_ROW
from autoshard.sharding.cost.fusion import fuse
from autoshard.sharding.cost.kernels import absorbed_reductions
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build

B, S, D, N = 4, 32, 16, 128
X, W, Y = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((B * S, D), (D, N), (B * S, N)))
X3 = jax.ShapeDtypeStruct((B, S, D), "bfloat16")
F32 = jax.ShapeDtypeStruct((B * S, D), "float32"), jax.ShapeDtypeStruct((D, N), "float32")


def kernels(fn, *args, tpu=True):
    """(operator, arrays read, arrays written) of each kernel, of arrays with as many elements as the product."""
    program = build(jax.make_jaxpr(fn)(*args))
    found = fuse(program, fuses_operands=tpu).kernels

    def count(values):
        return sum(program.avals[v].size == B * S * N for v in values)

    ordered = [found[id(op)] for op in program.ops() if id(op) in found]
    return [(each.op.name, count(each.reads), count(each.writes)) for each in ordered]


def f32(x):
    return x.astype("float32")


@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.max(-1),
        lambda y: f32(y).sum(-1),
        lambda y: f32(y).sum(0),
        lambda y: f32(y).sum(),
        lambda y: (f32(y) ** 2).sum(-1),
        lambda y: y.argmax(-1),
        lambda y: (2 - f32(y)).argmin(-1),
        lambda y: y.T.max(0),
        lambda y: y.reshape(B, S, N).max(-1),
        lambda y: f32(y).reshape(B, S, N).sum((0, 1)),
        lambda y: (y.max(-1), y.min(-1)),
        lambda y: (f32(y).sum(0), (f32(y) ** 2).sum(1)),
    ],
)
def test_a_product_computes_a_reduction_of_its_result_which_is_never_stored(reduce):
    assert kernels(lambda x, w: reduce(x @ w), X, W) == [("dot_general", 0, 0)]
    assert len(kernels(lambda x, w: reduce(x @ w), X, W, tpu=False)) > 1


@pytest.mark.parametrize("reduced", [-1, 1, (0, 1), (1, 2), (0, 1, 2)])
def test_rows_of_a_batch_make_no_difference(reduced):
    assert kernels(lambda x, w: f32(x @ w).sum(reduced), X3, W) == [("dot_general", 0, 0)]
    conv = jax.ShapeDtypeStruct((N, D, 3), "bfloat16")
    padded = jax.ShapeDtypeStruct((B, D, S), "bfloat16")
    convolved = kernels(lambda x, w: f32(jax.lax.conv(x, w, (1,), "SAME")).sum(reduced), padded, conv)
    assert convolved == [("conv_general_dilated", 0, 0)]


def test_the_result_is_stored_if_something_else_takes_it():
    def fn(x, w):
        y = x @ w
        return y, f32(y).sum(1), f32(y).sum(0)

    assert kernels(fn, X, W) == [("dot_general", 0, 1)]


def test_the_result_is_stored_if_a_branch_without_results_takes_it():
    def fn(x, w):
        y = x @ w
        total = f32(y).sum(1)
        jax.lax.cond(x[0, 0] > 0, lambda y: jax.debug.print("{}", y[0, 0]), lambda y: None, y)
        return total

    assert ("dot_general", 0, 1) in kernels(fn, X, W)


def test_other_arrays_are_read_by_the_kernel_of_the_product():
    assert kernels(lambda x, w, y: (f32(x @ w - y) ** 2).sum(-1), X, W, Y) == [("dot_general", 1, 0)]

    def nearest(x, w):
        return ((x**2).sum(1, keepdims=True) - 2 * (x @ w) + (w**2).sum(0)).argmin(-1)

    assert kernels(nearest, *F32) == [("reduce_sum", 0, 0), ("dot_general", 0, 0), ("reduce_sum", 0, 0)]


def test_the_later_of_two_products_computes_the_reduction_of_their_sum():
    def fn(x, w):
        return (x @ w + jnp.tanh(x) @ w).max(-1)

    assert kernels(fn, X, W) == [("dot_general", 0, 1), ("dot_general", 1, 0)]


@pytest.mark.parametrize("reduce", [lambda y: y.sum(1), lambda y: y.sum(2)])
def test_a_sum_over_a_part_of_a_dimension_is_a_kernel_of_its_own(reduce):
    split = kernels(lambda x, w: reduce(f32(x @ w).reshape(B * S, 8, -1)), X, W)
    assert split == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]
    rows = kernels(lambda x, w: f32(x @ w).reshape(B, S, N).sum(1), X, W)
    assert rows == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]


def test_a_reduction_of_a_reshaped_result_that_is_stored_is_a_kernel_of_its_own():
    def fn(x, w):
        y = jnp.tanh((x @ w).reshape(B * S, 8, -1))
        return y, f32(y).sum(2)

    assert kernels(fn, X, W) == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]


def test_a_product_computes_a_reduction_of_functions_of_its_result_that_are_joined_again():
    def fn(x, w):
        y = x @ w
        z = jnp.sin(y) * jnp.cos(y)
        return z, f32(z).sum(0)

    assert kernels(fn, X, W) == [("dot_general", 0, 1)]

    def of_parts(x, w):
        y = x @ w
        z = jnp.sin(y).reshape(B * S, 8, -1) * jnp.cos(y).reshape(B * S, 8, -1)
        return z, f32(z).sum(2)

    assert kernels(of_parts, X, W) == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]


def test_a_reduction_of_a_matrix_and_its_transpose_is_a_kernel_of_its_own():
    w = jax.ShapeDtypeStruct((D, B * S), "bfloat16")
    assert kernels(lambda x, w: f32((y := x @ w) + y.T).sum(1), X, w) == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]


def test_a_reduction_that_needs_another_one_first_reads_the_result():
    def variance(x, w):
        y = f32(x @ w)
        return ((y - y.sum(-1, keepdims=True)) ** 2).sum(-1)

    assert kernels(variance, X, W) == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]
    lse = kernels(lambda x, w: jax.nn.logsumexp(f32(x @ w), -1), X, W)
    assert lse == [("dot_general", 0, 1), ("reduce_sum", 1, 0), ("add", 0, 0)]


def test_only_reductions_of_one_type_are_computed_together():
    """XLA computes the maximum of bfloat16 numbers in bfloat16 before it casts them, but their sum in float32."""

    def fn(x, w):
        y = f32(x @ w)
        return y.max(-1), y.sum(-1)

    assert kernels(fn, X, W) == [("dot_general", 0, 1), ("reduce_sum", 1, 0)]
    assert kernels(fn, *F32) == [("dot_general", 0, 0)]


def test_the_position_of_the_maximum_is_only_computed_alone():
    for other in (lambda y: y, lambda y: y.min(-1), lambda y: y.argmin(-1)):
        found = kernels(lambda x, w, other=other: ((y := x @ w).argmax(-1), other(y)), X, W)
        assert ("argmax", 1, 0) in found and ("dot_general", 0, 1) in found


def test_a_product_does_not_compute_what_comes_long_after_it_or_after_a_loop():
    def fn(x, w, y):
        first = x @ w
        for _ in range(PASS_OPS):
            y = jnp.sin(y)
        return f32(first).sum(-1), y

    assert ("reduce_sum", 1, 0) in kernels(fn, X, W, Y)

    def looped(x, w, y):
        first = x @ w
        y = jax.lax.fori_loop(0, 3, lambda _, y: y * 2, y)
        return f32(first).sum(-1), y

    assert ("reduce_sum", 1, 0) in kernels(looped, X, W, Y)


def test_the_reduction_of_a_product_in_a_loop_is_not_stored():
    def fn(x, ws):
        return jax.lax.scan(lambda x, w: (x, (x @ w).max(-1)), x, ws)[1]

    assert kernels(fn, X, jax.ShapeDtypeStruct((3, D, N), "bfloat16")) == [("dot_general", 0, 0)]


def attention(rows, scale=1.0, batched=True, change=lambda s: s):
    """The kernels of attention over this many keys: (operator, arrays of scores read, written)."""

    def fn(q, k, v):
        scores = change(jnp.einsum("...qd,...kd->...qk", q, k).astype("float32") * scale)
        return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, -1).astype(q.dtype), v)

    x = jax.ShapeDtypeStruct((*([B] if batched else []), rows, D), "bfloat16")
    program = build(jax.make_jaxpr(fn)(x, x, x))
    found = fuse(program, fuses_operands=True).kernels
    scores = {v for v, aval in enumerate(program.avals) if aval.shape[-2:] == (rows, rows)}
    ordered = [found[id(op)] for op in program.ops() if id(op) in found]
    return [(each.op.name, len(scores & {*each.reads}), len(scores & {*each.writes})) for each in ordered]


def test_the_softmax_of_scores_in_float32_is_computed_with_them():
    whole = [("dot_general", 0, 1), ("dot_general", 1, 0)]
    assert attention(S, scale=0.5) == attention(SOFTMAX_ROW, scale=0.5) == whole
    masked = attention(S, 0.5, change=lambda s: jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e30))
    assert masked == whole


def test_the_softmax_of_longer_rows_is_computed_apart():
    apart = [("dot_general", 0, 1), ("reduce_max", 1, 0), ("reduce_sum", 1, 0), ("dot_general", 1, 0)]
    assert attention(2 * SOFTMAX_ROW, scale=0.5) == apart


def test_the_sum_of_a_softmax_is_computed_apart_in_16_bits_and_without_a_batch():
    apart = [("dot_general", 0, 1), ("reduce_sum", 1, 0), ("dot_general", 1, 0)]
    assert attention(S, 0.5, batched=False) == apart
    plain = kernels(lambda q, k: jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k).astype("float32")), X3, X3)
    assert [name for name, *_ in plain] == [
        "dot_general",
        "reduce_sum",
        "div",
    ]  # a mere cast: the maximum is in 16 bits


@pytest.mark.parametrize(
    "exponentials",
    [
        lambda s, m, z: jnp.exp(z - m).sum(-1),  # of another array
        lambda s, m, z: jnp.exp(s - m).sum(-2),  # over another dimension
    ],
)
def test_other_sums_of_exponentials_are_computed_apart(exponentials):
    def fn(q, k, z):
        scores = f32(jnp.einsum("bqd,bkd->bqk", q, k)) * 0.5
        return exponentials(scores, scores.max(-1, keepdims=True), z)

    x, z = jax.ShapeDtypeStruct((B, N, D), "bfloat16"), jax.ShapeDtypeStruct((B, N, N), "float32")
    program = build(jax.make_jaxpr(fn)(x, x, z))
    assert "reduce_sum" in [each.op.name for each in fuse(program, fuses_operands=True).kernels.values()]


def test_a_gradient_is_summed_over_devices_before_its_norm():
    shapes = jax.ShapeDtypeStruct((1024, 1024), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32")

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - gradient / jnp.sqrt(jnp.sum(gradient**2))

    problem = bound_or_error(plan(step, *shapes, target="v5e:2x4", plan="dp:8").bound).problem
    assert [k.op.name for k in problem.cost.fusion.kernels.values() if k.absorbed >= 0] == []


@pytest.mark.parametrize("stored", [False, True])
def test_reductions_of_a_partial_result_read_it_from_memory(stored):
    """A sum over devices comes between the product and the reductions of its result."""

    def fn(x, w):
        y = x @ w
        return (y if stored else ()), f32(y).sum(1)

    rows, inner, columns = 1 << 14, 1 << 16, 1 << 13

    def price(spec):
        shapes = jax.ShapeDtypeStruct((rows, inner), "bfloat16"), jax.ShapeDtypeStruct((inner, columns), "bfloat16")
        fixed = {"x": P(None, "tp"), "w": P("tp", None)} if spec == "tp:4" else {}
        made = plan(fn, *shapes, target="v5e:2x2", plan=spec, fixed=fixed)
        bound = bound_or_error(made.bound)
        cost = bound.problem.cost
        (number,) = [n for n, each in enumerate(cost.classes) if each.op.name == "dot_general"]
        specs = CanonicalLayout(bound.layout, cost.queries)(number)
        return cost.prices(cost.classes[number], specs.sizes, specs.specs, specs.sequence), cost.target.chip

    partial, chip = price("tp:4")
    assert [m.kind for m in partial.moves if m.array < 0] == ["reduce-scatter"]
    alone, _ = price("dp:4")
    assert not alone.moves
    again = (1 if stored else 2) * 2 * rows * columns / 4 / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
    assert partial.time_us - alone.time_us == pytest.approx(again, rel=0.02)


def test_a_long_chain_is_not_followed_from_each_reduction(monkeypatch):
    """The steps grow with the number of reductions, not with its square."""
    count, steps, dims_before = 8 * PASS_OPS, 0, absorbed_reductions.dims_before

    def counted(*args):
        nonlocal steps
        steps += 1
        return dims_before(*args)

    def fn(x, w):
        y, sums = x @ w, []
        for _ in range(count):
            y = jnp.sin(y)
            sums.append(y.sum())
        return sums

    monkeypatch.setattr(absorbed_reductions, "dims_before", counted)
    found = kernels(fn, *F32)
    assert len(found) > count / 2 and 0 < steps <= count * PASS_OPS
