"""An actor and critic with a memory: a scan over time, and advantages by a scan from the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, conv

_DIMS = {
    r"see[01]": ". . . width",
    r"enter": ". width",
    r"(inputs|memory)": "width . hidden",
    r"(act|judge)": "width .",
}


def actor_critic(notes: Notes, *, time: int, rows: int, side: int, width: int, actions: int) -> Program:
    """PPO's loss over `[time, rows]` of observations, with a GRU that is reset where an episode ends."""
    shapes = {"see0": (4, 4, 3, 64), "see1": (4, 4, 64, 128), "enter": (side * side // 64 * 128, width)}
    shapes |= {"inputs": (width, 3, width), "memory": (width, 3, width), "act": (width, actions), "judge": (width, 1)}

    def seen(w: Any, x: jax.Array) -> jax.Array:
        x = x.reshape(time * rows, side, side, 3)
        for name, stride in (("see0", 4), ("see1", 2)):
            x = jax.nn.relu(conv(x, w[name], stride))
        return jax.nn.relu(x.reshape(time, rows, -1) @ w["enter"])

    def loss(
        params: Any, observed: jax.Array, taken: jax.Array, rewards: jax.Array, ended: jax.Array, before: jax.Array
    ) -> jax.Array:
        w = notes.weights(cast(params))
        inputs = jnp.einsum("tbd,dgk->tbgk", jax.checkpoint(seen)(w, cast(observed)), w["inputs"])

        def cell(hidden: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, end = now
            hidden = jnp.where(end[:, None], 0, hidden)
            gates = jnp.einsum("bd,dgk->bgk", hidden, w["memory"])
            reset, update = jax.nn.sigmoid(x[:, 0] + gates[:, 0]), jax.nn.sigmoid(x[:, 1] + gates[:, 1])
            hidden = (1 - update) * jnp.tanh(x[:, 2] + reset * gates[:, 2]) + update * hidden
            return hidden, hidden

        _, states = lax.scan(cell, jnp.zeros((rows, width), inputs.dtype), (inputs, ended))
        logits = (states @ w["act"]).astype(jnp.float32)
        values = (states @ w["judge"])[..., 0].astype(jnp.float32)

        def back(later: tuple[jax.Array, jax.Array], now: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            advantage, after = later
            reward, value, end = now
            going = 1.0 - end
            advantage = reward + 0.99 * after * going - value + 0.95 * 0.99 * going * advantage
            return (advantage, value), advantage

        ends = ended.astype(jnp.float32)
        zeros = jnp.zeros((rows,))
        fixed = lax.stop_gradient(values)
        _, advantages = lax.scan(back, (zeros, fixed[-1]), (rewards, fixed, ends), reverse=True)
        returns = advantages + fixed
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        chances = jax.nn.log_softmax(logits)
        now = jnp.take_along_axis(chances, taken[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(now - before)
        policy = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled).mean()
        entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
        return policy + 0.5 * jnp.square(values - returns).mean() - 0.01 * entropy

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 5)
        observed = jax.random.uniform(keys[0], (time, rows, side, side, 3))
        taken = jax.random.randint(keys[1], (time, rows), 0, actions)
        rewards, ended = jax.random.normal(keys[2], (time, rows)), jax.random.bernoulli(keys[3], 0.05, (time, rows))
        return observed, taken, rewards, ended, -jax.random.uniform(keys[4], (time, rows), maxval=3.0)

    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4))
    return adamw_program(loss, shapes, batch, clipped)


_LARGE = {"time": 64, "side": 64, "width": 2048, "actions": 18}

FORMULATIONS = (
    Formulation(
        name="actor-critic-memory",
        style="reinforcement learning: a GRU in a scan over time, a reversed scan for advantages, time before rows",
        make=actor_critic,
        small=dict(time=8, rows=16, side=16, width=32, actions=4),
        targets={"v5e:4x4": _LARGE | {"rows": 1024}, "v6e:4x4": _LARGE | {"rows": 2048}},
        dims=_DIMS,
        ways=frozenset({"tensor"}),
        held_out=True,
    ),
)
