"""Muon on stacked parameters, and the average of a schedule-free optimizer: on one device and sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from autoshard import auto_shard
from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig
from autoshard.train.step.matrices import matrix_axes
from autoshard.train.step.optimizer import OptimizerConfig, make_optimizer
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import eval_params, make_train_step

RATES: dict[str, Any] = dict(learning_rate=1e-2, warmup_steps=0, schedule="constant")
SHAPE = GPTConfig(vocab=64, layers=2, heads=4, width=32, context=16)


def program_of(name: str, shape: GPTConfig = SHAPE) -> Any:
    return make_program(lambda rngs: GPT(shape, rngs=rngs), make_optimizer(OptimizerConfig(name=name, **RATES), 20))


def batch() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 64)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": jnp.ones((8, 16), jnp.float32)}


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("blocks/attention/wq", 4, ((-3,), (-2, -1))),
        ("blocks/0/attention/wo", 3, ((-3, -2), (-1,))),
        ("blocks/moe/experts/w_down", 4, ((-2,), (-1,))),
        ("dense/kernel", 2, ((-2,), (-1,))),
        ("blocks/attention_norm/scale", 2, None),
        ("blocks/experts/router", 3, None),
        ("embed", 2, None),
        ("conv/kernel", 4, None),
        ("bias", 1, None),
    ],
)
def test_which_parameters_are_matrices(name: str, rank: int, expected: Any) -> None:
    assert matrix_axes(name, rank, {}, OptimizerConfig().no_decay) == expected


def test_a_user_names_matrices() -> None:
    config = OptimizerConfig(
        name="muon", matrices=("*conv/kernel=0,1,2:3", "table=none"), weight_decay=0.0, clip_norm=0.0, **RATES
    )
    params = {"conv": {"kernel": jax.random.normal(jax.random.key(0), (3, 3, 4, 16))}, "table": jnp.ones((4, 4))}
    optimizer = make_optimizer(config, 20)
    changes: Any = optimizer.update(params, optimizer.init(params), params)[0]
    values = np.linalg.svd(np.asarray(changes["conv"]["kernel"]).reshape(36, 16) / 1e-2, compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.6  # the iteration ends between about 0.7 and 1.2
    adam = optax.adamw(1e-2, b2=0.95, weight_decay=0.0, nesterov=True)
    expected: Any = adam.update(params["table"], adam.init(params["table"]), params["table"])[0]
    np.testing.assert_allclose(changes["table"], expected, rtol=1e-5)


def test_wrong_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match="matrices 'x': write GLOB=INPUTS:OUTPUTS"):
        OptimizerConfig(name="muon", matrices=("x",))
    for matrices, message in (
        (("y=0:1",), "y: no parameter matches; they are x"),
        (("x=0:2",), "x has 2 dimensions; name existing ones, each once"),
        (("x=none",), "none of the parameters is a matrix"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_optimizer(OptimizerConfig(name="muon", matrices=matrices, **RATES), 9).init({"x": jnp.ones((2, 2))})


def test_parameters_that_are_not_decayed_are_no_matrices() -> None:
    """So the setting also decides what Muon updates, and the error names it."""
    optimizer = make_optimizer(OptimizerConfig(name="muon", no_decay=("*",), **RATES), 9)
    with pytest.raises(ConfigError, match="none of the parameters is a matrix .* with --optimizer.no-decay"):
        optimizer.init({"x": jnp.ones((2, 2))})


def test_each_layer_of_a_stacked_parameter_is_a_matrix_of_its_own() -> None:
    key, shape, optimizer = jax.random.key(0), (2, 8, 2, 6), make_optimizer(OptimizerConfig(name="muon", **RATES), 20)
    stacked = {"blocks": {"attention": {"wq": jax.random.normal(key, shape)}}}
    changes: Any = optimizer.update(stacked, optimizer.init(stacked), stacked)[0]
    layers = {"blocks": {str(n): {"attention": {"wq": stacked["blocks"]["attention"]["wq"][n]}} for n in range(2)}}
    apart: Any = optimizer.update(layers, optimizer.init(layers), layers)[0]
    for n in range(2):
        np.testing.assert_allclose(
            changes["blocks"]["attention"]["wq"][n], apart["blocks"][str(n)]["attention"]["wq"], rtol=1e-4, atol=1e-6
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["muon", "schedule_free"])
@pytest.mark.parametrize("plan", ["fsdp:8", pytest.param("dp:2 tp:4", marks=pytest.mark.slow)])
def test_a_sharded_step_equals_one_device(name: str, plan: str) -> None:
    program = program_of(name)
    step = make_train_step(program, optax.constant_schedule(1e-2))
    one = many = first = jax.jit(program.create_state)(jax.random.key(0))
    planned, alone = auto_shard(step, plan=plan), jax.jit(step)
    for _ in range(2):
        one, _ = alone(one, batch())
        many, _ = planned(many, batch())
    # By norms, because Adam divides small gradients, with their rounding errors, by their own size.
    trees = (first.params, eval_params(one), eval_params(many))
    for before, a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a - before)


def test_the_evaluated_parameters_are_those_of_optax() -> None:
    program = program_of("schedule_free")
    state = jax.jit(program.create_state)(jax.random.key(0))
    step = jax.jit(make_train_step(program, optax.constant_schedule(1e-2)))
    for _ in range(3):
        state, _ = step(state, batch())
    expected = contrib.schedule_free_eval_params(state.opt_state[1], state.params)
    for a, b in zip(jax.tree.leaves(eval_params(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert any(
        np.abs(a - b).max() > 1e-4
        for a, b in zip(jax.tree.leaves(eval_params(state)), jax.tree.leaves(state.params), strict=True)
    )


def test_schedule_free_refuses_what_contradicts_it() -> None:
    with pytest.raises(ConfigError, match="give --optimizer.schedule constant"):
        OptimizerConfig(name="schedule_free")
    with pytest.raises(ConfigError, match="beta1 is 0.0; with schedule_free"):
        OptimizerConfig(name="schedule_free", beta1=0.0, **RATES)
