"""Steps with a single row: inputs and axes have the roles that they have with two rows."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from autoshard import Plan, plan
from autoshard.errors import PlanError
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.load import Described
from autoshard.serve.steps import Steps
from autoshard.sharding.axes.rows.single_row import values_of_single_row
from autoshard.sharding.program.tracing import trace
from tests.models.pretrained.folders import DEEPSEEK_V3, GPT_OSS, LLAMA, MIXTRAL


def decode_plan(folder, config, rows):
    """Plans the decode step of a model for some rows."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    described = Described.of(Folder.open(folder), None, {})
    params = nnx.to_pure_dict(nnx.state(described.model(described.shapes)))
    return Steps(described.graph, params, rows, 32, {"target": "v5e:1x2", "plan": "tp:2"}).plan


def row_of(traced):
    program = traced.program
    pairs = [(program.inputs[i], program.outputs[o]) for i, o in traced.state]
    return values_of_single_row(program, pairs, traced.owners)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config", [LLAMA, MIXTRAL, GPT_OSS, DEEPSEEK_V3], ids=["llama", "mixtral", "gpt-oss", "deepseek-v3"]
)
def test_roles_and_names_are_those_of_two_rows(tmp_path, config):
    one, two = (decode_plan(tmp_path / "model", config, rows) for rows in (1, 2))
    assert {leaf.path: leaf.role for leaf in one.inputs} == {leaf.path: leaf.role for leaf in two.inputs}
    assert {"parameter", "data"} == {leaf.role for leaf in one.inputs if len(leaf.shape) > 1}
    of_weights = [{leaf.path: leaf.axes for leaf in plan.inputs if leaf.role == "parameter"} for plan in (one, two)]
    assert of_weights[0] == of_weights[1]


def test_a_part_of_a_weight_that_the_row_chooses_is_a_weight():
    def step(state, weights):
        found = state["x"] @ jax.lax.dynamic_index_in_dim(weights, state["token"][0], keepdims=False)
        return {"x": found, "token": jnp.argmax(found, axis=-1).astype(jnp.int32)}

    state = {"x": jax.ShapeDtypeStruct((1, 32), jnp.float32), "token": jax.ShapeDtypeStruct((1,), jnp.int32)}
    program = (traced := trace(step, (state, jax.ShapeDtypeStruct((4, 32, 32), jnp.float32)), {})).program
    row = row_of(traced)
    parts = {op.results[0] for op in program.ops() if op.name == "dynamic_slice"}
    assert set(program.outputs) <= row and parts and not parts & row


def test_a_train_step_has_no_single_row():
    def step(state, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        return {"w": state["w"] - grad, "count": state["count"] + 1}

    state = {"w": jax.ShapeDtypeStruct((32, 1), jnp.float32), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    program = (traced := trace(step, (state, jax.ShapeDtypeStruct((1, 32), jnp.float32)), {})).program
    assert program.inputs and not row_of(traced)


def test_the_features_of_a_single_row_are_data():
    def step(weights, cache, x):
        kept = cache["kept"].at[0, cache["position"]].set((x + weights["first"][0, 0])[0] @ weights["down"])
        y = x + jnp.sum(kept, axis=1) @ weights["up"]
        return {"kept": kept, "position": cache["position"] + 1}, y

    sizes = {"first": (1, 4, 32), "down": (32, 8), "up": (8, 32)}
    weights = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    cache = {"kept": jax.ShapeDtypeStruct((1, 16, 8), jnp.float32), "position": jax.ShapeDtypeStruct((), jnp.int32)}
    made = plan(step, weights, cache, jax.ShapeDtypeStruct((1, 32), jnp.float32), target="v5e:1x2", plan="tp:2")
    roles = {leaf.path: leaf.role for leaf in made.inputs}
    assert roles.pop("1/position") == "other"
    assert roles == {"0/down": "parameter", "0/first": "parameter", "0/up": "parameter", "1/kept": "data", "2": "data"}


@pytest.mark.parametrize("with_predictions", [False, True])
def test_a_train_step_of_one_example_has_no_single_row(with_predictions):
    def step(w, x, y):
        def loss(w):
            return jnp.sum((x @ w - y) ** 2)

        return w - jax.grad(loss)(w), x @ w if with_predictions else loss(w)

    assert not row_of(
        trace(step, tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in ((32, 1), (1, 32), (1, 1))), {})
    )


def attention_step(params, x):
    def loss(params):
        q, k, v = (x @ params[name] for name in "qkv")
        return jnp.mean((jax.nn.softmax(q @ k.mT) @ v - x) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def step_without_attention(params, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["q"]) @ params["k"] @ params["v"] - x) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


PARAMS = {name: jax.ShapeDtypeStruct((32, 32), jnp.float32) for name in "qkv"}
ONE, TWO, NONE = (jax.ShapeDtypeStruct((*rows, 64, 32), jnp.float32) for rows in ((1,), (2,), ()))


def test_positions_of_one_row_are_the_batch_and_a_sequence():
    made = plan(attention_step, PARAMS, ONE, target="cpu:8", plan="fsdp:2 cp:4")
    assert {leaf.path: leaf.axes for leaf in made.inputs}["1"][:2] == ("1", "seq")
    assert {leaf.path: leaf.spec for leaf in made.inputs}["1"] == P(None, ("fsdp", "cp"))
    of_batch = plan(attention_step, PARAMS, ONE, target="cpu:8", plan="dp:8")
    assert {leaf.path: leaf.spec for leaf in of_batch.inputs}["1"] == P(None, "dp") and not of_batch.sequence
    rows = plan(attention_step, PARAMS, TWO, target="cpu:8", plan="dp:2 cp:4")
    assert {leaf.path: leaf.axes for leaf in rows.inputs}["1"][:2] == ("batch", "seq")


@pytest.mark.parametrize(
    "words, sequence, note",
    [
        ("fsdp:2 ring:4", {"fsdp": "ring", "ring": "ring"}, "so fsdp:2 also shards the sequence. The ring has 8"),
        ("dp:2 fsdp:2 ring:2", dict.fromkeys(("dp", "fsdp", "ring"), "ring"), "dp:2 and fsdp:2 also shard the"),
        ("fsdp:2 gather:4", {"fsdp": "gather", "gather": "gather"}, "Attention gathers keys over fsdp"),
        ("ring:8 state", {"ring": "ring"}, ""),
    ],
)
def test_mesh_axes_of_the_batch_take_part_in_attention_over_one_row(words, sequence, note):
    made = plan(attention_step, PARAMS, ONE, target="cpu:8", plan=words)
    assert made.sequence == sequence
    found = [each for each in made.notes if "the batch has one row" in each]
    assert [note in each for each in found] == [True] * bool(note)
    again = Plan.from_json(made.to_json()).bind(attention_step, PARAMS, ONE)
    assert again.sequence == sequence and again.estimate == made.estimate


@pytest.mark.parametrize("step, x", [(step_without_attention, ONE), (attention_step, NONE)])
def test_independent_positions_and_rows_without_a_dimension_of_rows_are_no_sequence(step, x):
    with pytest.raises(PlanError, match=r"but no such axis can be sharded") as error:
        plan(step, PARAMS, x, target="cpu:8", plan="cp:8")
    assert ("The batch has one row, so its positions count as the batch" in str(error.value)) == (x is ONE)
    assert plan(step, PARAMS, x, target="cpu:8", plan="dp:8").chosen == "dp:8"


def test_angles_that_rows_share_do_not_hide_that_there_is_one_row():
    def step(params, x, angles):
        return attention_step(params, x * jnp.cos(angles))

    angles = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert plan(step, PARAMS, ONE, angles, target="cpu:8", plan="ring:8").sequence == {"ring": "ring"}


@pytest.mark.parametrize("words", ["ring:8", "pp:2 ring:4", "pp:2 fsdp:2 cp:2"])
def test_the_rows_that_microbatches_count_are_no_sequence(words):
    layers = {name: jax.ShapeDtypeStruct((2, 32, 32), jnp.float32) for name in "qkv"}

    def step(layers, x, targets):
        def layer(x, layer):
            q, k, v = (x @ layer[name] for name in "qkv")
            return jax.nn.softmax(q @ k.mT) @ v, None

        def loss(layers):
            return jnp.mean((jax.lax.scan(layer, x, layers)[0] - targets) ** 2)

        return jax.tree.map(lambda p, g: p - g, layers, jax.grad(loss)(layers))

    made = plan(step, layers, TWO, TWO, target="cpu:8", plan=words, microbatches=2)
    axes = {leaf.path: leaf.axes for leaf in made.inputs}
    assert {axes["1"][1], axes["2"][1]} == {"seq"} and "seq" not in axes["1"][0] + axes["2"][0]
