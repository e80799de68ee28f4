"""Reports call arguments by the names of the function's parameters; paths are accepted with names and numbers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import PlanError
from autoshard.sharding.program.argument_names import argument_names, arguments_text, named_path, path_forms
from tests.sharding.programs import batch, mlp_state, sgd_step


def test_names_of_positional_parameters():
    def fn(a, /, b, *rest, c=1, **others):
        return a, b, rest, c, others

    assert argument_names(fn) == ("a", "b")
    assert argument_names(functools.partial(fn, 1)) == ("b",)
    assert argument_names(functools.partial(fn, c=2)) == ("a", "b")
    assert argument_names(jax.jit(fn)) == ("a", "b")
    assert argument_names(min) == ()


def test_paths_with_names():
    assert [named_path(path, ("a", "b")) for path in ("0/w", "1", "2/w", "c/0", "")] == ["a/w", "b", "2/w", "c/0", ""]
    assert path_forms("0/w", ("a",)) == ("0/w", "a/w") and path_forms("1/w", ("a",)) == ("1/w",)


def test_reports_show_names_and_plans_keep_numbers():
    plan = autoshard.plan(sgd_step, mlp_state(), batch(), plan="fsdp:8", target="cpu:8")
    assert plan.arguments == ("params", "x") and [leaf.path for leaf in plan.inputs] == ["0/b", "0/v", "0/w", "1"]
    assert "\n  params/w " in str(plan) and "\n  x " in str(plan)
    assert plan.explain("0/w") == plan.explain("params/w") and plan.explain("params/w").startswith("params/w\n")
    assert autoshard.Plan.from_json(plan.to_json()).arguments == plan.arguments


def test_values_by_path_have_the_printed_paths_and_take_both():
    axes = autoshard.plan(sgd_step, mlp_state(), batch(), plan="fsdp:8", target="cpu:8").logical_axes
    assert [*axes] == ["params/b", "params/v", "params/w", "x"]
    assert axes["0/w"] == axes["params/w"] == axes.get("0/w") and "1" in axes and "x" in axes
    assert "2" not in axes and axes.get("0/u") is None
    with pytest.raises(KeyError, match="0/u"):
        axes["0/u"]


@pytest.mark.parametrize("path", ["params/w", "params/[w]", "par*/w", "0/w"])
def test_fixed_takes_names_and_numbers(path):
    plan = autoshard.plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed={path: P(None, "data")})
    assert {leaf.path: leaf.spec for leaf in plan.inputs}["0/w"] == P(None, "data")


def test_suggestions_have_the_form_that_was_given():
    for path, similar in (("0/ww", "0/w"), ("params/ww", "params/w")):
        with pytest.raises(PlanError, match=f"matches no input. Similar paths: {similar}"):
            autoshard.plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed={path: P()})


def test_static_arguments_do_not_shift_the_names():
    @functools.partial(autoshard.auto_shard, static_argnums=0, plan="dp:8")
    def step(scale, params, x):
        return jax.tree.map(lambda p: p - scale * jnp.mean(x @ p), params)

    plan = step.plan(0.5, {"w": jnp.ones((8, 16))}, jnp.ones((16, 8)))
    assert plan.arguments == ("params", "x") and plan.explain("params/w").startswith("params/w\n")


def test_nnx_objects_have_the_names_of_their_arguments():
    def step(model, x):
        return model(x)

    plan = autoshard.plan(step, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((16, 8)), plan="dp:8", target="cpu:8")
    assert plan.explain("model/kernel").startswith("model/kernel\n")


def test_texts_of_arguments_stay_short():
    leaves = {f"{name}/{'k' * 500}": 1.0 for name in range(40)} | {"last\nline": True}
    text = arguments_text(leaves)
    assert len(text) < 600 and text.endswith("and 35 more arguments") and "\n" not in text and " float;" in text
