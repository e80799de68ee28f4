"""Source lines of models that are made of a library's layers."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import autoshard

X = jax.ShapeDtypeStruct((32, 16), "float32")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(16)(jax.nn.gelu(linen.Dense(64)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Equinox(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(16, 64, key=key), eqx.nn.Linear(64, 16, key=key)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Haiku(hk.Module):
    def __call__(self, x):
        return hk.Linear(16)(jax.nn.gelu(hk.Linear(64)(x)))


def of_haiku(rng):
    model = hk.without_apply_rng(hk.transform(lambda x: Haiku()(x)))
    return model.init(rng, jnp.zeros((1, 16))), model.apply


def of_linen(rng):
    return Linen().init(rng, jnp.zeros((1, 16))), Linen().apply


def of_nnx(rng):
    graph, params = nnx.split(Nnx(nnx.Rngs(rng)))
    return nnx.to_pure_dict(params), lambda params, x: nnx.call((graph, nnx.State(params)))(x)[0]


def of_equinox(rng):
    params, static = eqx.partition(Equinox(rng), eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def planned(create):
    params, apply = create(jax.random.key(0))

    def step(params, x):
        grads = jax.grad(lambda params: jnp.mean((apply(params, x) - x) ** 2))(params)
        return optax.apply_updates(params, OPTIMIZER.update(grads, OPTIMIZER.init(params))[0])

    return autoshard.plan(step, params, X, target="cpu:4", plan="tp:4", donate_argnums=0)


def are_here(lines):
    return lines and all(line.startswith(f"{__file__}:") for line in lines)


@pytest.mark.parametrize(
    ("create", "layer"), [(of_haiku, Haiku), (of_linen, Linen), (of_nnx, Nnx), (of_equinox, Equinox)]
)
def test_collectives_have_the_line_that_calls_the_library(create, layer):
    """`tp` adds up the products of a layer, and the clipping adds up a norm."""
    lines = {line for *_, line in planned(create).traffic}
    assert are_here(lines), lines
    assert any(f"({layer.__name__}.__call__)" in line for line in lines), lines
    assert any("step)" in line for line in lines), lines


def test_the_compiled_program_has_the_same_lines():
    audit = planned(of_nnx).verify()
    assert audit.ok
    assert are_here({each.line for each in audit.collectives})
