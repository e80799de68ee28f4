"""A train step under its plan, timed against `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.step_timing import SteppedState, paired_times, time_steps


@pytest.mark.slow
def test_both_steps_are_timed(make_config: Callable[..., TrainConfig]) -> None:
    timing = time_steps(make_config(), 2)
    assert timing.plan == "fsdp:8" and timing.tokens == 8 * 16
    assert min(timing.planned_seconds, timing.by_hand_seconds, timing.ratio) > 0
    table = str(timing).splitlines()
    assert [line[:15] for line in table] == ["plan: fsdp:8", "auto_shard     ", "jax.jit by hand", "ratio (median o"]
    tokens_per_second = [float(line.split()[-2].replace(",", "")) for line in table[1:3]]
    assert tokens_per_second[0] == pytest.approx(timing.tokens / timing.planned_seconds, abs=1)


def test_pairs_alternate_in_order_and_leave_the_warm_up_out() -> None:
    calls: list[str] = []

    def action(name: str) -> Callable[[], float]:
        return lambda: calls.append(name) or float(len(calls))

    first, second = paired_times(action("a"), action("b"), rounds=2, warm_up=1)
    assert "".join(calls) == "abbaab"
    np.testing.assert_array_equal([first, second], [[4, 5], [3, 6]])


def test_a_stepped_state_keeps_its_state() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return state + batch, {"loss": state}

    stepped = SteppedState(step, jnp.float32(1), jnp.float32(2))
    assert stepped.once() >= 0 and float(stepped.metrics()["loss"]) == 3 and float(stepped.state) == 5
