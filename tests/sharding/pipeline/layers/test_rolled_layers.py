"""Layers that a program writes one after another become scans, and the results stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from autoshard import _compat
from autoshard.sharding.pipeline.layers.layer_runs import equation_key
from autoshard.sharding.pipeline.layers.rolled_layers import roll_layers
from autoshard.sharding.rewrite.evaluation import rewritten

LAYERS, WIDTH = 4, 6


@pytest.fixture(autouse=True)
def float64():
    """Run in float64."""
    with jax.enable_x64(True):
        yield


def rolled(fn, weights, x, rows=True):
    """Roll the gradients of a loss; check that the results stay the same. Returns what was rolled, or None."""
    leaves, tree = jax.tree.flatten(weights)

    def one(*args):
        value, gradients = jax.value_and_grad(fn, argnums=(0, 1) if rows else 0)(
            jax.tree.unflatten(tree, args[:-1]), args[-1]
        )
        return [*jax.tree.leaves(gradients[0] if rows else gradients), value, *([gradients[1]] if rows else [])]

    jaxpr, held = _compat.split_constants(rewritten(jax.make_jaxpr(one)(*leaves, x)))
    found = roll_layers(jaxpr, len(held) + len(leaves), ["sum"] * (len(leaves) + 1))
    if found is None:
        return None
    whole = [*held, *leaves]
    stacks = [jnp.stack([whole[n] for n in layers]) for layers in found.stacks]
    results = _compat.jaxpr_as_function(_compat.close(found.jaxpr, []))(*found.constants, *whole, *stacks, x)
    want = one(*leaves, x)
    for group, value in zip(found.sums, results, strict=False):
        for n, own in zip(group, value if len(group) > 1 else [value], strict=True):
            np.testing.assert_allclose(own, want[n], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(results[-1], want[-1], rtol=1e-12, atol=1e-14)
    return found


def must_roll(*args, **options):
    """As `rolled`, where something must be rolled."""
    found = rolled(*args, **options)
    assert found is not None
    return found


def scans(found):
    return [(eqn.params["length"], eqn.params["reverse"]) for eqn in found.jaxpr.eqns if eqn.primitive.name == "scan"]


def matrices(count=LAYERS, seed=0):
    return list(jax.random.normal(jax.random.key(seed), (count, WIDTH, WIDTH), jnp.float64) * 0.4)


def inputs():
    return jax.random.normal(jax.random.key(9), (3, WIDTH), jnp.float64)


def test_weights_and_their_gradients_become_stacks():
    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    found = must_roll(loss, matrices(), inputs())
    assert scans(found) == [(LAYERS, False), (LAYERS, True)]
    assert [len(layers) for layers in found.stacks] == [LAYERS]
    assert [len(group) for group in found.sums] == [LAYERS, 1]


def test_an_input_without_a_gradient():
    def loss(ws, x):
        for w in ws:
            x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    found = must_roll(loss, matrices(), inputs(), rows=False)
    assert scans(found) == [(LAYERS, False), (LAYERS, True)]


def test_a_weight_of_all_layers():
    def loss(ws, x):
        for w in ws[:-1]:
            x = x + jnp.tanh(x @ w) @ ws[-1]
        return (x**2).mean()

    found = must_roll(loss, matrices(LAYERS + 1), inputs())
    assert scans(found) == [(LAYERS, False), (LAYERS, True)]
    assert [len(group) for group in found.sums] == [LAYERS, 1, 1]


def test_two_kinds_of_layers_in_turn_are_one_block():
    def loss(ws, x):
        for n, w in enumerate(ws):
            x = x + (jnp.tanh if n % 2 else jnp.sin)(x @ w)
        return (x**2).mean()

    found = must_roll(loss, matrices(), inputs())
    assert scans(found) == [(LAYERS // 2, False), (LAYERS // 2, True)]
    assert [len(layers) for layers in found.stacks] == [LAYERS // 2] * 2


def test_two_kinds_of_layers_whose_gradients_are_equal_operators():
    def loss(ws, x):
        for n, w in enumerate(ws):
            x = x + (jnp.exp if n % 2 else jnp.sin)(x @ w)
        return (x**2).mean()

    found = must_roll(loss, matrices(), inputs())
    assert scans(found) == [(LAYERS // 2, False), (LAYERS // 2, True)]


def test_numbers_that_differ_between_layers():
    def loss(ws, x):
        for n, w in enumerate(ws):
            x = x + jnp.tanh(x @ w) / (n + 1)
        return (x**2).mean()

    found = must_roll(loss, matrices(), inputs())
    assert scans(found) == [(LAYERS, False), (LAYERS, True)]


def test_layers_that_take_an_earlier_layer():
    def loss(ws, x):
        kept = [x]
        for w in ws:
            kept.append(kept[-1] + jnp.tanh(kept[-1] @ w) + kept[max(len(kept) - 2, 0)])
        return (kept[-1] ** 2).mean() + sum((x**3).sum() for x in kept)

    rolled(loss, matrices(6), inputs())  # equal results, rolled or not


def test_the_order_of_gradients_must_be_that_of_the_layers():
    """The second stack runs over the first one's results in the same order. It is no gradient of the first one."""

    def loss(ws, x):
        kept = []
        for w in ws:
            x = x + jnp.tanh(x @ w)
            kept.append(x)
        y = jnp.ones_like(x)
        for k in kept:
            y = y + jnp.sin(y @ k.T @ k)
        return jax.lax.stop_gradient(y).sum() + (x**2).mean()

    found = must_roll(loss, matrices(), inputs())
    assert [length for length, reverse in scans(found) if reverse] == [LAYERS]


@pytest.mark.parametrize("change", ["width", "operator", "trained"])
def test_layers_that_differ(change):
    def loss(ws, x):
        for n, w in enumerate(ws):
            w = jax.lax.stop_gradient(w) if change == "trained" and n < 2 else w
            act = jnp.sin if change == "operator" and n == 1 else jnp.tanh
            x = act(x @ w) if change == "width" else x + act(x @ w)
        return (x**2).mean()

    ws = matrices()
    if change == "width":
        ws[1], ws[2] = jnp.ones((WIDTH, 5)), jnp.ones((5, WIDTH))
    found = rolled(loss, ws, inputs())
    assert found is None or all(length < LAYERS for length, _ in scans(found))


def counted(calls):
    """Return the identity. Its gradient counts how often it is computed."""

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, g):
        io_callback(count, None, g.sum())
        return (g,)

    def count(_):
        calls[0] += 1

    identity.defvjp(lambda x: (x, None), backward)
    return identity


def test_the_first_layer_has_no_effect_of_others():
    calls = [0]
    identity = counted(calls)

    def loss(ws, x):
        for w in ws:
            x = identity(x)
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    rolled(loss, matrices(), inputs(), rows=False)
    jax.effects_barrier()
    assert calls[0] % (LAYERS - 1) == 0


def test_effects_outside_of_layers_that_are_completed():
    calls = [0]
    identity = counted(calls)

    def loss(ws, x):
        for w in ws:
            x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
            x = x + jnp.tanh(x @ w)
        return (identity(x) ** 2).mean()

    assert scans(must_roll(loss, matrices(), inputs(), rows=False)) == [(LAYERS, False), (LAYERS, True)]
    jax.effects_barrier()
    assert calls == [2]  # once as written, once rolled


@pytest.mark.parametrize("changed", [np.arange(2000.0) * (np.arange(2000) != 1000), -0.0, True])
def test_parameters_that_look_alike(changed):
    """Equations with different parameters are not equal, even if Python or `repr` calls the parameters equal."""
    same = {True: 1, -0.0: 0.0}.get(changed, None) if np.isscalar(changed) else np.arange(2000.0)
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    one, other = (eqn.replace(params={**eqn.params, "extra": value}) for value in (same, changed))
    assert equation_key(one) != equation_key(other)
    assert equation_key(one) == equation_key(one.replace(params={**one.params}))
