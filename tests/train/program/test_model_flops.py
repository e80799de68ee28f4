"""FLOPs of a model's training step: the products, each as often as its gradients need it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard.train.program.model_flops import step_flops
from autoshard.train.step.train_state import make_program

ROWS, WIDTH, LAYERS = 8, 16, 3
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
Apply = Callable[[jax.Array, jax.Array], jax.Array]


def layer(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ kernel)


def unrolled(apply: Apply, kernels: jax.Array, x: jax.Array) -> jax.Array:
    for index in range(LAYERS):
        x = apply(kernels[index], x)
    return x


def scanned(apply: Apply, kernels: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, kernel: (apply(kernel, x), None), x, kernels)[0]


def jitted(apply: Apply, kernels: jax.Array, x: jax.Array) -> jax.Array:
    return scanned(jax.jit(apply), kernels, x)


def checkpointed_loop(apply: Apply, kernels: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda kernels, x: scanned(apply, kernels, x))(kernels, x)


def program_of(run: Callable[..., jax.Array], apply: Apply, freeze: tuple[str, ...] = ()) -> Any:
    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Param(jnp.ones((WIDTH, WIDTH)))
            self.kernels = nnx.Param(jnp.ones((LAYERS, WIDTH, WIDTH)))

        def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
            x = run(apply, self.kernels[...], batch["x"] @ self.first[...])
            return jnp.sum(x), jnp.float32(ROWS)

    return make_program(Layers, optax.sgd(0.1), freeze=freeze)


@pytest.mark.parametrize("run", [unrolled, scanned, jitted, checkpointed_loop])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["kept", "recomputed"])
def test_recomputation_does_not_count(run: Callable[..., jax.Array], wrap: Callable[[Apply], Apply]) -> None:
    trained = 3 * LAYERS + 2  # the batch needs no gradient
    assert step_flops(program_of(run, wrap(layer)), BATCH, platform="cpu") == trained * PRODUCT


def test_frozen_weights_have_no_gradient() -> None:
    frozen_layers = program_of(scanned, jax.checkpoint(layer), freeze=("kernels",))
    assert step_flops(frozen_layers, BATCH, platform="cpu") == (2 * LAYERS + 2) * PRODUCT
    frozen_input = program_of(unrolled, jax.checkpoint(layer), freeze=("first",))  # its result needs no gradient
    assert step_flops(frozen_input, BATCH, platform="cpu") == (1 + 3 * LAYERS - 1) * PRODUCT


def test_a_loss_of_ones_own_counts() -> None:
    def twice(model: Any, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        (first, weight), (second, _) = model.loss(batch), model.loss({"x": batch["x"] + 1})
        return first + second, weight

    program = program_of(scanned, layer)
    assert step_flops(program, BATCH, twice, platform="cpu") == 2 * (3 * LAYERS + 2) * PRODUCT
