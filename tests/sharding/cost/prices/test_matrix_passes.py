"""Work of the matrix unit by precision, and in Fourier transforms."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.cost.prices.matrix_passes import fourier_work, precision_passes
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.program.tracing import trace


def only(name, fn, *args):
    found = analyse(trace(fn, args, {})).axes.program.ops()
    (op,) = [op for op in found if op.name == name]
    return op


WIDE, NARROW = (jax.ShapeDtypeStruct((256, 256), dtype) for dtype in (jnp.float32, jnp.bfloat16))


@pytest.mark.parametrize(("x", "precision", "passes"), [
    (WIDE, None, 1),
    (WIDE, "default", 1),
    (WIDE, "high", 3),
    (WIDE, "highest", 6),
    (NARROW, "highest", 1),  # nothing to split
])  # fmt: skip
def test_passes_of_a_product(x, precision, passes):
    assert precision_passes(only("dot_general", lambda x: jnp.matmul(x, x, precision=precision), x)) == passes


@pytest.mark.parametrize(("preset", "passes"), [
    ("BF16_BF16_F32", 1), ("BF16_BF16_F32_X3", 3), ("BF16_BF16_F32_X9", 9), ("F32_F32_F32", 6),
])  # fmt: skip
def test_passes_of_an_algorithm(preset, passes):
    algorithm = lax.DotAlgorithmPreset[preset]
    assert precision_passes(only("dot_general", lambda x: jnp.matmul(x, x, precision=algorithm), WIDE)) == passes


def test_passes_of_an_algorithm_by_its_number_of_operations():
    parts = lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, num_primitive_operations=3)
    assert precision_passes(only("dot_general", lambda x: jnp.matmul(x, x, precision=parts), WIDE)) == 3


def test_the_larger_precision_of_both_operands_counts():
    op = only("dot_general", lambda x: jnp.matmul(x, x, precision=("default", "highest")), WIDE)
    assert precision_passes(op) == 6


def test_the_precision_of_a_context():
    with jax.default_matmul_precision("highest"):
        op = only("dot_general", lambda x: x @ x, WIDE)
    assert precision_passes(op) == 6


def compute_us(precision, target, n=4096):
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    made = plan(lambda x, y: jnp.matmul(x, y, precision=precision), x, x, target=target, plan="dp:4")
    return made.estimate.compute_us


def test_precise_products_take_longer_on_a_tpu():
    assert compute_us("highest", "v5e:2x2") == pytest.approx(6 * compute_us("default", "v5e:2x2"), rel=0.05)
    assert compute_us("highest", "h100:4") == compute_us("default", "h100:4")


def work(fn, shape):
    found = fourier_work(only("fft", fn, jax.ShapeDtypeStruct(shape, jnp.float32)))
    assert found is not None
    return found


def complex_fft(x):
    return jnp.fft.fft(lax.complex(x, x))


@pytest.mark.parametrize(("fn", "shape", "operations", "exchanged"), [
    (jnp.fft.rfft, (8, 256), 4 * 256, 0),
    (jnp.fft.rfft, (8, 1000), 4 * 1000, 0),
    (complex_fft, (8, 256), 6 * 256, 0),
    (jnp.fft.rfft, (8, 1024), 6 * (128 + 8), 1),
    (complex_fft, (8, 4096), 6 * (128 + 32), 1),
    (complex_fft, (8, 65536), 6 * (256 + 256), 1),
])  # fmt: skip
def test_products_of_a_transform(fn, shape, operations, exchanged):
    """`operations` are those that the compiler counts for each element. Each takes 6 passes."""
    found, elements = work(fn, shape), shape[0] * shape[1]
    assert found.flops == 6 * operations * elements
    assert found.moved_bytes == exchanged * 6 * 4 * elements


def test_transforms_back_and_in_two_dimensions():
    back = work(lambda x: jnp.fft.irfft(lax.complex(x, x), 256), (8, 129))
    assert back.flops == 6 * 6 * 256 * (8 * 256)
    plane = work(lambda x: jnp.fft.fft2(lax.complex(x, x)), (8, 128, 128))
    assert plane.flops == 6 * 6 * (128 + 128) * (8 * 128 * 128)
    assert fourier_work(only("dot_general", lambda x: x @ x, WIDE)) is None


def transform_us(target, words):
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    return plan(lambda x: jnp.abs(jnp.fft.rfft(x)), x, target=target, plan=words).estimate.compute_us


def test_a_transform_takes_as_long_as_its_products():
    """Sharded over its rows, each device has a share of the work."""
    few, many = transform_us("v5e:2x2", "dp:4"), transform_us("v5e:2x4", "dp:8")
    assert few == pytest.approx(2 * many, rel=0.01)
    assert few > 3 * transform_us("h100:4", "dp:4")  # a GPU's transforms are bound by memory


def test_the_least_time_of_a_transform_counts_its_products():
    """So the search can reject a layout before it prices all of it."""
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    bound = bound_or_error(plan(lambda x: jnp.abs(jnp.fft.rfft(x)), x, target="v5e:2x2", plan="dp:4").bound)
    cost = bound.problem.cost
    (transform,) = [each for each in cost.classes if each.op.name == "fft"]
    whole_us = 6 * 6 * (128 + 8) * 4096 * 1024 / bound.problem.machine.target.chip.reached(2) * 1e6
    assert cost.prices.least_us(transform, devices=4) > whole_us / 4
