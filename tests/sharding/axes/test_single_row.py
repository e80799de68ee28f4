"""Steps with a single row: inputs and axes have the roles that they have with two rows."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.load import Described
from autoshard.serve.steps import Steps
from autoshard.sharding.axes.single_row import values_of_single_row
from autoshard.sharding.program.tracing import trace
from tests.models.pretrained.folders import DEEPSEEK_V3, GPT_OSS, LLAMA, MIXTRAL


def decode_plan(folder, config, rows):
    """Plans the decode step of a model for some rows."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    described = Described.of(Folder.open(folder), None, {})
    params = nnx.to_pure_dict(nnx.state(described.model(described.shapes)))
    return Steps(described.graph, params, rows, 32, {"target": "v5e:1x2", "plan": "tp:2"}).plan


@pytest.mark.few(2)
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
    row = values_of_single_row(program, [program.inputs[i] for i, _ in traced.state])
    parts = {op.results[0] for op in program.ops() if op.name == "dynamic_slice"}
    assert set(program.outputs) <= row and parts and not parts & row


def test_a_train_step_has_no_single_row():
    def step(state, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        return {"w": state["w"] - grad, "count": state["count"] + 1}

    state = {"w": jax.ShapeDtypeStruct((32, 1), jnp.float32), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    program = (traced := trace(step, (state, jax.ShapeDtypeStruct((1, 32), jnp.float32)), {})).program
    assert not values_of_single_row(program, [program.inputs[i] for i, _ in traced.state])
