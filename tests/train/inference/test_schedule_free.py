"""A run with a schedule-free optimizer evaluates, generates from and exports its average."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from autoshard.ckpt import Checkpointer
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.saved_parameters import StepParameters
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import train
from autoshard.train.step.train_step import eval_params


def test_the_average_is_what_is_generated_from_and_exported(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    optimizer = dict(name="schedule_free", schedule="constant", learning_rate=3e-2, warmup_steps=0)
    config = make_config(steps=4, optimizer=optimizer, freeze=("norm/*",))
    result = train(config)
    state = load_trained(result.run_dir).state
    expected = {**eval_params(state), **state.frozen}
    distance = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (eval_params(state), state.params)), strict=True)
    ]
    assert min(distance) > 1e-4
    with Checkpointer(result.run_dir / "checkpoints") as checkpoints:
        found = StepParameters(checkpoints, 4, use_ema=False)({**state.params, **state.frozen})
        checkpoints.export(None, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_allclose(exported.pop(name), value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert not exported
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)
