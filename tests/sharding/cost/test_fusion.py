"""Which operators run as one kernel, and what the kernels read and write."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.sharding.cost import fusion as fusion_module
from autoshard.sharding.cost.constants import BROADCAST_GROWTH
from autoshard.sharding.cost.fusion import fuse
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.families.stacked.stages import read_layer
from autoshard.spmdrules.ir.program import build

B, D, F = 64, 32, 128
X, W, V = (jax.ShapeDtypeStruct(s, "float32") for s in ((B, D), (D, F), (F, D)))


def kernel_traffic(fn, *args, tpu=True):
    """(operator, shapes read, shapes written) of each kernel, in program order."""
    program = build(jax.make_jaxpr(fn)(*args))
    kernels = fuse(program, fuses_operands=tpu).kernels

    def shapes(values):
        return sorted(tuple(program.avals[v].shape) for v in values)

    ordered = [kernels[id(op)] for op in program.ops() if id(op) in kernels]
    return [(k.op.name, shapes(k.reads), shapes(k.writes)) for k in ordered]


def test_a_chain_of_elementwise_operators_is_fused_with_its_user():
    def fn(x, w, v):
        return jax.nn.gelu(jnp.sin(x) @ w * 2.0 + 1.0) @ v

    first = ("dot_general", [(D, F), (B, D)], [(B, F)])
    assert kernel_traffic(fn, X, W, V) == [first, ("dot_general", [(B, F), (F, D)], [(B, D)])]
    apart = [name for name, *_ in kernel_traffic(fn, X, W, V, tpu=False)]
    assert apart == ["sin", "dot_general", "mul", "dot_general"]  # off TPU, operands of products are written


def test_softmax_reads_its_scores_once_for_each_reduction_and_once_for_its_result():
    assert kernel_traffic(jax.nn.softmax, X) == [
        ("reduce_max", [(B, D)], [(B,)]),
        ("reduce_sum", [(B,), (B, D)], [(B,)]),
        ("div", [(B,), (B,), (B, D)], [(B, D)]),
    ]


def test_an_optimizer_update_of_one_parameter_is_one_kernel():
    def update(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - m / (jnp.sqrt(v) + 1e-8), m, v

    ((_, reads, writes),) = kernel_traffic(update, *[W] * 4)
    assert reads == [(D, F)] * 4 and writes == [(D, F)] * 3


def test_a_loop_reads_one_slice_per_iteration_and_writes_its_carry():
    def fn(x, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, ws)

    stack = jax.ShapeDtypeStruct((6, D, D), "float32")
    kernels = kernel_traffic(fn, X, stack)
    assert kernels == [("dot_general", [(D, D), (B, D)], [(B, D)])]  # the product computes tanh before it writes


def test_a_mask_is_computed_again_in_the_loop_that_uses_it():
    def fn(xs):
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((D, D))), (B, D, D))
        return jax.lax.scan(lambda c, x: (c + jnp.sum(x * mask), None), 0.0, xs)[0]

    kernels = kernel_traffic(fn, jax.ShapeDtypeStruct((3, B, D, D), "float32"))
    assert ("reduce_sum", [(B, D, D)], [()]) in [(n, [s for s in r if len(s) > 2], w) for n, r, w in kernels]


def test_off_tpu_a_mask_from_outside_of_a_loop_is_written():
    def fn(xs):
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((D, D), bool)), (B, D, D))
        return jax.lax.scan(lambda c, x: (c + jnp.sum(jnp.where(mask, x, 0.0)), None), 0.0, xs)[0]

    xs = jax.ShapeDtypeStruct((3, B, D, D), "float32")
    assert ((B, D, D), 1) not in values_in_memory(fn, xs)
    assert ((B, D, D), 1) in values_in_memory(fn, xs, tpu=False)


def test_a_product_reads_the_layer_of_a_stage_in_place():
    stack, index = jax.ShapeDtypeStruct((6, 2, D, D), "float32"), jax.ShapeDtypeStruct((2,), "int32")
    x = jax.ShapeDtypeStruct((2, B, D), "float32")
    kernels = kernel_traffic(lambda x, ws, n: x @ read_layer(ws, n), x, stack, index)
    assert kernels == [("dot_general", [(2, D, D), (2, B, D)], [(2, B, D)])]


def test_a_gather_reads_its_rows_and_an_update_in_place_costs_the_update():
    table, ids = jax.ShapeDtypeStruct((1000, D), "float32"), jax.ShapeDtypeStruct((B,), "int32")
    kernels = dict((name, (reads, writes)) for name, reads, writes in kernel_traffic(lambda t, i: t[i], table, ids))
    assert kernels["gather"][1] == [(B, D)] and (1000, D) not in kernels["gather"][0]

    def put(buffer, x):
        return jax.lax.dynamic_update_slice(buffer, x, (0, 0))

    (only,) = kernel_traffic(put, table, X)
    assert only == ("dynamic_update_slice", [(B, D)], [(B, D)])
    (sliced,) = kernel_traffic(lambda t: jnp.sum(t[:7]), table)
    assert sliced == ("reduce_sum", [(7, D)], [()])


def test_on_tpu_a_strided_slice_of_a_tiled_dimension_reads_its_rows_and_writes_them():
    x = jax.ShapeDtypeStruct((8, B, D), "float32")

    def sliced(dim, stride):
        def fn(x):
            return jnp.tanh(lax.slice_in_dim(jnp.sin(x), 0, None, stride, dim)) + 1.0

        return fn

    half = (8, B // 2, D)
    tiled = [("sin", [x.shape], [x.shape]), ("slice", [half], [half]), ("add", [half], [half])]
    assert kernel_traffic(sliced(1, 2), x) == tiled
    assert [name for name, *_ in kernel_traffic(sliced(2, 2), x)] == ["sin", "slice", "add"]
    # XLA fuses the others with the operators that take them.
    for dim, stride, tpu in ((1, 1, True), (0, 2, True), (1, 2, False)):
        assert [name for name, *_ in kernel_traffic(sliced(dim, stride), x, tpu=tpu)] == ["add"]


def test_on_tpu_a_pad_between_elements_is_a_kernel():
    def padded(*config):
        return lambda x: lax.pad(jnp.sin(x), 0.0, [config, (0, 0, 0)]) + 1.0

    spread = (2 * B - 1, D)
    assert kernel_traffic(padded(0, 0, 1), X) == [
        ("sin", [(B, D)], [(B, D)]),
        ("pad", [(B, D)], [spread]),
        ("add", [spread], [spread]),
    ]
    assert [name for name, *_ in kernel_traffic(padded(1, 1, 0), X)] == ["add"]
    assert [name for name, *_ in kernel_traffic(padded(0, 0, 1), X, tpu=False)] == ["add"]


def test_a_scatter_into_zeros_writes_them_first():
    table, ids = jax.ShapeDtypeStruct((1000, D), "float32"), jax.ShapeDtypeStruct((B,), "int32")
    programs = (
        (lambda i, x: jnp.zeros((1000, D)).at[i].add(x), (ids, X)),
        (lambda t, i, x: t.at[i].add(x), (table, ids, X)),
    )
    into_zeros, in_place = (
        next(writes for name, _, writes in kernel_traffic(fn, *args) if name == "scatter-add") for fn, args in programs
    )
    assert in_place == [(B, D)] and into_zeros == [(B, D), (1000, D)]


def values_in_memory(fn, *args, tpu=True):
    """(shape, written bytes per element) of values in memory, without the program's inputs."""
    program = build(jax.make_jaxpr(fn)(*args))
    fusion = fuse(program, fuses_operands=tpu)
    written = sorted(fusion.written - set(program.inputs))
    return [(program.avals[v].shape, program.avals[v].dtype.itemsize * fusion.narrow.get(v, 1)) for v in written]


def test_a_product_is_written_at_the_end_of_its_elementwise_chain():
    assert values_in_memory(lambda x, w: jnp.sin((x @ w).astype("bfloat16")), X, W) == [((B, F), 2)]

    def loss(x, w):
        logits = (x @ w).astype("bfloat16")
        return jnp.sum(logits) + jnp.max(logits)

    assert values_in_memory(loss, X, W)[0] == ((B, F), 2)  # several users: in their dtype


def test_scores_that_are_scaled_and_masked_are_written_at_the_end_of_their_chain():
    def softmax_of(x, y, change):
        scores = change(jnp.einsum("bd,cd->bc", x, y).astype("float32"))
        return jnp.exp(scores - jnp.max(scores, 1, keepdims=True))

    x = jax.ShapeDtypeStruct((B, D), "bfloat16")
    assert values_in_memory(lambda x, y: softmax_of(x, y, lambda s: s * 0.1), x, x)[0] == ((B, B), 4)
    assert values_in_memory(lambda x, y: softmax_of(x, y, lambda s: s), x, x)[0] == ((B, B), 2)  # a cast alone is free


def test_scores_with_a_bias_that_is_repeated_are_written_in_the_type_of_their_sum():
    """T5 adds the same position bias to the scores of each row. XLA:TPU stores the biased scores in float32."""
    rows = 2 * BROADCAST_GROWTH

    def softmax_of(x, y, bias):
        scores = jnp.einsum("rbd,rcd->rbc", x, y).astype("float32") + bias
        return jnp.exp(scores - jnp.max(scores, -1, keepdims=True))

    x = jax.ShapeDtypeStruct((rows, B, D), "bfloat16")
    bias, as_many = (jax.ShapeDtypeStruct((n, B, B), "float32") for n in (1, rows))
    assert values_in_memory(softmax_of, x, x, bias)[0] == ((rows, B, B), 4)
    assert values_in_memory(softmax_of, x, x, as_many)[0] == ((rows, B, B), 2)

    def rounded(x, w, bias):
        y = (x @ w + bias).astype("float32")
        return jnp.exp(y - jnp.max(y, -1, keepdims=True))

    w, bias = jax.ShapeDtypeStruct((D, F), "bfloat16"), jax.ShapeDtypeStruct((F,), "bfloat16")
    assert values_in_memory(rounded, x, w, bias)[0] == ((rows, B, F), 2)  # the sum is computed in 16 bits


def test_the_backward_pass_computes_the_operand_of_its_product_again():
    """Here 70 operators lie between the two passes."""

    def fn(x, w, dy):
        y = jnp.sin(x)
        out = y @ w
        for _ in range(70):
            out = jnp.sin(out)
        return out, y.T @ dy

    dy = jax.ShapeDtypeStruct((B, F), "float32")
    assert ((B, D), 2) not in values_in_memory(fn, X, W, dy)


def test_an_opaque_operator_reads_its_operands_from_memory():
    @operator("b d -> b d", name="opaque")
    def opaque(x):
        return x + 1

    assert values_in_memory(lambda x: opaque(jnp.sin(x)), X) == [((B, D), 4), ((B, D), 4)]


def test_an_operand_of_several_products_is_written_once_in_16_bits():
    assert values_in_memory(lambda x, w: (jnp.sin(x) @ w, jnp.sin(x) * 2.0), X, W) == [((B, F), 4), ((B, D), 4)]

    def fn(x, w, u):
        y = jnp.sin(x)
        return y @ w, y @ u

    assert values_in_memory(fn, X, W, W) == [((B, D), 2), ((B, F), 4), ((B, F), 4)]


def test_a_residual_stream_is_written_once_per_layer():
    """Otherwise every norm would read everything that was added to the stream before."""

    def fn(x, w, v):
        for _ in range(6):
            x = x + jnp.tanh(x / jnp.sum(x, -1, keepdims=True)) @ w @ v
        return x

    kernels = kernel_traffic(fn, X, W, V)
    assert [read.count((B, D)) for _, read, _ in kernels] == [1] * 13  # two products a layer, and the first sum


def step_of_layer(act, gated=False):
    """Return the gradients of a layer of two products, or of three with a gate, and its inputs."""

    def loss(weights, x):
        h = act(x @ weights["up"])
        h = h * (x @ weights["gate"]) if gated else h
        return jnp.mean((h @ weights["down"]) ** 2)

    shapes = {"up": W, "gate": W, "down": V}
    return jax.grad(loss, (0, 1)), shapes, X


@pytest.mark.parametrize(("act", "gated", "large"), [
    (jax.nn.relu, False, ["dot_general", "select_n"]),  # before the activation, and its gradient
    (jax.nn.gelu, False, ["dot_general", "add_any"]),
    (jax.nn.silu, False, ["dot_general", "add_any"]),
    (lambda x: jax.nn.gelu(x, approximate=False), False, ["dot_general", "erfc", "add_any"]),
    (jax.nn.silu, True, ["dot_general", "dot_general", "dot_general", "mul", "add_any"]),  # two of the gate
])  # fmt: skip
def test_tpus_write_what_an_activation_takes_and_compute_its_result_in_both_passes(act, gated, large):
    """XLA:TPU writes the same values: compiled for v5e (libtpu 0.0.42.1) by `benchmarks/peak_memory.py`."""
    program = build(jax.make_jaxpr(step_of_layer(act, gated)[0])(*step_of_layer(act, gated)[1:]))
    memory = fuse(program, fuses_operands=True).written
    found = [op.name for op in program.ops() for v in op.results
             if v in memory and not op.blocks and program.avals[v].shape == (B, F)]  # fmt: skip
    assert sorted(found) == sorted(large)


ACTIVATIONS = {
    "gelu": (jax.nn.gelu, {"tanh"}),
    "gelu by erf": (lambda x: jax.nn.gelu(x, approximate=False), {"erf", "erfc"}),
    "silu": (jax.nn.silu, set()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gpus_write_slow_functions_that_both_passes_need_and_nothing_that_one_kernel_needs_twice(name, monkeypatch):
    """As compiled for h100: the forward kernel writes the operand of the next product and the slow function."""
    monkeypatch.setattr(fusion_module, "PASS_OPS", 8)  # the program is short
    act, slow = ACTIVATIONS[name]

    def gradients(x, w, v, cotangent):
        return jax.vjp(lambda x, w, v: act(x @ w) @ v, x, w, v)[1](cotangent)

    program = build(jax.make_jaxpr(gradients)(X, W, V, X))

    def written(on_gpu):
        memory = fuse(program, fuses_operands=False, on_gpu=on_gpu).written
        found = [op.name for op in program.ops() if {*op.results} & memory and not op.blocks]
        return [name for name in found if name not in ("dot_general", "transpose")]

    assert len({*written(True)} & slow) == bool(slow)
    assert len(written(True)) == 2 + bool(slow)  # also the operands of the products of both passes
    assert not {*written(False)} & slow


def test_what_is_moved_to_the_host_or_back_is_in_the_memory_of_the_device():
    """The same values, kept, may stay on the chip between their kernels."""

    def fn(x, moves):
        y = jnp.cumsum(x, axis=1)
        z = jax.device_put(jax.device_put(y, jax.memory.Space.Host), jax.memory.Space.Device) if moves else jnp.sort(y)
        return jnp.cumsum(z, axis=1)

    def on_chip(moves):
        return len(fuse(build(jax.make_jaxpr(fn, static_argnums=1)(X, moves)), fuses_operands=True).on_chip)

    assert (on_chip(moves=True), on_chip(moves=False)) == (0, 2)


@pytest.mark.parametrize(("arrange", "is_written"), [
    (lambda x: x.reshape(8, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(8, 16, 12), True),  # patches
    (lambda x: x.reshape(8, 4, 2, 4, 2, 3).transpose(0, 1, 2, 3, 4, 5).reshape(8, 16, 12), False),  # in their order
    (lambda x: x.reshape(8, 4, 2, 8, 3).transpose(0, 2, 1, 3, 4).reshape(8, 16, 12), True),  # parts of one dimension
    (lambda x: x.reshape(8, 4, 2, 8, 3).transpose(0, 3, 1, 2, 4).reshape(8, 8, 24), False),  # which are joined again
    (lambda x: x.reshape(8, 4, 2, 8, 3).transpose(0, 3, 1, 4, 2).reshape(8, 32, 6), True),  # with another dimension
    (lambda x: x.transpose(0, 2, 1, 3).reshape(8, 16, 12), False),  # XLA can store the image in this order
    (lambda x: x.reshape(8, 16, 12), False),
])  # fmt: skip
def test_patches_of_images_are_written_once_in_16_bits_for_the_products_of_both_passes(arrange, is_written):
    def loss(w, x):
        return jnp.mean(jnp.sin(arrange(x).astype("bfloat16") @ w) ** 2)

    x = jax.ShapeDtypeStruct((8, 8, 8, 3), "float32")
    shapes = jax.ShapeDtypeStruct((jax.eval_shape(arrange, x).shape[-1], 80), "bfloat16"), x
    program = build(jax.make_jaxpr(jax.grad(loss))(*shapes))
    memory = fuse(program, fuses_operands=True).written
    found = [str(program.avals[v].dtype) for op in program.ops() for v in op.results
             if v in memory and program.avals[v].size == x.size]  # fmt: skip
    assert found == ["bfloat16"] * is_written


@pytest.mark.parametrize("is_stored", [True, False])
def test_on_tpu_a_sum_that_is_only_cast_is_written_in_the_narrower_type(is_stored):
    def fn(x, w):
        total = x.sum(1)
        return total if is_stored else total @ w

    x = jax.ShapeDtypeStruct((B, 2, D), "bfloat16")
    program = build(jax.make_jaxpr(fn)(x, jax.ShapeDtypeStruct((D, F), "bfloat16")))
    (op,) = [op for op in program.ops() if op.name == "reduce_sum"]
    assert program.avals[op.results[0]].dtype == jnp.float32

    def written(tpu):
        """The bytes that the kernel of the sum writes."""
        return sum(nbytes(program.avals[v]) for v in fuse(program, fuses_operands=tpu).kernels[id(op)].writes)

    assert written(True) == 2 * B * D and written(False) == 4 * B * D


def test_a_sum_that_is_used_in_both_types_is_written_in_the_wider_one():
    def fn(x):
        total = x.astype(jnp.float32).sum(1)
        return total.astype(jnp.bfloat16), jnp.sin(total)

    program = build(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((B, 2, D), "bfloat16")))
    (op,) = [op for op in program.ops() if op.name == "reduce_sum"]
    assert op.results[0] in fuse(program, fuses_operands=True).written


def test_a_sum_that_only_a_callback_takes_has_a_kernel():
    def fn(x):
        jax.debug.print("{}", x.sum())
        return x

    assert kernel_traffic(fn, jnp.zeros((8, 128)))
