"""Errors in a user's function name the user's line and arguments, and their tracebacks show the user's frames only."""

import traceback

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import autoshard
from autoshard import auto_shard
from autoshard.errors import AutoshardError, AutoshardWarning
from tests.sharding.programs import batch, mlp_state, sgd_step

STATE = {"params": {"w": jnp.ones((8, 8))}}


def on_weight(state, batch):
    if state["params"]["w"].sum() > 0:
        return batch
    return batch @ state["params"]["w"]


def on_batch(flag, state, batch):
    return batch if batch.sum() > 0 else state


def files(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


CASES = {
    "a leaf of an argument": (lambda: auto_shard(on_weight)(STATE, batch()), r"on_weight at .*test_user_errors.py:\d+ "
                              r"(?s:.)*the argument state\['params'\]\['w'\]"),
    "by keyword": (lambda: auto_shard(on_weight)(batch=batch(), state=STATE), r"the argument state\['params'\]\['w'\]"),
    "beside a static argument": (
        lambda: auto_shard(on_batch, static_argnums=0)("train", STATE, batch()), "the argument batch"
    ),
    "plan": (lambda: autoshard.plan(on_weight, STATE, batch()), r"the argument state\['params'\]\['w'\]"),
    "lower": (lambda: auto_shard(on_weight).lower(STATE, batch()), r"the argument state\['params'\]\['w'\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_errors_name_the_users_argument_and_show_only_the_users_frames(name):
    call, message = CASES[name]
    with pytest.raises(jax.errors.TracerBoolConversionError, match=message) as caught:
        call()
    assert files(caught.value) == {__file__}


def test_errors_name_the_variables_of_nnx_objects():
    def fn(model, x):
        return x if model.kernel[...].sum() > 0 else model(x)

    with pytest.raises(jax.errors.TracerBoolConversionError, match="the argument model.kernel"):
        auto_shard(fn)(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 8)))


CALLS = {
    "call": lambda step, x: step(x),
    "step.plan": lambda step, x: step.plan(x),
    "plan": lambda step, x: autoshard.plan(jnp.sin, x),
    "vmap": lambda step, x: jax.vmap(step)(x[None]),
}


@pytest.mark.parametrize("name", CALLS)
def test_warnings_point_to_the_users_line(name):
    with pytest.warns(AutoshardWarning, match="nothing is sharded") as caught:
        CALLS[name](auto_shard(jnp.sin), jnp.ones((3, 5)))
    assert {each.filename for each in caught} == {__file__}


def test_wrong_arguments_and_requests_show_only_the_users_frames():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'") as caught:
        auto_shard(on_weight)(STATE)
    assert files(caught.value) == {__file__}
    with pytest.raises(AutoshardError, match="takes 9 devices") as caught:
        autoshard.plan(sgd_step, mlp_state(), batch(), plan="dp:9")
    assert files(caught.value) == {__file__}


def test_all_frames_are_shown_on_request_and_for_faults_of_the_package(monkeypatch):
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    assert before != "off"
    monkeypatch.setattr("autoshard.sharding.runtime.dispatch.plan_traced", None)
    with pytest.raises(TypeError, match="not callable") as caught:
        auto_shard(sgd_step)(mlp_state(), batch())
    assert any(file.endswith("dispatch.py") for file in files(caught.value))
    monkeypatch.undo()
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            auto_shard(on_weight)(STATE, batch())
        assert any(file.endswith("dispatch.py") for file in files(caught.value))
    finally:
        jax.config.update("jax_traceback_filtering", before)
