"""Small values have the first claim on on-chip memory."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.on_chip import Life, on_chip_shares


def test_larger_values_take_nothing_from_a_smaller_one():
    lives = {0: Life(0, 4, 100.0), 1: Life(1, 2, 10.0), 2: Life(2, 3, 30.0), 3: Life(5, 6, 1000.0)}
    assert on_chip_shares(lives, 7) == {0: 100 / 140, 1: 1.0, 2: 30 / 40, 3: 1.0}


def test_equal_values_share():
    lives = {v: Life(0, 3, 8.0) for v in range(4)} | {4: Life(3, 4, 8.0), 5: Life(4, 5, 8.0)}
    assert on_chip_shares(lives, 6) == {**dict.fromkeys(range(5), 1 / 5), 5: 1 / 2}


def test_empty_values_have_a_whole_share():
    assert on_chip_shares({0: Life(0, 1, 0.0)}, 2) == {0: 1.0}


@pytest.mark.parametrize("large", [2048, 65_536])
def test_a_small_value_stays_beside_a_large_one(large):
    """The small one, 4 MiB, is read from on-chip memory; the large one, 256 MiB, is written and read."""

    def compute_us(*rows):
        def fn(*xs):
            made = [jnp.sort(x, axis=1) for x in xs]
            return [jnp.cumsum(x, axis=1) for x in reversed(made)]

        inputs = [jax.ShapeDtypeStruct((n, 1024), "float32") for n in rows]
        return plan(fn, *inputs, target="v5e:1x1").estimate.compute_us

    assert compute_us(1024, large) == pytest.approx(compute_us(1024) + compute_us(large))
