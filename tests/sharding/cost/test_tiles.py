"""Arrays in the tiles of a TPU's memory."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from autoshard import operator, plan
from autoshard.models.workloads import workload
from autoshard.sharding.cost.tiles import batches_of_products, filled_tile_fraction, padded_rows, tile_padding
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build
from autoshard.train.program.build import workload_step


def temporary(fn, *shapes, target="v5e:1x1"):
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return plan(fn, *arrays, target=target, plan="dp:1").estimate.memory_bytes["temporary"]


@operator("b d -> b d; whole d")
def kernel(x):
    """An opaque operator."""
    return jnp.tanh(x)


@pytest.mark.parametrize(("size", "padding"), [(64, 2), (128, 1)])
def test_stacks_of_results_of_opaque_operators_have_whole_tiles(size, padding):
    def fn(x):
        stack = jax.lax.scan(lambda c, _: (c, kernel(c + 1)), x, length=8)[1]
        return jnp.sum(jnp.cumsum(stack, 0))

    rows = 4096
    assert temporary(fn, (rows, size)) >= 8 * rows * size * 4 * padding
    assert temporary(fn, (rows, size), target="h100:1x1") < 8 * rows * size * 4 * 2.5


def test_results_of_opaque_operators_keep_their_padding_when_they_are_moved():
    def fn(x, w):
        y = kernel(x)
        moved = jnp.swapaxes((2 * y).astype("bfloat16").reshape(32, 1, 96), 0, 1)
        return moved @ w.astype("bfloat16"), kernel(x @ w)

    shapes = ((32, 96), "float32"), ((96, 128), "float32")
    program = build(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(*each) for each in shapes)))
    found = {str(program.avals[v].str_short()): factor for v, factor in padded_rows(program).items()}
    assert found == dict.fromkeys(
        ("float32[32,96]", "bfloat16[32,96]", "bfloat16[32,1,96]", "bfloat16[1,32,96]"), 4 / 3
    )


@operator("a b d -> a b; whole d")
def row_sums(x):
    """An opaque operator with a small result."""
    return x.sum(-1)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x,
        lambda x: jnp.transpose(x, (1, 0, 2)),
        lambda x: (x.astype("bfloat16") * 0.125).astype("float32"),
        lambda x: x[:, :, None].reshape(x.shape),
        lambda x: x + jnp.ones(x.shape[-1:])[None, None],  # a bias
    ],
)
def test_stacks_of_operands_of_opaque_operators_have_whole_tiles(changed):
    """The stack has the operand itself, or the value that is transposed, scaled or cast to it."""

    def fn(x):
        def layer(c, _):
            kept = jnp.sin(c)
            return c + row_sums(changed(kept)).sum(), kept

        return jnp.sum(jnp.cumsum(jax.lax.scan(layer, x, length=8)[1], 0))

    def stacks(size, target="v5e:1x1"):
        return temporary(fn, (128, 128, size), target=target)

    # Half of the memory is a stack of sums, whose rows are not in whole tiles.
    assert stacks(64) > 0.7 * stacks(128) and stacks(64, "h100:1x1") < 0.55 * stacks(128, "h100:1x1")


def test_other_stacks_have_no_whole_rows():
    """Sums along the rows are stored as XLA likes, and so is what is summed for an opaque operator."""

    def fn(x):
        def layer(c, _):
            kept = jnp.sin(c)
            return c + row_sums(jnp.cumsum(kept, -1)).sum(), kept

        return jnp.sum(jnp.cumsum(jax.lax.scan(layer, x, length=8)[1], 0))

    assert temporary(fn, (128, 128, 64)) < 0.55 * temporary(fn, (128, 128, 128))


def test_a_cast_in_a_loop_makes_a_copy_of_the_stack_on_tpus():
    def step(casts):
        def loss(stack, x):
            def layer(x, w):
                return jnp.tanh(x @ (w.astype(jnp.bfloat16).astype(jnp.float32) if casts else w)), None

            return jax.lax.scan(jax.checkpoint(layer), x, stack)[0].sum()

        return lambda stack, x: (stack - jax.grad(loss)(stack, x), x.sum())

    def difference(target):
        shapes = (8, 512, 512), (16, 512)
        return temporary(step(True), *shapes, target=target) - temporary(step(False), *shapes, target=target)

    copy = 8 * 512 * 512 * 2
    assert difference("v5e:1x1") >= 0.9 * copy
    assert difference("h100:1x1") < 0.5 * copy


def test_parameters_that_a_loop_casts_have_a_copy_on_tpus():
    """Compiled for v5e:2x4: 7.10 GiB with 8 layers, 14.39 with 20."""

    def estimate(layers, target="v5e:2x4"):
        work = workload("gpt-1.3b").with_(batch_size=256, layers=layers, remat="keep:context+out_proj+mlp_in")
        made = plan(*workload_step(work, 2), target=target, plan="fsdp:8", donate_argnums=0)
        return made.estimate.peak_memory_bytes / 2**30

    assert estimate(8) == pytest.approx(7.10, rel=0.05)
    assert estimate(20) == pytest.approx(14.39, rel=0.05)


def einsum_us(spec, *shapes):
    """The estimated time of a product on one device of v5e, and the least time of its bytes."""
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    result = jax.eval_shape(lambda *x: jnp.einsum(spec, *x), *arrays)
    made = plan(lambda *x: jnp.einsum(spec, *x), *arrays, target="v5e:1x1", plan="dp:1")
    return made.estimate.step_time_us, 2 * sum(x.size for x in (*arrays, result)) / 819e9 * 1e6


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bshd,bshd->bsh", [(8, 2048, 64, 64)] * 2),  # rows with rows
        ("tk,tkn->tn", [(4096, 2), (4096, 2, 2560)]),  # a vector for each entry of the batch
        ("tn,tkn->tk", [(4096, 2560), (4096, 2, 2560)]),
        ("tn,tm->tnm", [(4096, 128), (4096, 512)]),  # nothing is contracted
        ("k,kn->n", [(4096,), (4096, 4096)]),
    ],
)
def test_products_with_vectors_take_the_time_of_their_bytes(spec, shapes):
    """XLA compiles them as sums of elementwise products, so the matrix unit's tiles do not matter."""
    found_us, bytes_us = einsum_us(spec, *shapes)
    assert bytes_us < found_us < 2 * bytes_us


def test_products_of_matrices_use_the_matrix_unit():
    found_us, bytes_us = einsum_us("mk,kn->mn", (4096, 4096), (4096, 4096))
    assert found_us > 4 * bytes_us


def convolution_us(x, kernel, stride=1, groups=1, gradient=False, target="v5e:1x1"):
    """The estimated time of a convolution, or of the gradient of its kernel."""

    def convolve(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def of_kernel(x, kernel):
        result, transpose = jax.vjp(lambda kernel: convolve(x, kernel), kernel)
        return transpose(result + 1)

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (x, kernel)]
    made = plan(of_kernel if gradient else convolve, *shapes, target=target, plan="dp:1")
    return made.estimate.step_time_us


@pytest.mark.parametrize(
    ("size", "channels", "window", "stride", "compiled_us"),
    [(56, (192, 192), 3, 1, 263), (56, (96, 96), 3, 1, 91), (56, (64, 64), 3, 1, 83), (224, (3, 192), 7, 4, 142)],
)
def test_the_positions_of_a_convolution_are_rows(size, channels, window, stride, compiled_us):
    """16 rows fill no tile of 128, but their positions do. The compiled times are libtpu's cycles."""
    us = convolution_us((16, size, size, channels[0]), (window, window, *channels), stride)
    assert us == pytest.approx(compiled_us, rel=0.4)


def test_the_gradient_of_a_kernel_contracts_the_positions():
    """Compiled for v5e (libtpu 0.0.42.1): 234 us for the convolution, and 174 us for the gradient of its kernel."""
    x, kernel = (16, 28, 28, 384), (3, 3, 384, 384)
    both = convolution_us(x, kernel, gradient=True)
    assert both == pytest.approx(234 + 174, rel=0.2)


def test_the_time_of_a_convolution_is_proportional_to_its_rows():
    times = [convolution_us((rows, 28, 28, 256), (3, 3, 256, 256)) for rows in (2, 16, 256)]
    assert times[1] == pytest.approx(8 * times[0], rel=0.01) and times[2] == pytest.approx(16 * times[1], rel=0.01)


def test_small_groups_of_channels_fill_little_of_a_tile():
    """Compiled for v5e (libtpu 0.0.42.1): 1472 us for 32 groups of 8 channels, and 2.2 ms of transposes around."""
    us = convolution_us((16, 56, 56, 256), (3, 3, 8, 256), groups=32)
    assert 1472 < us < 3646


@pytest.mark.parametrize("gradient", [False, True])
def test_depthwise_convolutions_use_the_vector_units(gradient):
    """Compiled for v5e (libtpu 0.0.42.1): 0.85 ms of cycles. On the matrix unit it would be 80 ms."""
    us = convolution_us((16, 56, 56, 192), (7, 7, 1, 192), groups=192, gradient=gradient)
    operations_us = 2 * 16 * 56 * 56 * 192 * 49 / 6.1e12 * 1e6
    runs = 2 if gradient else 1
    assert runs * operations_us <= 1.02 * us < runs * 1000


@pytest.mark.parametrize("gradient", [False, True])
def test_gpus_take_the_time_of_the_bytes_for_depthwise_convolutions(gradient):
    size, channels = 56, 192
    found_us = convolution_us((64, size, size, channels), (3, 3, 1, channels), 1, channels, gradient, "h100:1x1")
    bytes_us = 2 * 2 * 64 * size * size * channels / 3350e9 * 1e6
    assert bytes_us < found_us < 4 * bytes_us  # the gradient reads the result, too


def test_few_rows_on_each_device_are_no_reason_to_shard_channels():
    """Compiled for v5e:4x4 with 16 images a device, a residual network takes half the time without `tp:2`."""

    def loss(kernels, x):
        def block(h, kernel):
            return h + jax.nn.relu(jax.lax.conv_general_dilated(
                h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))), None  # fmt: skip

        return jnp.mean(jax.lax.scan(block, x, kernels)[0].astype(jnp.float32) ** 2)

    def step(kernels, x):
        return jax.tree.map(lambda k, g: k - g, kernels, jax.grad(loss)(kernels, x))

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8, 3, 3, 192, 192), (256, 56, 56, 192))]
    made = plan(step, *shapes, target="v5e:4x4", donate_argnums=0)
    assert "tp" not in made.chosen
    estimates = [plan(step, *shapes, target="v5e:4x4", plan=words).estimate for words in ("dp:16", "dp:8 tp:2")]
    assert 1.5 * estimates[0].step_time_us < estimates[1].step_time_us


def test_the_groups_of_a_grouped_product_are_no_positions():
    """Only the weights have them, as a kernel has its positions. So 64 contracted elements fill half of a tile."""
    arrays = [jax.ShapeDtypeStruct((4096, 64), "bfloat16"), jax.ShapeDtypeStruct((8, 64, 2048), "bfloat16")]
    made = plan(jax.lax.ragged_dot, *arrays, jax.ShapeDtypeStruct((8,), "int32"), target="v5e:1x1", plan="dp:1")
    program = bound_or_error(made.bound).problem.axes.program
    (product,) = (op for op in program.ops() if op.name == "ragged_dot_general")
    assert product.rule is not None
    assert filled_tile_fraction(product.rule, cast(Any, SimpleNamespace(factors={})), {}, 128) == 0.5


@operator("b d, d e -> b e; whole d e")
def product_inside(x, w):
    """An opaque operator with a product."""
    return jnp.tanh(x @ w)


def test_products_inside_of_opaque_operators_use_the_matrix_unit():
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8192, 4096), (4096, 4096))]
    estimate = plan(product_inside, *shapes, target="v5e:1x1", plan="dp:1").estimate
    assert estimate.step_time_us < 1.5 * 2 * 8192 * 4096 * 4096 / 197e12 * 1e6


def batches(fn, *shapes, written=()):
    """The dimensions without tiles of the inputs, and of written values, of a function."""
    program = build(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)))
    stored = {*program.inputs, *(v for op in program.ops() if op.name in written for v in op.results)}
    return {program.avals[v].shape: set(dims) for v, dims in batches_of_products(program, stored).items()}


@pytest.mark.parametrize(("fn", "expected"), [
    (lambda x, y: jnp.einsum("bsd,bdt->bst", x, y), {(8, 16, 32): {0}, (8, 32, 16): {0}}),
    (lambda x, y: jnp.einsum("bsd,bdt->bst", jnp.exp(x), 2 * y), {(8, 16, 32): {0}, (8, 32, 16): {0}}),
    (lambda x, y: jnp.einsum("sbd,bdt->bst", x.transpose(1, 0, 2), y), {(8, 16, 32): {0}, (8, 32, 16): {0}}),
    (lambda x, y: jnp.einsum("dsb,bdt->bst", x.T, y[:, :, :8]), {(8, 16, 32): {0}, (8, 32, 16): {0}}),
    (lambda x, y: jnp.einsum("bsd,cdt->bcst", x, y), {}),  # no batch
    (lambda x, y: jnp.einsum("bsd,bds->b", x, y), {}),  # not computed by the matrix unit
    (lambda x, y: jnp.einsum("bsd,bdt->bst", x.reshape(4, 32, 32), y.reshape(4, 32, 32)), {}),  # a part of a dimension
])  # fmt: skip
def test_the_batch_of_a_product_has_no_tiles(fn, expected):
    assert batches(fn, (8, 16, 32), (8, 32, 16)) == expected


def test_stacks_of_operands_have_no_tiles_along_the_batch_of_a_product():
    def fn(x, y):
        def layer(y, x):
            x = jnp.sin(x)
            return jnp.tanh(jnp.einsum("bst,btd->bsd", jnp.exp(x), y)), x

        return jax.lax.scan(layer, y, x)

    found = batches(
        lambda x, y: jax.lax.scan(lambda y, x: fn(x, y), y, x), (2, 4, 8, 16, 16), (8, 16, 32), written="sin"
    )
    assert found[4, 8, 16, 16] == {1} and found[2, 4, 8, 16, 16] == {2}


@pytest.mark.parametrize(("sizes", "padding"), [
    ((196, 196), 200 * 256 / 196**2),
    ((64, 196), 256 / 196),
    ((49, 32), 128 / 49),  # not 56 / 49 * 128 / 32
    ((1, 200), 1.28),  # a tile of 1 x 128
    ((3, 128), 4 / 3),
    ((200,), 1.28),
    ((), 1.0),
])  # fmt: skip
def test_arrays_have_whole_tiles_along_two_dimensions(sizes, padding):
    assert tile_padding(sizes) == pytest.approx(padding)
