"""Small models for tests, and running them with little compiling, which is what these tests cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from autoshard.models import GPT, GPTConfig

TINY = GPTConfig(vocab=32, layers=2, heads=4, kv_heads=2, width=16, ffn=24, context=12)
GPT2 = dataclasses.replace(
    TINY, kv_heads=None, norm="layernorm", positions="learned", mlp="gelu", bias=True, tie_head=False
)


def filled(cfg: GPTConfig, std: float = 0.1) -> GPT:
    """A model whose parameters all differ, biases and scales too; filled by NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))

    def fill(path, x):
        centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(rng.normal(centre, std, x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(fill, state))


def quickly(fn, *args):
    """`fn(*args)`, jitted without optimisation."""
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    return jax.jit(fn).lower(*args).compile(compiler_options=options)(*args)


def logits_of(model, inputs, key=None):
    """The model's logits, with dropout where there is a key."""
    graph, params = nnx.split(model)

    def logits(params, inputs, key):
        return nnx.merge(graph, params)(inputs, deterministic=key is None, rngs=key)

    return quickly(logits, params, inputs, key)
