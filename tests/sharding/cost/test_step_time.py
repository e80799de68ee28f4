"""Estimated times compared with their formulas, on a machine with known figures."""

import functools

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.tiles import filled_tile_fraction
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, CHIPS
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.sharding_plan import Estimate
from autoshard.spmdrules.core.rule import Rule
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state, whole_bytes

H100 = CHIPS["h100"]
READ = BANDWIDTH_REACHED * H100.memory_bandwidth


def estimate(fn, *shapes, dtype="float32", **options) -> Estimate:
    return plan(fn, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), **options).estimate


def product(w, x):
    return x @ w


@pytest.mark.parametrize(("dtype", "peak"), [("float32", H100.flops_f32), ("bfloat16", H100.flops)])
def test_a_product_takes_the_time_of_its_flops(dtype, peak):
    estimated = estimate(product, (4096, 4096), (4096, 4096), dtype=dtype, target="h100:8", plan="dp:8")
    assert estimated.compute_us == pytest.approx(2 * 4096**3 / (H100.efficiency * peak) / 8 * 1e6)
    assert (estimated.comm_us, estimated.comm_bytes, estimated.step_time_us) == (0, 0, estimated.compute_us)


def test_a_thin_product_takes_the_time_of_its_bytes():
    estimated = estimate(product, (4096, 4096), (8, 4096), target="h100:1", plan="dp:1")
    moved = 4 * (4096 * 4096 + 2 * 8 * 4096)
    assert estimated.compute_us == pytest.approx(moved / READ * 1e6)


@pytest.mark.parametrize(("target", "plan"), [("h100:8", "dp:8"), ("h100:2x4", "dp:8"), ("v5e:4x4", "dp:16")])
def test_a_gradient_is_reduced_over_the_links_that_it_crosses(target, plan):
    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    estimated = estimate(gradient, (512, 1024), (4096, 512), target=target, plan=plan)
    machine = find_target(target)
    n, size = machine.devices, 512 * 1024 * 4
    assert estimated.comm_bytes == pytest.approx(2 * (n - 1) / n * size)  # one all-reduce over all axes
    assignment = machine.assign(parse_request(plan).sizes)
    assert estimated.comm_us == pytest.approx(assignment.time_us("all-reduce", assignment.pieces, size))
    # Only the transposition after the product that computes the gradient can hide the reduction.
    transposition_us = 2 * size / READ * 1e6 if "all-reduce" in machine.chip.hides else 0.0
    assert estimated.step_time_us == pytest.approx(estimated.compute_us + estimated.comm_us - transposition_us)


def test_a_loop_body_counts_once_per_iteration():
    def run(length):
        def fn(x, w, v):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ v, None), x, None, length=length)[0]

        return estimate(fn, (4096, 512), (512, 1024), (1024, 512), target="h100:8", plan="tp:8")

    once, often = run(1), run(5)
    assert once.comm_bytes == pytest.approx(2 * 7 / 8 * 4096 * 512 * 4)
    assert often.comm_bytes == pytest.approx(5 * once.comm_bytes)
    assert often.compute_us == pytest.approx(5 * once.compute_us)
    assert often.comm_us == pytest.approx(5 * once.comm_us)


def of_no_line(plan):
    """The traffic without a source line of the user."""
    return [(kind, size) for kind, _, size, line in plan.traffic if ".py:" not in line]


def test_updated_parameters_are_gathered_where_they_are_stored_whole():
    params = mlp_state()
    planned = plan(adamw_step, (params, OPTIMIZER.init(params)), batch(), target="h100:8", plan="zero1:8")
    gathered_bytes = [size for kind, axis, size, line in planned.traffic if line == "parameters, after the update"]
    assert gathered_bytes == [pytest.approx(7 / 8 * whole_bytes(params))]
    for strategy in ("dp:8", "fsdp:8"):
        planned = plan(adamw_step, (params, OPTIMIZER.init(params)), batch(), target="h100:8", plan=strategy)
        assert not [line for *_, line in planned.traffic if line == "parameters, after the update"]


def test_one_gather_serves_all_products_that_use_its_result():
    def twice(x, w):
        return jnp.cos(x) @ w + jnp.sin(x) @ w

    shapes = (4096, 512), (512, 1024)
    whole = 7 / 8 * 4 * 512 * 1024
    assert estimate(twice, *shapes, target="h100:8", plan="fsdp:8").comm_bytes == pytest.approx(whole)

    def apart(x, w, v):
        return jnp.cos(x) @ w + jnp.sin(x) @ v

    assert estimate(apart, *shapes, shapes[1], target="h100:8", plan="fsdp:8").comm_bytes == pytest.approx(2 * whole)


def test_an_activation_that_is_no_longer_sharded_is_gathered():
    def fn(x, w, v):
        h = jnp.tanh(x @ w)
        return h[:, :3], h @ v

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 512), (512, 1024), (1024, 512))]
    planned = plan(fn, *shapes, target="h100:8", plan="tp:8")
    sent_bytes = {kind: size for kind, _, size, _ in planned.traffic}
    expected = {"all-gather": 7 / 8 * 4 * 4096 * 1024, "all-reduce": 2 * 7 / 8 * 4 * 4096 * 512}
    assert sent_bytes == pytest.approx(expected)


def test_every_device_reads_all_of_a_replicated_weight():
    estimated = estimate(product, (4096, 4096), (8, 4096), target="h100:8", plan="dp:8")
    assert estimated.compute_us == pytest.approx(4 * (4096 * 4096 + 2 * 4096) / READ * 1e6)


@pytest.mark.parametrize(
    ("factors", "fraction"),
    [({}, 1.0), ({"h": "k"}, 1 / 2), ({"h": "n"}, 1 / 4), ({"h": "k", "d": "n"}, 1 / 8), ({"h": "m", "d": "m"}, 1.0)],
)
def test_a_shard_smaller_than_a_tile_wastes_the_rest_of_the_tile(factors, fraction):
    rule = Rule.parse("m k, k n -> m n; reduce k; where m=65536 k=512 n=256")
    assert filled_tile_fraction(rule, OperatorStrategy(factors, ()), {"h": 8, "d": 8}, tile=128) == fraction
    assert filled_tile_fraction(rule, OperatorStrategy(factors, ()), {"h": 8, "d": 8}, tile=1) == 1.0


def test_small_values_that_are_read_soon_stay_in_on_chip_memory():
    """Between two kernels, 4 MiB stay on a TPU and 128 MiB do not. A GPU has no such memory."""

    def compute_us(rows, target, arrays=1):
        def fn(*xs):
            return jnp.cumsum(functools.reduce(jnp.multiply, [jnp.sort(x, axis=1) for x in xs]), axis=1)

        inputs = [jax.ShapeDtypeStruct((rows, 1024), "float32")] * arrays
        return plan(fn, *inputs, target=target).estimate.compute_us

    assert compute_us(32_768, "v5e:1x1") == pytest.approx(2 * 32 * compute_us(1024, "v5e:1x1"))
    assert compute_us(16_384, "h100:1") == pytest.approx(16 * compute_us(1024, "h100:1"))
    # One array of 32 MiB stays, unless operators may use most of the memory, as on v6e. Three that are live at once do
    # not fit: all are written and read again.
    assert compute_us(8192, "v6e:1x1") == pytest.approx(2 * 8 * compute_us(1024, "v6e:1x1"))
    assert compute_us(8192, "v5e:1x1") == pytest.approx(8 * compute_us(1024, "v5e:1x1"))
    assert compute_us(8192, "v5e:1x1", 3) == pytest.approx((3 + 3 + 3 + 1) / (1 + 1) * compute_us(8192, "v5e:1x1"))
    assert compute_us(1024, "v5e:1x1", 3) == pytest.approx((3 + 1) / (1 + 1) * compute_us(1024, "v5e:1x1"))


@pytest.mark.parametrize(("target", "products"), [("v5e:1x1", (1, 1, 4)), ("h100:1", (4, 4, 4)), ("cpu:1", (4, 4, 4))])
def test_a_grouped_product_costs_what_its_platform_computes(target, products):
    """On GPUs and CPUs XLA multiplies a masked copy of all rows for each of the groups (compiled for an H100)."""
    rows, inner, columns, groups = 8192, 4096, 4096, 4
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, inner), (groups, inner, columns), (rows, columns))]
    sizes = jax.ShapeDtypeStruct((groups,), "int32")

    def product(x, w, d, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    def of_rows(x, w, d, sizes):
        return jax.vjp(lambda x: jax.lax.ragged_dot(x, w, sizes), x)[1](d)

    def of_matrices(x, w, d, sizes):
        return jax.vjp(lambda w: jax.lax.ragged_dot(x, w, sizes), w)[1](d)

    chip = find_target(target).chip
    for fn, times, copied in zip(
        (product, of_rows, of_matrices), products, (inner, columns, inner + columns), strict=True
    ):
        found = plan(fn, *shapes, sizes, target=target, plan="dp:1").estimate
        copies = 0 if target == "v5e:1x1" else groups * rows * copied * 4
        busy = times * 2.0 * rows * inner * columns / chip.reached(4)
        assert found.compute_us == pytest.approx(
            (busy + 2 * copies / (chip.memory_bandwidth * BANDWIDTH_REACHED)) * 1e6, rel=0.05
        )
        assert copies <= found.memory_bytes["temporary"] <= copies + 4 * groups * inner * columns
