"""Prices of products in 8 bits, and the note for chips on which they are no faster than products in 16 bits."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.machines.chips import CHIPS

NOTE = "products in {0} are priced like those in 16 bits: {1} computes them no faster"


def product(x, y):
    return lax.dot(x, y, preferred_element_type=jnp.bfloat16 if x.dtype.itemsize == 1 else None)


def planned(target, *dtypes):
    shapes = [jax.ShapeDtypeStruct((8192, 8192), dtype) for dtype in dtypes]
    return plan(product, *shapes, target=target, plan="dp:1")


@pytest.mark.parametrize(
    ("target", "dtype", "times", "slow"),
    [
        ("h100:1", "float8_e4m3fn", 2 * CHIPS["h100"].efficiency_fp8 / CHIPS["h100"].efficiency, ""),
        ("h100:1", "int8", 2, ""),
        ("a100:1", "float8_e4m3fn", 1, "fp8"),
        ("a100:1", "int8", 2, ""),
        ("v6e:1x1", "float8_e5m2", 1, "fp8"),
        ("v6e:1x1", "int8", 2, ""),
        ("v4:1x1x1", "int8", 1, "int8"),
    ],
)
def test_a_product_takes_the_time_of_its_type(target, dtype, times, slow):
    narrow, wide = planned(target, dtype, dtype), planned(target, "bfloat16", "bfloat16")
    assert wide.estimate.compute_us / narrow.estimate.compute_us == pytest.approx(times)
    assert (NOTE.format(slow, target) in narrow.notes) == bool(slow)
    assert not any("products in" in note for note in wide.notes)


def test_a_product_of_8_and_16_bits_runs_in_16():
    mixed, wide = planned("h100:1", "float8_e4m3fn", "bfloat16"), planned("h100:1", "bfloat16", "bfloat16")
    assert mixed.estimate.compute_us == pytest.approx(wide.estimate.compute_us)


def test_fp8_has_an_efficiency_of_its_own():
    chip = CHIPS["tpu7x"]
    assert chip.efficiency_fp8 not in (0.0, chip.efficiency)
    assert chip.reached(1) == chip.flops_fp8 * chip.efficiency_fp8
    assert chip.reached(1, integer=True) == chip.reached(2) == chip.flops * chip.efficiency
    assert CHIPS["v6e"].reached(1) == CHIPS["v6e"].reached(2)
