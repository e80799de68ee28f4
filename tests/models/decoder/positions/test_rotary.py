"""Rotary positions: frequencies of every scaling, and rotations of both orders of pairs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.models.decoder.positions.rotary import Rotary, rotate
from tests.arrays import array

DIMS = 8
PLAIN = [10_000.0 ** (-i / DIMS) for i in range(0, DIMS, 2)]


def test_plain_frequencies():
    assert Rotary().frequencies(DIMS) == pytest.approx(PLAIN)


def test_linear_scaling_divides_all():
    assert Rotary(scaling="linear", factor=4.0).frequencies(DIMS) == pytest.approx([f / 4 for f in PLAIN])


def test_llama3_keeps_short_waves_and_divides_long_ones():
    rotary = Rotary(scaling="llama3", factor=8.0, original_context=128, low=1.0, high=4.0)
    found = rotary.frequencies(DIMS)
    assert found[0] == pytest.approx(PLAIN[0])  # 20 turns in the original context
    assert found[2:] == pytest.approx([f / 8 for f in PLAIN[2:]])  # fewer than one turn
    kept = (128 * PLAIN[1] / (2 * math.pi) - 1) / 3  # two turns: between
    assert found[1] == pytest.approx(PLAIN[1] * (kept + (1 - kept) / 8))


def test_yarn_interpolates_by_index_and_scales_the_rotation():
    rotary = Rotary(scaling="yarn", factor=4.0, original_context=4096)
    found = rotary.frequencies(32) / Rotary().frequencies(32)
    first = 32 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10_000))
    last = 32 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10_000))
    assert found[: math.floor(first) + 1] == pytest.approx(1.0)
    assert found[math.ceil(last) :] == pytest.approx(0.25)
    assert (np.diff(found) <= 1e-6).all()
    assert rotary.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    cos, sin = rotary.table(32, jnp.arange(3))
    assert np.asarray(cos**2 + sin**2) == pytest.approx(rotary.magnitude**2, rel=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distances_alone(interleaved):
    rng = np.random.default_rng(0)
    q, k = (array(rng.normal(size=DIMS), jnp.float32) for _ in range(2))

    def product(at_q, at_k):
        tables = [Rotary(interleaved=interleaved).table(DIMS, jnp.array([[at]])) for at in (at_q, at_k)]
        rotated = [rotate(x[None, None, None], table, interleaved) for x, table in zip((q, k), tables, strict=True)]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)


def test_the_two_orders_rotate_the_same_pairs():
    x = array(np.random.default_rng(1).normal(size=(1, 3, 2, DIMS)), jnp.float32)
    table = Rotary().table(DIMS, jnp.arange(3)[None])
    halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    assert np.array_equal(rotate(x, table, interleaved=True), rotate(halves, table))


def test_each_section_turns_by_its_own_axis():
    rotary, plain = Rotary(sections=(3, 5, DIMS // 2 - 8)), Rotary()
    axes = [jnp.array([[2]]), jnp.array([[7]]), jnp.array([[11]])]
    found = rotary.table(DIMS, jnp.stack(axes))[0][0, 0]
    expected = [plain.table(DIMS, axis)[0][0, 0] for axis in axes]
    parts = [expected[0][:3], expected[1][3:8], expected[2][8:]]
    assert np.array_equal(found, np.concatenate(parts))
    assert np.array_equal(rotary.table(DIMS, axes[0])[0], plain.table(DIMS, axes[0])[0])  # text: one position for all


def test_frequencies_start_anew_in_each_section():
    rotary = Rotary(sections=(DIMS // 4, DIMS // 4), restart=True)
    one = Rotary().frequencies(DIMS // 2)
    assert np.array_equal(rotary.frequencies(DIMS), np.concatenate([one, one]))


def test_a_fraction_of_the_pairs_is_rotated():
    found, whole = Rotary(fraction=0.25).frequencies(16), Rotary().frequencies(16)
    assert found[:2].tolist() == whole[:2].tolist() and not found[2:].any()


def test_llama3_without_a_ramp_keeps_or_divides_each_frequency():
    """The configs of Llama 4 have equal bounds, so that no frequency lies between them."""
    rotary = Rotary(10_000.0, "llama3", 16.0, 128, low=1.0, high=1.0)
    plain = Rotary(10_000.0).frequencies(32)
    turns = 128 * plain / (2 * np.pi)
    np.testing.assert_allclose(rotary.frequencies(32), np.where(turns >= 1, plain, plain / 16), rtol=1e-6)
