"""A small train step whose plan has all that a report shows: heads, ffn, vocabulary, sequence, moments, a counter."""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {
    "embed": (64, 32),
    "attention": {"wq": (32, 8, 4), "wk": (32, 8, 4), "wv": (32, 8, 4), "wo": (8, 4, 32)},
    "mlp": {"up": (32, 128), "down": (128, 32)},
    "norm": {"scale": (32,)},
}


def loss_of(params, batch):
    x = params["embed"][batch["x"]] * params["norm"]["scale"]
    a = params["attention"]
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, a[name]) for name in ("wq", "wk", "wv"))
    score = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k), axis=-1)
    x = x + jnp.einsum("bshd,hde->bse", jnp.einsum("bhst,bthd->bshd", score, v), a["wo"])
    x = x + jnp.einsum(
        "bsf,fe->bse", jax.nn.relu(jnp.einsum("bse,ef->bsf", x, params["mlp"]["up"])), params["mlp"]["down"]
    )
    logits = jnp.einsum("bse,ve->bsv", x, params["embed"])
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1)
    return -jnp.mean(rows)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments, "count": state["count"] + 1}, {"loss": loss}


def shapes(batch=16, seq=16, width=32):
    """(state, batch) as shapes."""
    like = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(tuple(width if n == 32 else n for n in s), "float32"),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((batch, seq), "int32")
    count = jax.ShapeDtypeStruct((), "int32")
    return {"params": like, "moments": like, "count": count}, {"x": tokens, "y": tokens}


def arrays():
    """(state, batch) as NumPy arrays."""
    rng = np.random.default_rng(0)

    def make(s):
        return (
            rng.integers(0, 64, s.shape).astype(s.dtype)
            if s.dtype == "int32"
            else rng.normal(size=s.shape).astype("f4") / 6
        )

    return jax.tree.map(make, shapes())
