"""The verdict on a step, from its loss and its gradient."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import ConfigError
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.step.guard import GOOD, NON_FINITE, SPIKE, GuardConfig, first_guard, judge, kept_guard


def verdicts(config: GuardConfig, losses: list[float], norm: float = 1.0) -> tuple[list[int], dict]:
    guard, found = first_guard(config), []
    for loss in losses:
        verdict, guard = judge(config, guard, jnp.float32(loss), jnp.float32(norm))
        found.append(int(verdict))
    return found, guard


def test_a_spike_exceeds_the_median_of_good_steps_once_the_window_is_full() -> None:
    config = GuardConfig(spikes="skip", spike_factor=2.0, spike_window=3)
    losses = [1.0, 9.0, 1.0, 1.9, 2.1, 3.9, np.nan, 2.0, 2.0, 3.9]
    found, guard = verdicts(config, losses)
    # The window is (1, 9, 1) before 1.9, (1.9, 9, 1) with median 1.9 before 2.1, (1.9, 2.1, 1) before 3.9, ...
    assert found == [GOOD, GOOD, GOOD, GOOD, GOOD, SPIKE, NON_FINITE, GOOD, GOOD, GOOD]
    assert int(guard["skipped_steps"]) == 2 and int(guard["skips_in_a_row"]) == 0 and int(guard["seen"]) == 8


def test_a_negative_median_has_a_limit_above_it() -> None:
    config = GuardConfig(spike_factor=2.0, spike_window=1)
    assert verdicts(config, [-1.0, -0.5, 0.1])[0] == [GOOD, GOOD, SPIKE]


def test_the_norm_of_the_gradient_counts_too() -> None:
    assert verdicts(GuardConfig(), [1.0], norm=np.inf)[0] == [NON_FINITE]
    config = GuardConfig(spike_of="grad_norm", spike_factor=2.0, spike_window=1)
    guard = first_guard(config)
    for norm, expected in ((1.0, GOOD), (2.5, SPIKE), (1.9, GOOD)):
        verdict, guard = judge(config, guard, jnp.float32(1), jnp.float32(norm))
        assert int(verdict) == expected


def test_no_state_without_need() -> None:
    assert first_guard(GuardConfig()) is first_guard(GuardConfig("rollback")) is None


def test_changed_settings_keep_the_counts_and_never_compare_losses_with_norms() -> None:
    config = GuardConfig("skip", spike_factor=2.0, spike_window=1)
    _, guard = verdicts(config, [1.0, np.nan])
    norms = dataclasses.replace(config, spike_of="grad_norm")
    first = first_guard(norms)
    kept = kept_guard(guard, first)
    assert kept.keys() == first.keys() != guard.keys()
    assert int(kept["skipped_steps"]) == int(kept["skips_in_a_row"]) == 1 and int(kept["seen"]) == 0
    assert kept_guard({}, first) == first


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--guard.spike-window 8", "--guard.spike-window has no effect without --guard.spike-factor: give that too"),
        ("--guard.spike_of=grad_norm", "--guard.spike-of has no effect without --guard.spike-factor"),
        ("--guard.max-skips 3", "--guard.max-skips has no effect without --guard.non-finite skip or --guard.spikes"),
        ("--guard.non-finite skip --guard.max-rollbacks 3", "--guard.max-rollbacks has no effect without"),
        ("--guard.non-finite skip --guard.max-skips 3", None),
        ("--guard.spike-factor 3 --guard.spikes rollback --guard.spike-window 8 --guard.max-rollbacks 1", None),
    ],
)
def test_options_that_have_no_effect_are_refused(options: str, refused: str | None) -> None:
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        parse_config(options.split(), TrainConfig, "autoshard train", "")


def test_invalid_settings() -> None:
    with pytest.raises(ConfigError, match="max_skips is 0; it must be at least 1; spike_factor is 1.0"):
        GuardConfig(max_skips=0, spike_factor=1.0)
    with pytest.raises(ConfigError, match="spikes is 'skip', but no step is a spike: give spike_factor"):
        GuardConfig(spikes="skip")
