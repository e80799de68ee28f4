"""`auto_shard(equinox.filter_jit(f, donate=...))` donates the arguments that `filter_jit` donates."""

import functools
import warnings
from typing import Any

import equinox as eqx
import pytest

from autoshard import auto_shard
from tests.sharding.programs import assert_close, batch, mlp_state, sgd_step

PARAMETERS = {"1/b", "1/v", "1/w"}
DONATED: Any = {
    "none": set(), "all": PARAMETERS | {"0"}, "warn": PARAMETERS | {"0"}, "all-except-first": PARAMETERS,
    "warn-except-first": PARAMETERS,
}  # fmt: skip


def step_of(x, params):
    """One step whose first argument is the batch: `all-except-first` donates the state alone."""
    return sgd_step(params, x)


def donated(sharded, *args, **kwargs):
    """Returns the paths of the leaves that a call donates."""
    traced = sharded.entry(args, kwargs).traced
    return {traced.in_paths[i] for i in traced.donated}


@pytest.mark.parametrize("donate", DONATED)
def test_donated_arguments(donate):
    sharded = auto_shard(eqx.filter_jit(step_of, donate=donate), plan="fsdp:8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, loss = sharded(batch(), mlp_state())
    assert_close(step_of(batch(), mlp_state()), (params, loss))
    assert donated(sharded, batch(), params) == DONATED[donate]
    sharded(batch(), params)
    assert all(x.is_deleted() is (donate != "none") for x in params.values())
    # No result can use the memory of the batch. Equinox says so for `warn` only.
    assert any("donated buffers were not usable" in str(w.message) for w in caught) is (donate == "warn")


def test_keyword_arguments_are_donated_as_those_by_position():
    sharded = auto_shard(eqx.filter_jit(step_of, donate="all-except-first"), plan="fsdp:8")
    params, _ = sharded(batch(), params=mlp_state())
    assert donated(sharded, batch(), params=params) == PARAMETERS
    sharded(batch(), params=params)
    assert all(x.is_deleted() for x in params.values())
    assert donated(sharded, params=mlp_state(), x=batch()) == PARAMETERS


@pytest.mark.parametrize("partial", [functools.partial, eqx.Partial])
def test_the_arguments_of_a_partial_are_not_donated(partial):
    jitted = eqx.filter_jit(lambda rate, x, params: step_of(x * rate, params), donate="all-except-first")
    sharded = auto_shard(partial(jitted, 2.0), plan="fsdp:8")
    assert donated(sharded, batch(), mlp_state()) == PARAMETERS | {"0"}


def test_static_arguments_are_not_counted():
    jitted = eqx.filter_jit(lambda name, x, params: step_of(x, params), donate="all-except-first")
    sharded = auto_shard(jitted, plan="fsdp:8", static_argnums=0)
    assert donated(sharded, "name", batch(), mlp_state()) == PARAMETERS | {"0"}
