"""Plans a train step for a TPU pod that is not attached: `python examples/plan_for_a_pod.py`.

Nothing is allocated or compiled: the arguments are shapes, and the machine is a description.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import autoshard

LAYERS, BATCH, SEQ, EMBED, FFN, VOCAB = 24, 256, 2048, 4096, 16384, 32768
optimizer = optax.adamw(1e-4)


def create_state(rng):
    def weights(number, *shape):
        return jax.random.normal(jax.random.fold_in(rng, number), shape) / shape[-2] ** 0.5

    layers = {"up": weights(0, LAYERS, EMBED, FFN), "down": weights(1, LAYERS, FFN, EMBED)}
    params = {"embedding": weights(2, VOCAB, EMBED), "layers": layers, "head": weights(3, EMBED, VOCAB)}
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, tokens):
    @jax.checkpoint
    def layer(x, weights):
        hidden = jax.nn.gelu(x @ weights["up"].astype(jnp.bfloat16))
        return x + hidden @ weights["down"].astype(jnp.bfloat16), None

    x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def main():
    state = jax.eval_shape(create_state, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)

    plan = autoshard.plan(train_step, state, tokens, target="v5p:4x4x4", donate_argnums=0)
    print(plan)
    print(plan.explain("0/params/layers/up"))  # why it is sharded so, and what the next best choices cost

    # A strategy can also be requested; `diff` says what it costs.
    requested = autoshard.plan(train_step, state, tokens, target="v5p:4x4x4", donate_argnums=0, plan="fsdp:8 tp:8")
    print(plan.diff(requested))
    assert plan.mesh.size == 64
    assert plan.estimate.step_time_us <= requested.estimate.step_time_us


if __name__ == "__main__":
    main()
