"""From a table to the spec of every value: contiguous shards, stored state, gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, plan
from autoshard.sharding.axes.logical_axes import find_axes
from autoshard.sharding.axes.roles import find_roles
from autoshard.sharding.layout.layout import Layout
from autoshard.spmdrules.ir.program import build
from tests.sharding.programs import OPTIMIZER, adamw_step, assert_close, batch, mlp_state


@pytest.mark.parametrize(
    ("mesh", "table", "merged", "split"),
    [
        ({"a": 2}, "major", "a", ((), ("a",), ())),
        ({"a": 2}, "minor", "", ((), (), ("a",))),  # not contiguous in the merged dimension
        ({"a": 4, "b": 2}, "major minor", "ab", ((), ("a",), ("b",))),
        ({"a": 2, "b": 2}, "major minor", "a", ((), ("a",), ("b",))),
        ({"a": 2, "b": 4}, "major major", "a", ((), ("a",), ())),  # their product does not divide it
    ],
)
def test_a_minor_part_is_sharded_only_if_the_major_part_is_fully_sharded(mesh, table, merged, split):
    program = build(jax.make_jaxpr(lambda x: x.reshape(8, 4, 16))(jax.ShapeDtypeStruct((8, 64), "float32")))
    axes = find_axes(program)
    classes = dict(zip(("major", "minor"), axes.of_value[program.inputs[0]][1], strict=True))
    columns = {axis: (classes[word],) for axis, word in zip(mesh, table.split(), strict=True)}
    layout = Layout(axes, find_roles(program, axes), mesh, columns)
    assert layout.spec(program.inputs[0]) == ((), tuple(merged))
    assert layout.spec(program.outputs[0]) == split


def test_a_dimension_that_a_loop_runs_over_is_never_sharded():
    def step(weights, x):
        def loss(weights):
            out, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]) @ w["v"], None), x, weights)
            return jnp.mean(out**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weights = {"w": jax.ShapeDtypeStruct((512, 16, 64), "float32"), "v": jax.ShapeDtypeStruct((512, 64, 16), "float32")}
    planned = plan(step, weights, jax.ShapeDtypeStruct((64, 16), "float32"), plan="fsdp:8", target="h100:8")
    assert {leaf.path: leaf.spec for leaf in planned.inputs} == {
        "0/w": P(None, None, "fsdp"), "0/v": P(None, "fsdp"), "1": P("fsdp")
    }  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_is_reduce_scattered_to_its_state_even_if_it_is_transposed(transposed):
    def step(params, x):
        h = jnp.tanh(x @ params["w"])
        gradient = (h.T @ x).T if transposed else x.T @ h
        return {**params, "w": params["w"] - gradient}, jnp.sum(h @ params["v"])

    planned = plan(step, mlp_state(), batch(size=4096), plan="fsdp:8", target="h100:8")
    kinds = {(kind, round(size)) for kind, _, size, _ in planned.traffic if size > 1000}
    assert ("reduce-scatter", 7 / 8 * 4 * 64 * 128) in kinds
    assert "all-reduce" not in {kind for kind, _ in kinds}


def test_a_gradient_is_sharded_as_its_own_state_not_as_a_weight_with_transposed_axes():
    """JAX returns gradients transposed, and the other weight of a perceptron has these axes in this order."""
    params = jax.eval_shape(lambda: mlp_state(hidden=128))
    step = auto_shard(adamw_step, plan="fsdp:4 tp:2", donate_argnums=0)
    state = (params, jax.eval_shape(OPTIMIZER.init, params)), batch(size=256)
    stored = {leaf.path: leaf.spec for leaf in step.plan(*state).inputs}
    assert stored["0/0/w"] == P("fsdp", "tp") and stored["0/0/v"] == P(("tp", "fsdp"))
    assert "all-to-all" not in step.lower(*state).compile().as_text()


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        ((3, 3, 128, 256), P(None, None, "fsdp")),  # input features, though there are more output features
        ((3, 3, 64, 256), P(None, None, None, "fsdp")),  # too few of them for rows of 16
        ((3, 3, 100, 256), P(None, None, None, "fsdp")),  # not divisible
        ((1, 1, 256, 128), P(None, None, "fsdp")),
    ],
)
def test_a_kernel_is_stored_along_its_input_features(kernel, spec):
    """The momentum of the kernel is stored in the same way.

    XLA:TPU reduce-scatters gradients along input features, and all-reduces some of those along output features.
    """

    def step(state, x):
        w, m = state

        def loss(w):
            y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return (y**2).mean()

        m = 0.9 * m + jax.grad(loss)(w)
        return w - 0.1 * m, m

    w = jax.ShapeDtypeStruct(kernel, jnp.float32)
    x = jax.ShapeDtypeStruct((64, 8, 8, kernel[2]), jnp.float32)
    planned = plan(step, (w, w), x, target="v5e:4x2", plan="fsdp:8")
    assert [leaf.spec for leaf in planned.inputs[:2]] == [spec, spec]


def test_chunks_of_a_parameter_are_gathered_and_their_gradients_scattered_one_by_one():
    """A loop over chunks of the minor dimension: chunk j has the columns j, j + 4, ..."""

    def step(params, x):
        def loss(params):
            chunks = jnp.moveaxis(params["w"].reshape(64, 32, 4), 2, 0)
            total, _ = jax.lax.scan(lambda total, w: (total + jnp.sum(jnp.tanh(x @ w)), None), 0.0, chunks)
            return total

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params = {"w": jax.ShapeDtypeStruct((64, 128), "float32")}
    planned = plan(step, params, jax.ShapeDtypeStruct((4096, 64), "float32"), plan="fsdp:8", target="h100:8")
    assert planned.inputs[0].spec == P("fsdp")
    moved = {kind: round(size) for kind, _, size, _ in planned.traffic if size > 1000}
    assert moved == {kind: 7 / 8 * 4 * 64 * 128 for kind in ("all-gather", "reduce-scatter")}


def test_a_batch_in_microbatches_is_not_gathered_before_the_loop():
    def step(params, x):
        def loss(params, rows):
            return jnp.sum(jnp.tanh(rows @ params["w"]))

        parts = jnp.swapaxes(x.reshape(1024, 4, 64), 0, 1)
        start = jax.tree.map(jnp.zeros_like, params)
        add = jax.tree.map
        total, _ = jax.lax.scan(
            lambda total, rows: (add(jnp.add, total, jax.grad(loss)(params, rows)), None), start, parts
        )
        return jax.tree.map(lambda w, g: w - g, params, total)

    params = {"w": jax.ShapeDtypeStruct((64, 128), "float32")}
    planned = plan(step, params, jax.ShapeDtypeStruct((4096, 64), "float32"), plan="fsdp:8", target="h100:8")
    assert planned.inputs[1].spec == P("fsdp") and planned.bound is not None
    assert planned.bound.layout.inputs_gathered_before_loops == []


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        ("dp:2 fsdp:2 tp:2", ("fsdp", "tp")),  # XLA would all-reduce gradients whose dimensions have both
        ("fsdp:4 tp:2", (None, ("tp", "fsdp"))),  # no other axis shards the batch: the largest dimension
        ("dp:2 fsdp:4", (None, "fsdp")),
    ],
)
def test_beside_data_parallelism_storage_avoids_sharded_dimensions(words, spec):
    def step(ws, x):
        def loss(ws):
            return jnp.sum((jnp.tanh(x @ ws["up"]) @ ws["down"]) ** 2)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    shapes = {"up": (1024, 8192), "down": (8192, 1024)}
    weights = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 1024), "bfloat16")
    assert tuple(plan(step, weights, x, plan=words, target="v5e:2x4").in_specs[0]["up"]) == spec


def table_step(state, tokens, *, head=""):
    """Adam's moment and the update of a table, whose rows a loss looks up."""

    def loss(table):
        x = jnp.tanh(table.at[tokens].get(mode="fill", wrap_negative_indices=False) * 2.0)
        if head == "tied":
            return jnp.mean((x @ table.T) ** 2)
        return jnp.mean(x**2) if not head else jnp.mean((jax.nn.one_hot(tokens, len(table)) @ table - x) ** 2)

    gradient = jax.grad(loss)(state["table"])
    moment = 0.9 * state["moment"] + 0.1 * gradient
    return {"table": state["table"] - moment, "moment": moment}


@pytest.mark.parametrize(
    ("length", "head", "spec"),
    [
        (4, "", P(None, "fsdp")),
        (4, "tied", P("fsdp")),  # a product needs the whole table
        (4, "one-hot", P("fsdp")),
        (512, "", P("fsdp")),  # a device looks up as many rows as the table has
    ],
)
def test_a_table_that_is_only_looked_up_is_stored_along_its_features(length, head, spec):
    table = jax.ShapeDtypeStruct((4096, 64), "float32")
    shapes = {"table": table, "moment": table}, jax.ShapeDtypeStruct((64, length), "int32")
    planned = plan(partial(table_step, head=head), *shapes, plan="fsdp:8", target="v5e:2x4")
    assert {leaf.spec for leaf in planned.inputs if "table" in leaf.path or "moment" in leaf.path} == {spec}
    moved = {kind for kind, *_ in planned.traffic}
    assert ("all-to-all" in moved) == (spec == P(None, "fsdp"))
    if "all-to-all" in moved:  # of the rows for the tokens, not of the table
        assert max(size for _, _, size, _ in planned.traffic) < 4 * 64 * 64 * length


def test_a_table_stored_along_its_features_has_the_gradients_of_one_device():
    keys = jax.random.split(jax.random.key(0), 2)
    state = {"table": jax.random.normal(keys[0], (512, 16)), "moment": jnp.zeros((512, 16))}
    tokens = jax.random.randint(keys[1], (16, 4), 0, 520)  # some are outside of the table
    step = auto_shard(table_step, plan="fsdp:8")
    found, expected = step(state, tokens), jax.jit(table_step)(state, tokens)
    assert found["table"].sharding.spec == P(None, "fsdp")
    assert jnp.isfinite(found["table"]).all()
    assert_close(found, expected)
