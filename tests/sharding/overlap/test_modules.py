"""The parameters that a table of `overlap=` names, and the gradients that belong to them."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.errors import PlanError
from tests.sharding.overlap.programs import inputs, overlap_of, parameters, stacked, step


def resolved(overlap, layers=None):
    return overlap_of(plan(step, layers or parameters(), inputs(), plan="fsdp:8", overlap=overlap))


def words(found, kind):
    return {found.paths[v]: word for v, word in found.words[kind].items()}


@pytest.mark.parametrize(("pattern", "paths"), [
    ("0/1/up", ["0/1/up"]),
    ("layers/1/up", ["0/1/up"]),
    ("1/up", ["0/1/up"]),
    ("*/up", ["0/0/up", "0/1/up"]),
    ("1/*", ["0/1/down", "0/1/scale", "0/1/up"]),  # a glob may match the end of a path
])  # fmt: skip
def test_paths_name_parameters(pattern, paths):
    assert words(resolved({pattern: {"gather": "off"}}), "gather") == dict.fromkeys(paths, "off")


def test_paths_take_precedence_over_globs_and_later_globs_over_earlier_ones():
    found = resolved({"1/up": {"gather": "on"}, "*": {"gather": "off"}, "*/down": {"gather": "on"}})
    assert words(found, "gather") == {
        "0/0/up": "off", "0/0/scale": "off", "0/0/down": "on", "0/1/up": "on", "0/1/scale": "off", "0/1/down": "on",
    }  # fmt: skip


def test_unknown_paths_list_the_parameters():
    with pytest.raises(PlanError) as raised:
        resolved({"experts/*": {"gather": "off"}, "wq": {"reduce": "off"}})
    assert "overlap 'experts/*' names no parameter; overlap 'wq' names no parameter" in str(raised.value)
    assert "The parameters are layers/*/down, layers/*/scale, layers/*/up" in str(raised.value)


def test_the_end_of_several_paths_is_ambiguous():
    with pytest.raises(PlanError, match="'up' is the end of 2 paths"):
        resolved("up:gather=off")


@pytest.mark.parametrize("arrange", [list, stacked], ids=["unrolled", "scanned"])
def test_every_gradient_belongs_to_one_parameter(arrange):
    """The norm of all gradients, which every update reads, does not join them."""
    found = resolved("*:reduce=off", arrange(parameters()))
    owned = [found.paths[p] for owners in found.owners.values() for p in owners]
    assert set(owned) == set(found.paths.values())
    assert all(len(owners) == 1 for owners in found.owners.values())
    for value, (owner,) in found.owners.items():
        shape, own = found.axes.program.avals[value].shape, found.axes.program.avals[owner].shape
        assert sorted(shape) == sorted(own[-len(shape) :])


def test_gradients_that_a_function_returns_belong_to_parameters():
    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    layers = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    made = plan(jax.grad(loss), layers, jnp.ones((64, 32)), plan="dp:8", overlap="*:reduce=off")
    found = overlap_of(made)
    assert sorted(found.paths[p] for owners in found.owners.values() for p in owners) == ["0/down", "0/up"]


def test_layers_with_the_same_words_are_one_module():
    every, one = resolved("*/up:gather=off"), resolved("1/up:gather=off")
    assert {every.module(v) for v in every.paths} == {"0/*/up", "0/*/down", "0/*/scale"}
    assert {one.module(v) for v in one.paths} == {"0/0/up", "0/1/up", "0/*/down", "0/*/scale"}
