"""A step in stages equals the step: loss, gradients, updated state and rows, in float64."""

import functools

import jax
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.pipeline.pipelining import with_stages
from autoshard.sharding.program.tracing import trace
from tests.sharding.pipeline.programs import KINDS, make_step, state, tokens

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def float64():
    """Run in float64."""
    with jax.enable_x64(True):
        yield


@functools.cache
def traced(kind, remat):
    return trace(make_step(kind, remat), (state(), tokens()), {})


@functools.cache
def expected(kind):
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(make_step(kind))(state(), tokens()))]


def check(kind, remat, microbatches, stages, schedule):
    cut = with_stages(traced(kind, remat), microbatches, stages=stages, schedule=schedule)
    assert (cut.stages, cut.schedule, cut.microbatches) == (stages, schedule, microbatches)
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves((state(), tokens())))
    for one, other in zip(made, expected(kind), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other) / max(np.linalg.norm(other), 1e-30)
        assert error < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_one_backward(kind):
    check(kind, False, 4, 2, "1f1b")


@pytest.mark.parametrize("schedule", ["gpipe", "zb"])
@pytest.mark.parametrize("kind", ["auxiliary", "encoder", "hidden"])
def test_other_schedules(kind, schedule):
    check(kind, False, 4, 4, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_with_remat(kind, schedule):
    check(kind, True, 8, 4, schedule)


def test_checkpointed_layers_are_split_for_zero_bubble():
    check("tied", True, 2, 2, "zb")
