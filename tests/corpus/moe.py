"""A mixture of experts in plain JAX: top-2 router, capacity, dispatch and combine by einsum, balance loss; Lion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

EXPERTS, CAPACITY, HEADS = 8, 6, 4
tx = optax.lion(1e-4, weight_decay=0.1)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x, layer):
    q, k, v = jnp.einsum("bsd,dnhk->nbshk", x, layer["qkv"])
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhst,bthk,hkd->bsd", weights, v, layer["out"])


def route(x, router):
    """Combine weights `[batch, seq, experts, capacity]`, where each sequence is a group, and the balance loss."""
    probabilities = jax.nn.softmax(x @ router, axis=-1)
    gates, chosen = jax.lax.top_k(probabilities, 2)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    choice = jax.nn.one_hot(chosen, EXPERTS)  # [batch, seq, 2, experts]
    # A token's position in its expert's queue: all first choices come before all second choices.
    queue = choice.swapaxes(1, 2).reshape(x.shape[0], -1, EXPERTS)
    slot = jnp.cumsum(queue, axis=1) * queue - 1
    slot = slot.reshape(x.shape[0], 2, -1, EXPERTS).swapaxes(1, 2)
    slots = jax.nn.one_hot(slot.astype(jnp.int32), CAPACITY)
    combine = jnp.einsum("bsk,bskec->bsec", gates, slots)
    balance = EXPERTS * jnp.sum(jnp.mean(choice[:, :, 0], axis=(0, 1)) * jnp.mean(probabilities, axis=(0, 1)))
    return combine, balance


def experts(x, layer):
    combine, balance = route(x, layer["router"])
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inputs, layer["gate"]))
    hidden = hidden * jnp.einsum("ebcd,edf->ebcf", inputs, layer["up"])
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, layer["down"])
    return jnp.einsum("bsec,ebcd->bsd", combine, outputs), balance


def loss_fn(params, tokens):
    def block(x, layer):
        x = x + attention(norm(x, layer["norm1"]), layer)
        y, balance = experts(norm(x, layer["norm2"]), layer)
        return x + y, balance

    x, balance = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return jnp.mean(losses) + 0.01 * jnp.sum(balance)


def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make(vocab=64, layers=2, dim=32, hidden=64):
    rng = np.random.default_rng(0)

    def weight(*shape, fan_in):
        return jnp.asarray(rng.normal(size=shape) / fan_in**0.5, jnp.float32)

    params = {
        "embed": weight(vocab, dim, fan_in=dim),
        "layers": {
            "norm1": jnp.ones((layers, dim)),
            "qkv": weight(layers, dim, 3, HEADS, dim // HEADS, fan_in=dim),
            "out": weight(layers, HEADS, dim // HEADS, dim, fan_in=dim),
            "norm2": jnp.ones((layers, dim)),
            "router": weight(layers, dim, EXPERTS, fan_in=dim),
            "gate": weight(layers, EXPERTS, dim, hidden, fan_in=dim),
            "up": weight(layers, EXPERTS, dim, hidden, fan_in=dim),
            "down": weight(layers, EXPERTS, hidden, dim, fan_in=hidden),
        },
        "norm": jnp.ones(dim),
        "head": weight(dim, vocab, fan_in=dim),
    }
    tokens = jnp.asarray(rng.integers(0, vocab, (16, 17)), jnp.int32)
    return train_step, ({"params": params, "opt_state": tx.init(params)},), tokens
