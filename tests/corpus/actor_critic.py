"""Proximal policy optimisation in Flax Linen: advantages by a reverse scan, clipped ratio, entropy; annealed Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

EPOCHS = 2


class ActorCritic(nn.Module):
    actions: int = 4
    width: int = 32

    @nn.compact
    def __call__(self, observation):
        dense = nn.initializers.orthogonal(2**0.5)
        x = nn.tanh(nn.Dense(self.width, kernel_init=dense)(observation))
        x = nn.tanh(nn.Dense(self.width, kernel_init=dense)(x))
        logits = nn.Dense(self.actions, kernel_init=nn.initializers.orthogonal(0.01))(x)
        y = nn.tanh(nn.Dense(self.width, kernel_init=dense)(observation))
        y = nn.tanh(nn.Dense(self.width, kernel_init=dense)(y))
        return logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(y)[..., 0]


def advantages_of(values, last_value, rewards, dones, discount=0.99, trace=0.95):
    """Generalised advantage estimates of `[time, environment]`."""

    def back(carry, now):
        advantage, next_value = carry
        value, reward, done = now
        delta = reward + discount * next_value * (1 - done) - value
        advantage = delta + discount * trace * (1 - done) * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(back, start, (values, rewards, dones), reverse=True)[1]


def loss_fn(params, apply_fn, rollout, advantages, returns):
    logits, values = apply_fn({"params": params}, rollout["observation"])
    log_policy = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_policy, rollout["action"][..., None], axis=-1)[..., 0]
    ratio = jnp.exp(chosen - rollout["log_probability"])
    advantages = (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
    return jnp.mean((values - returns) ** 2) / 2 - jnp.mean(gain) - 0.01 * jnp.mean(entropy)


def train_step(state, rollout):
    _, values = state.apply_fn({"params": state.params}, rollout["observation"])
    _, last_value = state.apply_fn({"params": state.params}, rollout["last_observation"])
    advantages = advantages_of(values, last_value, rollout["reward"], rollout["done"])
    returns = advantages + values

    def epoch(state, _):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, rollout, advantages, returns)
        return state.apply_gradients(grads=grads), loss

    state, losses = jax.lax.scan(epoch, state, length=EPOCHS)
    return state, jnp.mean(losses)


def make(time=12, environments=16, size=8):
    model = ActorCritic()
    params = model.init(jax.random.key(0), jnp.zeros((1, size)))["params"]
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(3e-3, 0.0, 100), eps=1e-5)
    tx = optax.chain(optax.clip_by_global_norm(0.5), adam)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    rng = np.random.default_rng(0)
    shape = (time, environments)
    rollout = {
        "observation": rng.normal(size=(*shape, size)),
        "last_observation": rng.normal(size=(environments, size)),
        "log_probability": np.log(rng.uniform(0.1, 0.5, shape)),
        "reward": rng.normal(size=shape),
        "done": rng.random(shape) < 0.1,
    }
    rollout = {name: jnp.asarray(x, jnp.float32) for name, x in rollout.items()}
    rollout["action"] = jnp.asarray(rng.integers(0, 4, shape), jnp.int32)
    return train_step, (state,), rollout
