"""Distributions and bijectors of Distrax, and losses of RLax, which builds on it."""

import distrax
import jax
import jax.numpy as jnp
import rlax

from tests.foreign.one_step import Program, integers, normal

PLANS = ("fsdp:8", "dp:4 fsdp:2")


def spline_coupling():
    """A flow of coupling layers with rational quadratic splines."""
    knots = 8 * 3 + 1

    def conditioner(params):
        return lambda x: (jax.nn.relu(x @ params["w"]) @ params["v"]).reshape(*x.shape, knots)

    def loss(params, x):
        mask = jnp.arange(8) % 2 == 0
        layers = [
            distrax.MaskedCoupling(
                mask ^ bool(i), conditioner(each), lambda p: distrax.RationalQuadraticSpline(p, -4.0, 4.0)
            )
            for i, each in enumerate(params)
        ]
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return -jnp.mean(distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x))

    params = [{"w": normal(8, 64, seed=i) / 3, "v": normal(64, 8 * knots, seed=9 + i) / 80} for i in range(2)]
    return Program(loss, params, (normal(64, 8),), plans=PLANS)


def hidden_markov():
    """A hidden Markov model, by its forward pass."""

    def loss(params, xs):
        model = distrax.HMM(
            distrax.Categorical(params["start"]), distrax.Categorical(params["move"]),
            distrax.MultivariateNormalDiag(params["means"], jnp.ones_like(params["means"])),
        )  # fmt: skip
        return -jnp.mean(jax.vmap(lambda x: model.forward(x)[0])(xs))

    params = {"start": normal(16), "move": normal(16, 16, seed=1), "means": normal(16, 4, seed=2)}
    return Program(loss, params, (normal(16, 12, 4, seed=3),), plans=PLANS)


def actor_critic():
    """Truncated returns, importance weights of V-trace, and an entropy bonus."""

    def loss(params, observations, actions, rewards):
        hidden = jnp.tanh(observations @ params["w"])
        logits, values = hidden @ params["pi"], (hidden @ params["v"])[..., 0]
        discounts = jnp.full_like(rewards, 0.9)
        v_tm1, v_t = values[:, :-1], values[:, 1:]
        traced = jax.vmap(rlax.vtrace)(v_tm1, v_t, rewards, discounts, jnp.ones_like(rewards))
        policy = jax.vmap(rlax.policy_gradient_loss)(logits[:, :-1], actions, traced, jnp.ones_like(rewards))
        entropy = jax.vmap(rlax.entropy_loss)(logits[:, :-1], jnp.ones_like(rewards))
        return jnp.mean(policy) + 0.5 * jnp.mean(traced**2) + 0.01 * jnp.mean(entropy)

    params = {"w": normal(24, 64) / 5, "pi": normal(64, 8, seed=1) / 8, "v": normal(64, 1, seed=2) / 8}
    return Program(loss, params, (normal(16, 11, 24, seed=3), integers(8, 16, 10), normal(16, 10, seed=4)), plans=PLANS)


PROGRAMS = (spline_coupling, hidden_markov, actor_critic)
