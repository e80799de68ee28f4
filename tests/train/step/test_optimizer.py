"""The learning rate schedule, weight decay, gradient clipping and the update formulas."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig
from autoshard.train.step.optimizer import (
    OptimizerConfig,
    decay_mask,
    learning_rate_schedule,
    make_optimizer,
    path_name,
)


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
    rate: Any = learning_rate_schedule(config, 110)
    np.testing.assert_allclose(float(rate(0)), 1 / 11, rtol=1e-6)
    np.testing.assert_allclose(float(rate(10)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(float(rate(60)), 0.55, rtol=1e-6)
    np.testing.assert_allclose(float(rate(110)), 0.1, rtol=1e-5)


def test_a_warm_up_as_long_as_the_run_raises() -> None:
    with pytest.raises(ConfigError, match="warmup_steps is 100, but the run has 100 steps"):
        make_optimizer(OptimizerConfig(), 100)


@pytest.mark.few(1)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_only_matrices_are_decayed(scan_layers: bool) -> None:
    shape = GPTConfig(
        layers=2, width=8, heads=2, norm="layernorm", bias=True, positions="learned", scan_layers=scan_layers
    )
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(shape, rngs=nnx.Rngs(0))), nnx.Param))
    mask = decay_mask(params, OptimizerConfig().no_decay)
    decayed = {path_name(path).split("/")[-1] for path, keep in jax.tree_util.tree_leaves_with_path(mask) if keep}
    not_decayed = {
        path_name(path).split("/")[-1] for path, keep in jax.tree_util.tree_leaves_with_path(mask) if not keep
    }
    assert decayed == {"embed", "position", "wq", "wk", "wv", "wo", "w_up", "w_down", "w_gate"}
    assert not_decayed == {"scale", "bias", "bq", "bk", "bv", "bo", "b_up", "b_down", "b_gate"}


def test_gradients_are_clipped_by_their_global_norm() -> None:
    config = OptimizerConfig(name="sgd", learning_rate=1.0, min_learning_rate=1.0, warmup_steps=0, clip_norm=1.0)
    optimizer = make_optimizer(config, 10)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    updates: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    np.testing.assert_allclose(updates["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(float(optax.tree.norm(updates)), 1.0, rtol=1e-6)


def test_adamw_matches_its_formula_with_every_setting() -> None:
    """Gradients are clipped, both moments are bias-corrected, and the weight decay of matrices is decoupled."""
    config = OptimizerConfig(
        learning_rate=0.1, min_learning_rate=0.01, warmup_steps=2, beta1=0.8, beta2=0.6, epsilon=1e-2,
        weight_decay=0.3, clip_norm=0.5,
    )  # fmt: skip
    optimizer = make_optimizer(config, 10)
    rate: Any = learning_rate_schedule(config, 10)
    params = {"matrix": np.array([[1.0, -2.0], [3.0, 4.0]], np.float32), "vector": np.array([5.0, 6.0], np.float32)}
    moments: dict[str, Any] = {name: (0.0, 0.0) for name in params}
    state, random = optimizer.init(params), np.random.default_rng(0)
    for step in range(3):
        gradients = {name: random.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}
        shrink = min(1.0, 0.5 / float(optax.tree.norm(gradients)))
        updates: Any
        updates, state = optimizer.update(gradients, state, params)
        for name, leaf in params.items():
            first, second = moments[name]
            first, second = (
                0.8 * first + 0.2 * shrink * gradients[name],
                0.6 * second + 0.4 * (shrink * gradients[name]) ** 2,
            )
            moments[name] = first, second
            whole = first / (1 - 0.8 ** (step + 1)), second / (1 - 0.6 ** (step + 1))
            decay = 0.3 * leaf if name == "matrix" else 0.0
            expected = -rate(step) * (whole[0] / (np.sqrt(whole[1]) + 1e-2) + decay)
            np.testing.assert_allclose(updates[name], expected, rtol=1e-5)


def test_sgd_uses_its_momentum() -> None:
    config = OptimizerConfig(name="sgd", learning_rate=1.0, min_learning_rate=1.0, warmup_steps=0, clip_norm=0.0)
    gradients = {"a": jnp.array([3.0, 4.0])}
    for momentum, second in ((0.0, 1.0), (0.5, 1.5)):
        optimizer = make_optimizer(replace(config, momentum=momentum), 10)
        state = optimizer.init(gradients)
        for share in (1.0, second):
            updates: Any
            updates, state = optimizer.update(gradients, state, gradients)
            np.testing.assert_allclose(updates["a"], [-3.0 * share, -4.0 * share], rtol=1e-6)
