"""Optimizers and schedules by name."""

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import auto_shard
from autoshard.errors import ConfigError
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.step.named_optimizers import OPTIMIZERS, SCHEDULES
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 256 * 8).reshape(256, 8), "b": jnp.ones(8)}
RATES: dict[str, Any] = dict(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2)


def user_sgd(schedule: optax.Schedule, factor: float = 1.0) -> optax.GradientTransformation:
    return optax.sgd(lambda step: factor * schedule(step))


def user_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    return optax.constant_schedule(config.learning_rate * steps)


def updates(config: OptimizerConfig, gradients: Any = None, count: int = 3) -> Any:
    optimizer = make_optimizer(config, 20)
    state, gradients = optimizer.init(PARAMS), gradients or PARAMS
    for _ in range(count):
        found, state = optimizer.update(gradients, state, PARAMS)
    return found


@pytest.mark.parametrize(
    ("name", "middle", "late"),
    [("cosine", 0.1 + 0.9 * 0.5, 0.1), ("linear", 0.1 + 0.9 * 0.5, 0.1), ("wsd", 1.0, 0.1), ("constant", 1.0, 1.0)],
)
def test_schedules(name, middle, late):
    rate: Any = learning_rate_schedule(OptimizerConfig(schedule=name, decay_share=0.25, **RATES), 22)
    assert set(SCHEDULES) >= {name}
    found = [float(rate(step)) for step in (0, 1, 2, 12, 22)]
    np.testing.assert_allclose(found, [1 / 3, 2 / 3, 1.0, middle, late], rtol=1e-6)


def test_wsd_decays_in_the_last_part_only():
    rate: Any = learning_rate_schedule(OptimizerConfig(schedule="wsd", decay_share=0.25, **RATES), 22)
    constant, middle, late = (float(rate(step)) for step in (17, 19, 22))
    assert constant == 1.0 and 0.1 < middle < 1.0 and late == pytest.approx(0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"adamw", "sgd", "muon", "schedule_free"}))
def test_an_optimizer_of_optax_gets_the_schedule_the_clipping_and_the_decay(name):
    config = OptimizerConfig(name=name, clip_norm=1.0, weight_decay=0.25, **RATES)
    decays = (
        {} if name not in ("adan", "lamb", "lion", "nadamw") else dict(weight_decay=0.25, mask={"w": True, "b": False})
    )
    optimizer = OPTIMIZERS[name](learning_rate_schedule(config, 20), **decays)
    state, norm = optimizer.init(PARAMS), optax.tree.norm(PARAMS)
    for _ in range(3):
        expected, state = optimizer.update(jax.tree.map(lambda x: x / norm, PARAMS), state, PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), updates(config), expected)


def test_arguments_take_precedence_over_settings():
    config = OptimizerConfig(beta1=0.5, beta2=0.6, arguments=("b1=0.9", "b2=0.99", "nesterov=true"), **RATES)
    expected = OptimizerConfig(beta1=0.9, beta2=0.99, arguments=("nesterov=true",), **RATES)
    different = OptimizerConfig(beta1=0.9, beta2=0.99, **RATES)
    np.testing.assert_array_equal(updates(config)["w"], updates(expected)["w"])
    assert np.abs(updates(config)["w"] - updates(different)["w"]).max() > 0


def test_words_of_python_are_no_texts():
    config = OptimizerConfig(name="sgd", momentum=0.9, arguments=("nesterov=False",), **RATES)
    np.testing.assert_array_equal(updates(config)["w"], updates(replace(config, arguments=()))["w"])


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (
            "--optimizer.name lion --optimizer.beta1 0.8",
            "--optimizer.beta1 is for --optimizer.name adamw, muon, schedule_free, not",
        ),
        (
            "--optimizer.name adam --optimizer.weight_decay=0",
            "--optimizer.weight-decay is for --optimizer.name adamw, ad",
        ),
        ("--optimizer.momentum 0.9", "--optimizer.momentum is for --optimizer.name sgd"),
        ("--optimizer.decay-share 0.1", "--optimizer.decay-share is for --optimizer.schedule wsd"),
        (
            "--optimizer.name lion --optimizer.weight-decay 0.1 --optimizer.schedule wsd --optimizer.decay-share 0.1",
            None,
        ),
    ],
)
def test_options_that_have_no_effect_are_refused(options, refused):
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        parse_config(options.split(), TrainConfig, "autoshard train", "")


def test_functions_of_users():
    config = OptimizerConfig(
        name=f"{__name__}:user_sgd", schedule=f"{__name__}:user_schedule", learning_rate=0.5, clip_norm=0.0,
        arguments=("factor=3",),
    )  # fmt: skip
    np.testing.assert_allclose(updates(config)["w"], -3 * 0.5 * 20 * PARAMS["w"], rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adafactor", "lamb", pytest.param("lion", marks=pytest.mark.slow)])
def test_a_sharded_step_equals_one_device(name):
    """Adafactor factors its moments, and lamb takes norms of whole parameters."""
    rates: dict[str, Any] = dict(learning_rate=0.01, min_learning_rate=0.001, warmup_steps=2)
    optimizer = make_optimizer(OptimizerConfig(name=name, **rates), 20)

    def step(state, batch):
        params, moments = state
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] + p["b"] - 1.0) ** 2))(params)
        changes, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, changes), moments), loss

    batch = jax.random.normal(jax.random.key(0), (16, 256))
    one = many = (PARAMS, optimizer.init(PARAMS))
    planned = auto_shard(step, plan="fsdp:8")
    for _ in range(3):
        one, _ = jax.jit(step)(one, batch)
        many, _ = planned(many, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, many)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(name="adamv"), r"optimizer.name is 'adamv'; did you mean 'adam'\? Give adafactor, .*or package.module"),
        (dict(name="sophia"), "optimizer.name is 'sophia'; give adafactor"),
        (dict(name="lion", arguments=("b1=abc",)), "optimizer.arguments b1=abc: it must be a number, such as 0.9"),
        (dict(name="lion", arguments=("b1=true",)), "optimizer.arguments b1=true: it must be a number"),
        (
            dict(name="schedule_free", schedule="constant", arguments=("b1=0",)),
            "optimizer.arguments b1=0: with schedule_free it must be above 0 and below 1",
        ),
        (dict(name="sgd", arguments=("nesterov=1",)), "nesterov=1: it must be true or false, such as false"),
        (dict(schedule="cosin"), r"optimizer.schedule is 'cosin'; did you mean 'cosine'\?"),
        (dict(name="lion", arguments=("b3=1",)), "optimizer.arguments: lion has no 'b3'; it has b1, b2"),
        (dict(arguments=("b1",)), "optimizer.arguments 'b1': write NAME=VALUE"),
        (dict(arguments=("learning_rate=1",)), "give --optimizer.learning-rate and .schedule"),
        (dict(decay_share=0.0), "decay_share is 0.0; it must be above 0 and at most 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)
