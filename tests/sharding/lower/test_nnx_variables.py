"""Planned functions of nnx variables that contain trees, and of nnx states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from autoshard import _compat, auto_shard
from tests.sharding.programs import assert_close, batch


class Cache(nnx.Module):
    """An attention cache in one variable, an empty variable, a layer, and a list of more than ten parameters."""

    def __init__(self):
        self.cache = nnx.Variable({"k": jnp.zeros((16, 64)), "v": jnp.ones((8, 64))})
        self.empty = nnx.Variable(None)
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), (None, "model"))
        self.layer = nnx.Linear(64, 64, kernel_init=init, rngs=nnx.Rngs(0))
        self.many = nnx.List([nnx.Param(jnp.full(n + 1, 0.1)) for n in range(12)])

    def __call__(self, x):
        h = self.layer(x)
        self.cache.set_value({"k": self.cache["k"] + h[:16], "v": self.cache["v"] * 2})
        return h + sum(jnp.sum(p[...]) for p in self.many)


class Sower(nnx.Module):
    """A module that sows its intermediate."""

    def __init__(self):
        self.layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.layer(x)
        self.sow(nnx.Intermediate, "seen", h)
        return h.sum()


def test_variables_with_trees_or_without_a_value(mesh8):
    with jax.set_mesh(mesh8):
        reference, planned_model = Cache(), Cache()
    call = auto_shard(lambda m, x: m(x))
    for _ in range(2):
        assert_close(nnx.jit(lambda m, x: m(x))(reference, batch()), call(planned_model, batch()))
    assert_close(reference.cache.get_value(), planned_model.cache.get_value())
    leaves = {leaf.path: leaf for leaf in call.plan(planned_model, batch()).inputs}
    shapes = {path: leaf.shape for path, leaf in leaves.items() if "many" not in path}
    assert shapes == {"0/cache/k": (16, 64), "0/cache/v": (8, 64), "0/layer/bias": (64,),
                      "0/layer/kernel": (64, 64), "1": (32, 64)}  # fmt: skip
    assert [leaves[f"0/many/{n}"].shape for n in range(12)] == [(n + 1,) for n in range(12)]
    assert leaves["0/layer/kernel"].spec == P(None, "model")  # annotated; a variable without arrays comes first


def test_a_module_that_sows():
    reference, planned_model = Sower(), Sower()
    call = auto_shard(lambda m, x: m(x), plan="dp:8")
    for _ in range(3):
        assert_close(nnx.jit(lambda m, x: m(x))(reference, batch()), call(planned_model, batch()))
    assert_close(jax.tree.leaves(nnx.state(reference)), jax.tree.leaves(nnx.state(planned_model)))


def test_a_variable_as_an_argument_is_updated_in_place():
    def count(v, x):
        v.set_value({"n": v["n"] + x.sum(0)})
        return (x * 2).sum()

    variable = nnx.Variable({"n": jnp.zeros(64)})
    call = auto_shard(count)
    for _ in range(2):
        call(variable, batch())
    assert_close(2 * batch().sum(0), variable["n"])
    assert [leaf.path for leaf in call.plan(variable, batch()).inputs] == ["0/n", "1"]
    tree = {"counts": [nnx.Variable({"n": jnp.zeros(64)})]}
    auto_shard(lambda tree, x: count(tree["counts"][0], x))(tree, batch())
    assert_close(batch().sum(0), tree["counts"][0]["n"])


def test_an_nnx_state_is_a_plain_pytree(mesh8):
    with jax.set_mesh(mesh8):
        graph, state = nnx.split(Cache())
    for tree in (state, {"params": state}, (state, optax.adam(1e-3).init(state.filter(nnx.Param)))):
        assert not _compat.has_graph_nodes(tree)
    assert _compat.has_graph_nodes((state, Sower()))

    def run(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    call = auto_shard(run)
    out, after = call(state, batch())
    assert not any(map(np.any, jax.tree.leaves(state["cache"])[:1]))  # the argument is not updated in place
    assert isinstance(after, nnx.State)
    expected_out, expected = jax.jit(run)(state, batch())
    assert_close(expected_out, out)
    assert_close(jax.tree.leaves(expected["cache"]), jax.tree.leaves(after["cache"]))
    leaves = {leaf.path: leaf.spec for leaf in call.plan(state, batch()).inputs}
    assert leaves["0/layer/kernel"] == P(None, "model")


def test_paths_are_in_the_order_of_nnx_jit(mesh8):
    """Each leaf of objects, states that share variables with them, boxes and arrays has one path and one spec."""
    with jax.set_mesh(mesh8):
        model = Cache()
    box = linen.Partitioned(jnp.ones((64, 4)), names=(None, "model"))
    args = (model, nnx.state(model), nnx.Variable({"b": jnp.ones(3), "a": None}), {"box": box}, jnp.ones(7))
    shapes = []
    wrapped, _ = _compat.nnx_jit(
        lambda *a: None, lambda pure: lambda *a: (shapes.extend(map(jnp.shape, jax.tree.leaves(a))), pure(*a))[1]
    )
    wrapped(*args)
    paths = _compat.nnx_paths(args, {})
    assert [s for s, p in zip(shapes, paths, strict=True) if p.startswith("0/many/")] == [(n + 1,) for n in range(12)]
    assert paths[-3:] == ["2/b", "3/box/value", "4"] and shapes[-3:] == [(3,), (64, 4), (7,)]
    written = _compat.annotated_specs(args, {}, graph=True)
    annotated = {p: s for p, s in zip(paths, written, strict=True) if s is not None}
    assert annotated == {"0/layer/kernel": P(None, "model"), "3/box/value": P(None, "model")}
