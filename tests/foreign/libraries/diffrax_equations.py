"""Neural differential equations of Diffrax, whose vector fields are Equinox modules.

They do not raise if a solution fails: that would be a callback on the host, of which a plan warns.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from tests.foreign.one_step import Program, normal

PLANS = ("fsdp:8", "dp:2 fsdp:2 tp:2")


class _Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def _field():
    return _Field(eqx.nn.MLP(8, 8, 64, 2, activation=jax.nn.softplus, key=jax.random.key(0)))


def _fit(solve):
    def loss(field, starts, targets):
        return jnp.mean((jax.vmap(lambda y: solve(field, y))(starts) - targets) ** 2)

    return Program(loss, _field(), (normal(16, 8), normal(16, 8, seed=1)), plans=PLANS)


def fixed_steps():
    def solve(field, y):
        return diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Heun(), 0.0, 1.0, 0.1, y, throw=False).ys[-1]

    return _fit(solve)


def adaptive_steps():
    """Steps of a size that the error controls, checkpointed for the gradient."""

    def solve(field, y):
        control = diffrax.PIDController(rtol=1e-3, atol=1e-3)
        times = diffrax.SaveAt(t1=True)
        solved = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y,
            saveat=times,
            stepsize_controller=control,
            max_steps=64,
            throw=False,
        )
        return solved.ys[-1]

    return _fit(solve)


PROGRAMS = (fixed_steps, adaptive_steps)
