"""Parameters that are gathered one after another compute the same values, and no gather starts early."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Plan, auto_shard, plan
from autoshard.errors import PlanError
from autoshard.sharding.lower.gathers import gather_order
from tests.sharding.programs import assert_close

LAYERS, WIDTH, HIDDEN = 4, 32, 64
ROWS = 512  # so many that it is cheaper to gather a parameter than the rows


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * LAYERS
    ups_downs = [jax.random.normal(k, s, dtype) * s[0] ** -0.5 for k, s in zip(keys, shapes, strict=True)]
    return [{"up": up, "down": down} for up, down in zip(ups_downs[::2], ups_downs[1::2], strict=True)]


def layer(p, h):
    return h + jnp.tanh(h @ p["up"].astype(h.dtype)) @ p["down"].astype(h.dtype)


def stacked(layers):
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def unrolled(layer):
    def forward(layers, h):
        for p in layers:
            h = layer(p, h)
        return h

    return forward


def scanned(layer):
    return lambda stack, h: jax.lax.scan(lambda h, p: (layer(p, h), None), h, stack)[0]


def step_of(forward):
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


PROGRAMS = {
    "unrolled": (unrolled(layer), lambda p: p),
    "remat": (unrolled(jax.checkpoint(layer)), lambda p: p),
    "scanned": (scanned(layer), stacked),
    "scanned remat": (scanned(jax.checkpoint(layer)), stacked),
    "call": (unrolled(jax.jit(layer)), lambda p: p),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:4 tp:2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_one_device(name, words):
    forward, convert = PROGRAMS[name]
    step, params = step_of(forward), convert(parameters())
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    assert_close(jax.jit(step)(params, x), auto_shard(step, plan=words, gather="sequential")(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["prefetch", "sequential"])
def test_planned_functions_are_differentiated(gather):
    """The dependence changes bits of parameters, which have no derivative of their own."""
    params, x = parameters(), jnp.ones((ROWS, WIDTH))

    def loss(params, x):
        return jnp.mean(unrolled(layer)(params, x) ** 2)

    actual = jax.grad(auto_shard(loss, plan="fsdp:8", gather=gather))(params, x)
    assert_close(jax.jit(jax.grad(loss))(params, x), actual)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_parameters_of_narrow_types(dtype):
    params, x = parameters(dtype), jnp.ones((ROWS, WIDTH), jnp.float32)
    forward = unrolled(layer)
    expected = jax.jit(forward)(params, x)
    actual = auto_shard(forward, plan="fsdp:8", gather="sequential")(params, x)
    assert_close(expected, actual)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float4_e2m1fn, jnp.bool_, jnp.complex64])
def test_arrays_whose_bits_cannot_be_changed_wait_for_nothing(dtype):
    assert not gather_order.has_bits(jax.ShapeDtypeStruct((4,), dtype))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e5m2, jnp.int8, jnp.uint32, jnp.float64])
def test_the_bits_of_a_shard_do_not_change(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        bits = np.random.default_rng(0).integers(0, 256, 64 * jnp.dtype(dtype).itemsize, np.uint8)
        shard = jnp.asarray(bits.view(jnp.dtype(dtype)))
        for earlier in (jnp.full((2, 2), 3.25), jnp.asarray(-7), jnp.full(1, jnp.nan, jnp.bfloat16)):
            changed = np.asarray(jax.jit(gather_order._dependent)(shard, earlier))
            np.testing.assert_array_equal(changed.view(np.uint8), bits)


def dependences(name, gather):
    """How many parameters wait for earlier uses in the program that is lowered."""
    forward, convert = PROGRAMS[name]
    params, x = convert(parameters()), jnp.ones((ROWS, WIDTH))
    made = plan(step_of(forward), params, x, plan="fsdp:8", gather=gather)
    return len(re.findall(r"stablehlo.xor", made.jit().lower(params, x).as_text()))


@pytest.mark.parametrize(
    ("name", "uses"),
    # The forward pass uses each of 8 parameters, the backward pass all but the first. The first two uses wait for none.
    [("unrolled", 15), ("call", 15)],
)
def test_every_use_waits_for_the_last_but_one(name, uses):
    assert dependences(name, "auto") == 0
    assert dependences(name, "sequential") == uses - 2


def test_each_use_in_the_compiled_program_has_a_gather_of_its_own():
    """A compiler that removed the dependence would gather each parameter once."""
    params, x = parameters(), jnp.ones((ROWS, WIDTH))
    counts = {
        gather: plan(step_of(unrolled(layer)), params, x, plan="fsdp:8", gather=gather)
        .jit().lower(params, x).compile().as_text().count(" all-gather(")
        for gather in ("auto", "sequential")
    }  # fmt: skip
    assert counts["sequential"] >= 15 > counts["auto"]


def test_memory_and_traffic_are_priced():
    shapes = {"up": (1024, 4096), "down": (4096, 1024)}
    wide = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)

    def gradient_of_input(params, x):  # needs every parameter twice, and no gradient of a parameter
        return jax.grad(lambda x: jnp.mean(unrolled(layer)(params, x) ** 2))(x)

    def estimate_of(gather):
        return plan(gradient_of_input, [wide] * 8, x, plan="fsdp:8", target="v5e:2x4", gather=gather).estimate

    auto, sequential, parameter = estimate_of("auto"), estimate_of("sequential"), 1024 * 4096 * 2
    assert auto.peak_memory_bytes - sequential.peak_memory_bytes > 10 * parameter  # 16 gathered ones, or two
    assert sequential.comm_bytes == pytest.approx(2 * auto.comm_bytes, rel=0.01)
    assert sequential.step_time_us > auto.step_time_us


def test_plans_keep_the_order(tmp_path):
    step, params, x = step_of(unrolled(layer)), parameters(), jnp.ones((ROWS, WIDTH))
    made = plan(step, params, x, plan="fsdp:8", gather="sequential")
    made.to_html(tmp_path / "plan.html")
    assert "gather: sequential" in str(made) and "<code>sequential</code>" in (tmp_path / "plan.html").read_text()
    read = Plan.from_json(made.to_json())
    assert read.gather == "sequential" and read.bind(step, params, x).gather == "sequential"
    with pytest.raises(PlanError, match="gather is 'auto', but plan is a Plan with gather='sequential'"):
        auto_shard(step, plan=read, gather="auto")
    assert '"gather"' not in plan(step, params, x, plan="fsdp:8").to_json()


@pytest.mark.parametrize("given", ["prefech", 3, True])
def test_an_unknown_order_lists_the_known_ones(given):
    with pytest.raises(
        PlanError, match=r"gather is .*; it must be 'auto', 'prefetch', 'sequential', 'once' or 'repeat'"
    ):
        autoshard.plan(layer, parameters()[0], jnp.ones((ROWS, WIDTH)), gather=given)
