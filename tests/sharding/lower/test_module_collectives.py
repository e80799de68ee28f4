"""Collectives of parameters that `overlap=` names: the same values, and the compiled schedule of these modules only."""

import re

import jax
import jax.numpy as jnp
import pytest

from autoshard import auto_shard, plan
from tests.sharding.overlap.programs import inputs, parameters, stacked, step
from tests.sharding.programs import assert_close

LAYERS = {"unrolled": lambda p: p, "scanned": stacked}


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", ["*:gather=off,reduce=off", "*:matmul=on", "*:matmul=off"])
@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:2 tp:4 seq"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_of_one_device(name, words, overlap):
    with jax.enable_x64(True):
        layers, x = LAYERS[name](parameters(jnp.float64)), inputs(jnp.float64)
        assert_close(jax.jit(step)(layers, x), auto_shard(step, plan=words, overlap=overlap)(layers, x))


def test_a_collective_alone_has_a_group_and_a_product_in_parts_has_permutes():
    layers, x = parameters(), inputs()

    def marks(overlap, words="fsdp:8"):
        text = plan(step, layers, x, plan=words, overlap=overlap).jit().lower(layers, x).as_text()
        return len({*re.findall(r'_scheduling_group_id = "(\d+)"', text)}), text.count("collective_permute")

    assert marks(None) == marks("*:gather=on") == (0, 0)
    assert marks("1/up:gather=off")[0] == 2  # the forward and the backward pass
    assert marks("1/up:reduce=off")[0] == 1
    assert marks("1/up:matmul=on")[1] >= 3 * 7  # two products and a gradient, each in eight parts
    assert 0 < marks("1/up:matmul=on", "dp:2 tp:4 seq")[1] < marks("*/up:matmul=on", "dp:2 tp:4 seq")[1]


def test_the_gradient_of_a_table_is_alone_where_its_reduction_is_off():
    """The gradient is summed over two mesh axes, so its scatter runs on shards, with or without `overlap=`."""

    def table_step(params, tokens):
        gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(p["table"][tokens]) @ p["out"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def groups(overlap):
        made = plan(table_step, params, tokens, plan="dp:2 fsdp:4", overlap=overlap)
        text = made.jit().lower(params, tokens).as_text()
        return len({*re.findall(r'_scheduling_group_id = "(\d+)"', text)})

    params, tokens = {"table": jnp.ones((64, 16)), "out": jnp.ones((16, 16))}, jnp.zeros((64, 64), int)
    assert [groups(overlap) for overlap in (None, "table:reduce=off")] == [0, 1]


def test_a_gather_that_is_on_waits_for_no_earlier_use():
    layers, x = parameters(), inputs()

    def dependences(overlap):
        made = plan(step, layers, x, plan="fsdp:8", gather="sequential", overlap=overlap)
        return made.jit().lower(layers, x).as_text().count("stablehlo.xor")

    # Of eight uses of matrices the first two wait for none; so do all those of `up`, which are not waited for either.
    assert [dependences(overlap) for overlap in (None, "*/up:gather=on", "*:gather=on")] == [6, 2, 0]


def wide(layers=3, width=1024, hidden=4096, rows=16384):
    one = {"up": jax.ShapeDtypeStruct((width, hidden), "bfloat16"),
           "down": jax.ShapeDtypeStruct((hidden, width), "bfloat16")}  # fmt: skip
    return [one] * layers, jax.ShapeDtypeStruct((rows, width), "bfloat16")


def forward(layers, h):
    for p in layers:
        h = h + jnp.tanh(h @ p["up"]) @ p["down"]
    return h


def hidden_share(audit, kind):
    """Module -> the share of its collectives' time that compute hides in the compiled program."""
    return {module: 1 - kinds[kind][1] / kinds[kind][0] for module, kinds in audit.modules.items() if kind in kinds}


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_gathers_in_the_compiled_schedule():
    """Each entry changes the schedule of its module. All other gathers stay as they are."""
    layers, x = wide()
    before, alone, parts = (
        plan(forward, layers, x, target="v5e:2x4", plan="fsdp:8", overlap=f"0/1/up:{entry}").verify()
        for entry in ("gather=on", "gather=off", "matmul=on")
    )
    # The first gather has nothing to run beside.
    hidden = {"0/0/up": 0.0, "0/1/up": 1.0, "0/2/up": 1.0, "0/*/down": 1.0}
    assert hidden_share(before, "gather") == pytest.approx(hidden)
    assert hidden_share(alone, "gather") == pytest.approx(hidden | {"0/1/up": 0.0})
    kinds = {(c.kind, "0/1/up" in c.op_name) for c in parts.collectives}
    assert kinds == {("all-gather", False), ("collective-permute", True)}


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_barrier_option_does_not_change_a_gather_alone():
    layers, x = wide()
    options = {"xla_tpu_aggressive_opt_barrier_removal": "ENABLED"}
    audit = plan(forward, layers, x, target="v5e:2x4", plan="fsdp:8", overlap="0/1/up:gather=off",
                 compiler_options=options).verify()  # fmt: skip
    assert audit.ok and hidden_share(audit, "gather")["0/1/up"] == pytest.approx(0.0)


def stacked_step(layers, x):
    def loss(layers):
        h, _ = jax.lax.scan(lambda h, p: (forward([p], h), None), x, layers)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers))


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_reductions_in_the_compiled_schedule():
    layers, x = wide()
    layers = {name: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype) for name, leaf in layers[0].items()}
    before, alone = (
        plan(stacked_step, layers, x, target="v6e:2x4", plan="fsdp:8", overlap=overlap,
             compiler_options="sparse-core-reductions").verify()
        for overlap in ("up:reduce=on", "up:reduce=off")
    )  # fmt: skip
    assert hidden_share(before, "reduce")["0/up"] > 0.3
    after = hidden_share(alone, "reduce")
    assert after["0/up"] == pytest.approx(0.0) and after["0/down"] > 0.3


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_products_that_the_compiler_does_not_split():
    """The compiler makes collective matmuls of all products, except those of the module that is off."""
    layers, x = wide()
    layers = {name: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype) for name, leaf in layers[0].items()}
    permuted = []
    for overlap in ("up:gather=on", "up:matmul=off"):
        made = plan(stacked_step, layers, x, target="v6e:2x4", plan="fsdp:8", overlap=overlap)
        audit = made.verify(options={})
        names = [c.op_name for c in audit.collectives if c.kind == "collective-permute"]
        permuted.append({module for module in ("0/up", "0/down") if any(f"overlap[{module}:" in n for n in names)})
    assert permuted == [{"0/up", "0/down"}, {"0/down"}]
