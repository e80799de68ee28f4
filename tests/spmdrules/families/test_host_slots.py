"""The table of slots in host memory."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import _compat
from autoshard.spmdrules.families.host_slots import host_slots
from tests.spmdrules.rows import Row

ROWS = [Row("host_slots", lambda: host_slots((4, 8), jnp.float32), (), "-> a b")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def test_slots_are_zeros_in_host_memory():
    (slots,) = jax.make_jaxpr(lambda: host_slots((2, 3), jnp.bfloat16))().out_avals
    assert _compat.is_on_host(slots) and (slots.shape, slots.dtype) == ((2, 3), jnp.bfloat16)
    assert not host_slots((2, 3), jnp.bfloat16).any()
