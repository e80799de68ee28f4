"""Under `auto_shard` on eight devices, small workloads compute the losses, gradients and statistics of one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import auto_shard
from autoshard.models import workload
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_train_step
from tests.models.small import filled_as
from tests.sharding.programs import assert_close

NAMES = ("gpt-tiny", "llama-tiny", "moe-tiny", "mixtral-tiny", "wide-resnet-tiny", "vit-tiny")
PLANS = (None, "dp:8", "fsdp:8", "dp:2 fsdp:2 tp:2", "dp:2 tp:4 seq")
EXPERTS = ("ep:8", "dp:2 ep:4", "fsdp:2 ep:2 tp:2", "ep:4 tp:2 state")
CASES = [(name, plan) for name in NAMES for plan in PLANS + EXPERTS * (name in ("moe-tiny", "mixtral-tiny"))]
STEPS = 2


def batches(name: str) -> list[dict[str, np.ndarray]]:
    """Makes a batch for each step. Some positions of language models are masked."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(STEPS):
        batch = {}
        for key, leaf in workload(name).batch().items():
            if key == "mask":
                batch[key] = (rng.random(leaf.shape) < 0.8).astype(leaf.dtype)
            elif leaf.dtype == np.int32:
                batch[key] = rng.integers(0, 8 if key == "labels" else 128, leaf.shape).astype(leaf.dtype)
            else:
                batch[key] = rng.normal(size=leaf.shape).astype(leaf.dtype)
        drawn.append(batch)
    return drawn


@cache
def trained(name: str, plan: str | None, sharded: bool = True, starved: bool = False) -> tuple[list[Any], list[float]]:
    """Trains a workload.

    If `starved` is true, half of the experts get no token.

    Returns:
        The gradients (kept in the optimizer's state) and the statistics of each step, and the losses.
    """
    optimizer = optax.chain(optax.trace(decay=0.0), optax.scale(-0.1))
    build = without_tokens if starved else filled_as
    program = make_program(lambda rngs: build(workload(name).build), optimizer)
    step: Any = make_train_step(program, optax.constant_schedule(0.1))
    step = auto_shard(step, plan=plan) if sharded else jax.jit(step)
    state = program.create_state(jax.random.key(0))
    states, losses = [], []
    for batch in batches(name):
        state, metrics = step(state, batch)
        states.append(jax.device_get({"gradients": state.opt_state[0].trace, "statistics": state.variables}))
        losses.append(float(metrics["loss"]))
    return states, losses


def without_tokens(build: Callable[..., Any]) -> Any:
    """Makes a MoE whose tokens choose only among the first half of the experts.

    The router's columns of these experts come in pairs of opposite sign, so half of their logits are above 0. All other
    experts have logits of 0.
    """
    model = filled_as(build)
    router = model.blocks.moe.experts.router
    columns = router[...]
    pairs = columns.shape[-1] // 4
    router[...] = jnp.concatenate([columns[..., :pairs], -columns[..., :pairs], 0 * columns[..., 2 * pairs :]], axis=-1)
    return model


def compare(name: str, plan: str | None, run: Callable[..., Any] = trained) -> None:
    """Compares the steps of a plan with those on one device. `run` computes the former, by default `trained`."""
    expected, losses = trained(name, None, sharded=False)
    states, others = run(name, plan)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for one, other in zip(expected, states, strict=True):
        assert_close(one, other)


@pytest.mark.few(1)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt-tiny", "dp:2 fsdp:2 tp:2"),
        ("llama-tiny", "dp:2 tp:4 seq"),
        ("llama-tiny", "dp:4 tp:2 seq tp-ffn dp+optimizer"),
        ("moe-tiny", "dp:2 ep:4"),
        ("mixtral-tiny", "fsdp:2 ep:2 tp:2"),
        ("wide-resnet-tiny", "dp:2 fsdp:2 tp:2"),
        ("vit-tiny", "fsdp:8"),
    ],
)
def test_it_trains_as_on_one_device(name, plan):
    compare(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_every_plan(name, plan):
    compare(name, plan)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    "plan",
    ["dp:2 ep:4"]
    + [
        pytest.param(plan, marks=pytest.mark.slow) for plan in ("ep:8", "dp:4 ep:2", "dp:8", "fsdp:2 ep:4", "ep:2 tp:4")
    ],
)
def test_experts_that_get_no_token(plan):
    """The plans split the devices between batch and experts in every possible way."""
    expected, losses = trained("mixtral-tiny", None, sharded=False, starved=True)
    gradient = expected[0]["gradients"]["blocks"]["moe"]["experts"]["w_down"]
    per_expert = np.abs(gradient).sum(axis=(0, 2, 3))
    assert np.all(per_expert[:4] > 0) and np.all(per_expert[4:] == 0)
    states, others = trained("mixtral-tiny", plan, starved=True)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for one, other in zip(expected, states, strict=True):
        assert_close(one, other)
