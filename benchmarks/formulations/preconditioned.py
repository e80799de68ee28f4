"""A language model of Flax NNX modules, trained with Shampoo: each matrix has a preconditioner on both sides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import cast, cross_entropy, tokens

_DIMS = {
    r"(query|key|value)/kernel": "width heads",
    r"out/kernel": "heads width",
    r"up/kernel": "width hidden",
    r"down/kernel": "hidden width",
    r"embed/embedding": "vocab width",
}


class _Layer(nnx.Module):
    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = linear(width, width), linear(width, width), linear(width, width)
        self.out, self.up, self.down = linear(width, width), linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, notes: Notes, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k, v = (
            notes(part(y).reshape(*x.shape[:2], self.heads, -1), "batch . heads .")
            for part in (self.query, self.key, self.value)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = notes(x + self.out(y), "batch stream .")
        return notes(x + self.down(notes(nnx.gelu(self.up(self.norm2(x))), "batch . hidden")), "batch stream .")


class _Model(nnx.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([_Layer(width, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, notes: Notes, tokens: jax.Array) -> jax.Array:
        x = notes(self.embed(tokens), "batch stream .")
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(notes, x))(layer, x)
        return notes(self.embed.attend(self.norm(x)), "batch . vocab")


def _root(matrix: jax.Array) -> jax.Array:
    """Return the inverse fourth root of a positive matrix by ten steps of a coupled Newton iteration."""
    size = matrix.shape[0]
    identity = jnp.eye(size, dtype=matrix.dtype)
    damped = matrix + 1e-6 * jnp.trace(matrix) / size * identity
    bound = jnp.linalg.norm(damped)
    power, root = damped / bound, identity
    for _ in range(10):
        change = (5 * identity - power) / 4
        squared = change @ change
        root, power = root @ change, squared @ squared @ power
    return root * bound**-0.25


def shampoo(notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, vocab: int) -> Program:
    """Kernels are updated by Shampoo, everything else by Adam. The preconditioners are not blocked."""
    dtype = cast(jnp.float32(0)).dtype
    shape_of = nnx.eval_shape(lambda: _Model(layers, width, heads, vocab, dtype, nnx.Rngs(0)))
    graph, shapes = nnx.split(shape_of)
    adam = optax.adam(1e-3)

    def is_kernel(path: Any) -> bool:
        return "kernel" in jax.tree_util.keystr(path)

    def kernels(tree: Any) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if is_kernel(path)}

    def others(tree: Any) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if not is_kernel(path)}

    def state(key: jax.Array) -> Any:
        params = nnx.to_pure_dict(nnx.state(_Model(layers, width, heads, vocab, dtype, nnx.Rngs(params=key))))
        sides = {name: (jnp.eye(w.shape[0]), jnp.eye(w.shape[1])) for name, w in kernels(params).items()}
        momentum = {name: jnp.zeros_like(w) for name, w in kernels(params).items()}
        return {"params": params, "sides": sides, "momentum": momentum, "moments": adam.init(others(params))}

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            weights = notes.weights(params)
            values = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(weights))
            return cross_entropy(nnx.merge(graph, values)(notes, inputs), targets)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        sides, momentum, turned = {}, {}, {}
        for name, gradient in kernels(gradients).items():
            left, right = state["sides"][name]
            left, right = 0.95 * left + gradient @ gradient.T, 0.95 * right + gradient.T @ gradient
            sides[name] = left, right
            momentum[name] = 0.9 * state["momentum"][name] + _root(left) @ gradient @ _root(right)
            turned[name] = -0.01 * momentum[name]
        small: Any
        small, moments = adam.update(others(gradients), state["moments"])
        updates = turned | small
        changed = jax.tree_util.tree_map_with_path(
            lambda path, w: w + updates[jax.tree_util.keystr(path)], state["params"]
        )
        return {"params": changed, "sides": sides, "momentum": momentum, "moments": moments}, value

    return Program(step, state, tokens(rows, seq, vocab))


_SIZES = {"seq": 1024, "layers": 12, "width": 1024, "heads": 16, "vocab": 32000}

FORMULATIONS = (
    Formulation(
        name="gpt-shampoo-nnx",
        style="block optimizer: Shampoo over whole matrices, modules of Flax NNX, layers in a loop",
        make=shampoo,
        small=dict(rows=8, seq=16, layers=2, width=32, heads=4, vocab=64),
        targets={"v5e:4x4": _SIZES | {"rows": 256}, "v6e:4x4": _SIZES | {"rows": 512}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
