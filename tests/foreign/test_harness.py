"""The harness itself: it accepts programs sharded by hand, and reports wrong results."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.foreign import harness, nnx_cnn, nnx_transformer, scan_recurrence
from tests.foreign.test_foreign import ADAPTIVE, PROGRAMS, STEPS, single
from tests.foreign.test_foreign import program as program_of

SLOW = (
    "equinox_batch_norm",
    "haiku_cnn",
    "haiku_lstm",
    "keras_cnn",
    "linen_lstm",
    "linen_transformer",
    "numpyro_svi",
    "penzai_mlp",
)
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROGRAMS]
REFERENCE = harness.Result(
    losses=[2.0, 1.0],
    state={"w": np.ones(4), "b": np.full(4, 1e-9), "count": np.array(2)},
    grads={"w": np.ones((2, 2))},
    last_grads={"w": np.ones(3)},
    devices=1,
    share=1.0,
)


def place_by_hand(mesh, state, batches):
    """Replicates the state and shards each batch: data parallelism without autoshard."""
    replicated, sharded = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    if isinstance(state[0], nnx.Module):
        for part in state:
            nnx.update(part, jax.device_put(nnx.state(part), replicated))
    else:
        state = jax.tree.map(lambda x: jax.device_put(x, replicated) if isinstance(x, jax.Array) else x, state)
    return state, jax.tree.map(lambda x: jax.device_put(x, sharded if x.ndim else replicated), batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs_keep_parity_when_sharded_by_hand(name, mesh_of):
    """Therefore a difference under `auto_shard` is not due to rounding in the program."""
    program = program_of(name)
    result = harness.run(program, STEPS, harness.jit_of(program), partial(place_by_hand, mesh_of(data=8)))
    assert result.devices == 8 and result.share == 1.0
    harness.compare(single(name), result, state=name not in ADAPTIVE)


@pytest.mark.parametrize("name", NAMES)
def test_programs_learn(name):
    losses = single(name).losses
    assert np.all(np.isfinite(losses))
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"losses": [2.0, 1.0001]}, "loss of step 1: 1.0001, one device has 1"),
        ({"losses": [2.0, np.nan]}, "loss of step 1: nan"),
        ({"grads": {"w": 4 * np.ones((2, 2))}}, r"gradient of w: 3.00e\+00 off \(norm 2, 4 times it\)"),
        ({"grads": {}}, "gradient of w: only in one of the results"),
        ({"grads": {"w": np.ones(4)}}, r"float64\[4\], one device has float64\[2, 2\]"),
        ({"state": REFERENCE.state | {"w": np.full(4, np.nan)}}, "final w: nan off"),
        ({"state": REFERENCE.state | {"b": np.full(4, 1e-4)}}, "final b: 1.00e-04 off"),
        ({"last_grads": {"w": -np.ones(3)}}, "last gradient of w: 2.00e"),
        ({"state": REFERENCE.state | {"count": np.array(3)}}, r"final count: \[3\], one device has \[2\]"),
    ],
)
def test_compare_lists_the_differences(change, message):
    with pytest.raises(AssertionError, match=message):
        harness.compare(REFERENCE, dataclasses.replace(REFERENCE, **change))


def test_compare_measures_a_negligible_leaf_against_the_global_norm():
    harness.compare(REFERENCE, REFERENCE)
    noise = {"w": np.ones(4) * (1 + 9e-6), "b": np.full(4, -5e-6), "count": np.array(2)}
    harness.compare(REFERENCE, dataclasses.replace(REFERENCE, state=noise))
    harness.compare(REFERENCE, dataclasses.replace(REFERENCE, state={}, last_grads={}), state=False)


def test_state_has_a_tied_head_once_and_batch_statistics():
    tied, cnn = (harness.arrays(program.make()[1]) for program in (nnx_transformer, nnx_cnn))
    assert "0/embed/embedding" in tied and not any("head" in path for path in tied)
    assert {"0/norm1/mean", "0/norm1/var", "0/dropout/rngs/count"} <= cnn.keys()
    assert cnn["0/dropout/rngs/count"].dtype == np.uint32


@pytest.mark.slow
def test_lost_batch_statistics_are_found():
    """`jax.jit` loses the updates that nnx makes in place. The harness must notice it."""
    wrong = harness.run(nnx_cnn, 2, jax.jit)
    with pytest.raises(AssertionError, match="final 0/norm1/mean"):
        harness.compare(harness.run_single(nnx_cnn, 2), wrong)


def test_a_wrong_step_is_found():
    def perturbed(fn):
        def step(*args):
            new, loss = fn(*args) if fn is scan_recurrence.train_step else (None, None)
            if new is None:
                return fn(*args)
            return {**new, "w_h": new["w_h"] * (1 + 1e-4)}, loss

        return jax.jit(step)

    with pytest.raises(AssertionError, match="final 0/w_h: 1"):
        harness.compare(harness.run_single(scan_recurrence, 1), harness.run(scan_recurrence, 1, perturbed))
