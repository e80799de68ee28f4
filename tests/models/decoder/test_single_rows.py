"""Rows that are read and written one by one: the same values as gathers and scatters, on shards, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.models.decoder import single_rows
from autoshard.models.decoder.single_rows import by_slices, rows_of, scattered, with_slots
from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.oracle.rule_check import check_rule
from autoshard.sharding.planner.bound_plan import bound_or_error


@pytest.mark.parametrize("unrolled", [1, 32], ids=["many", "few"])
def test_rows_of_tokens(unrolled, monkeypatch):
    monkeypatch.setattr(single_rows, "LARGEST_UNROLLED", unrolled)
    table = jax.random.normal(jax.random.key(0), (8, 6))
    tokens = jnp.array([[0], [7], [3], [8], [-1]])
    expected = table.at[tokens].get(mode="fill", wrap_negative_indices=False)
    np.testing.assert_array_equal(rows_of(table, tokens), expected)
    assert np.isnan(expected[3:]).all()


@pytest.mark.parametrize("shape", [(3, 5), (5,)], ids=["heads", "latent"])
def test_slots_of_rows(shape):
    kept = jax.random.normal(jax.random.key(0), (2, 4, 8, *shape))
    new = jax.random.normal(jax.random.key(1), (2, 4, *shape))
    slots = jnp.array([1, 7, 0, 3])
    expected = np.array(kept)
    expected[:, np.arange(4), np.asarray(slots)] = new
    np.testing.assert_array_equal(with_slots(kept, new, slots), expected)
    np.testing.assert_array_equal(scattered(kept, new, slots), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("of", ["rows", "heads", "latent"])
def test_shards_compute_their_terms(of):
    def shapes(*sizes):
        return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    def ints(*size):
        return jax.ShapeDtypeStruct(size, jnp.int32)

    calls = {
        "rows": (rows_of, *shapes((8, 4)), ints(4, 1)),
        "heads": (with_slots, *shapes((2, 4, 8, 2, 4), (2, 4, 2, 4)), ints(4)),
        "latent": (with_slots, *shapes((2, 4, 8, 4), (2, 4, 4)), ints(4)),
    }
    assert check_rule(*calls[of], partitioner=False) == []


def test_only_tpus_slice_and_only_rows_that_fill_no_registers():
    narrow, wide = jnp.zeros((4, 64)), jnp.zeros((4, 256))
    assert not by_slices(narrow)
    with planned_for(Planned("tpu")):
        assert by_slices(narrow) and not by_slices(wide)


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4"])
@pytest.mark.parametrize("vocab", [8000, 25_136], ids=["rows-last", "tokens-last"])
def test_a_table_is_not_copied_for_its_rows(vocab, target):
    """8000 x 2880 on a device is stored as it is, and 25136 x 2880 transposed. Neither is copied."""

    def step(table, tokens, w):
        x = rows_of(table, tokens)[:, 0]
        return x + jnp.tanh(x), x @ w

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8 * vocab, 2880), (2880, 512))]
    tokens = jax.ShapeDtypeStruct((128, 1), "int32")
    made = plan(step, shapes[0], tokens, shapes[1], target=target, plan="tp:8")
    result = compile_job(export_plan(bound_or_error(made.bound).executable, {}), 600.0)
    assert result.kind == "ok", result.message
    assert result.memory["temp"] < vocab * 2880
