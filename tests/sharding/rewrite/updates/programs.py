"""Training steps whose optimizers multiply matrices: Muon by optax and by hand, and the roots of Shampoo."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from autoshard import _compat
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.rewrite.updates.spread_updates import with_spread_updates

WIDTH, HIDDEN, DEVICES = 16, 32, 8
Step = Callable[..., Any]


def weights(name: str, *shape: int) -> jax.Array:
    return 0.15 * jax.random.normal(jax.random.key(zlib.crc32(name.encode()) % 1000), shape)


def layers(count: int = 3) -> dict[str, Any]:
    """Parameters of unrolled layers, with 2 * `count` matrices."""
    made = [{"up": weights(f"up{n}", WIDTH, HIDDEN), "down": weights(f"down{n}", HIDDEN, WIDTH)} for n in range(count)]
    return {"layers": made, "bias": weights("bias", WIDTH)}


def stacks(count: int = 3) -> dict[str, Any]:
    """The same with two stacks of matrices."""
    params = layers(count)
    return {"layers": jax.tree.map(lambda *each: jnp.stack(each), *params["layers"]), "bias": params["bias"]}


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (16, 8, WIDTH))


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    def layer(y: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ w["up"].astype(y.dtype)) @ w["down"].astype(y.dtype), None

    y = x
    if isinstance(params["layers"], dict):
        y, _ = jax.lax.scan(layer, y, params["layers"])
    else:
        for w in params["layers"]:
            y, _ = layer(y, w)
    return jnp.mean((y + params["bias"] - jnp.roll(x, 1, -1)) ** 2)


def orthogonal(x: jax.Array, coefficients: Any = (3.4445, -4.7750, 2.0315)) -> jax.Array:
    """Two Newton-Schulz steps."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(2):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def by_hand(update: Callable[..., Any], loss: Callable[..., Any] = loss_of) -> Step:
    """A step with momentum. `update` computes the change of each matrix from its momentum."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, momentum = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        changes = jax.tree.map(lambda m: update(m) if m.ndim > 1 else m, momentum)
        return (jax.tree.map(lambda w, u: w - 0.01 * u, params, changes), momentum), value

    return step


def by_optax(optimizer: Any, loss: Callable[..., Any] = loss_of) -> Step:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def muon(**options: Any) -> Any:
    """Muon for all parameters except vectors. Leading dimensions count matrices."""

    def numbers(params: Any) -> Any:
        return jax.tree.map(lambda w: contrib.MuonDimensionNumbers(-2, -1) if w.ndim > 1 else None, params)

    return contrib.muon(1e-2, muon_weight_dimension_numbers=numbers, **options)


def momentum_of(params: Any) -> Any:
    return params, jax.tree.map(jnp.zeros_like, params)


def moments_of(params: Any, optimizer: Any) -> Any:
    return params, optimizer.init(params)


def inverse_root(a: jax.Array) -> jax.Array:
    """The inverse fourth root of a positive matrix, by six steps of the coupled Newton iteration."""
    unit = jnp.eye(a.shape[0])
    a = a + 1e-3 * unit
    scale = 2.5 / jnp.linalg.norm(a)
    m, root = a * scale, unit * scale**0.25
    for _ in range(6):
        t = (5 * unit - m) / 4
        square = t @ t
        m, root = square @ square @ m, root @ t
    return root


def shampoo_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    params, statistics = state
    value, gradients = jax.value_and_grad(loss_of)(params, x)

    def one(w: jax.Array, g: jax.Array, pair: Any) -> tuple[Any, Any]:
        left, right = (0.9 * pair[0] + g @ g.T, 0.9 * pair[1] + g.T @ g)
        return w - 0.01 * inverse_root(left) @ g @ inverse_root(right), (left, right)

    matrices, tree = jax.tree.flatten(params["layers"])
    made = [one(*each) for each in zip(matrices, jax.tree.leaves(gradients["layers"]), statistics, strict=True)]
    bias = params["bias"] - 0.01 * gradients["bias"]
    return ({"layers": tree.unflatten([w for w, _ in made]), "bias": bias}, [pair for _, pair in made]), value


def shampoo_state(params: Any) -> Any:
    sizes = [w.shape for w in jax.tree.leaves(params["layers"])]
    return params, [(jnp.zeros((m, m)), jnp.zeros((n, n))) for m, n in sizes]


def spread(step: Step, *args: Any, devices: int = DEVICES) -> list[tuple[int, tuple[int, ...], int, bool]]:
    """Return for each `spread_matrices` the number of arrays, their shape, the places, and whether they are stacks."""
    changed = with_spread_updates(trace(step, args, {}), devices)
    eqns = _compat.open_jaxpr(changed.closed).eqns
    return [
        (len(e.invars), e.invars[0].aval.shape, e.params["places"], e.params["stacked"])
        for e in eqns
        if e.primitive.name == "spread_matrices"
    ]


def experts(layers: int = 2, count: int = 8) -> list[dict[str, Any]]:
    """Parameters of layers of experts, with `2 * count` matrices each."""
    return [
        {
            "router": weights(f"router{n}", WIDTH, count),
            "up": weights(f"up{n}", count, WIDTH, HIDDEN),
            "down": weights(f"down{n}", count, HIDDEN, WIDTH),
        }
        for n in range(layers)
    ]


def loss_of_experts(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        y = jnp.tanh(jnp.einsum("bsd,edf->ebsf", x, w["up"]))
        y = jnp.einsum("ebsf,efd->ebsd", y, w["down"])
        x = x + jnp.einsum("ebsd,bse->bsd", y, jax.nn.softmax(x @ w["router"]))
    return jnp.mean((x - 1) ** 2)
