"""Parameter updates: `(parameter, gradient, state...) -> (next parameter, next state...)`, on one or two leaves.

Optimizers are those of Optax, with their state flattened into leaves. Nearly all operations are elementwise: state that
is sharded like its parameter does not move (ZeRO shards both). The exceptions are norms, which are one number per leaf
or for all leaves; Adafactor's and SM3's statistics of rows and columns; and Muon's products of a matrix with itself.
An update is itself differentiable, as meta-learning requires. `note` says where it has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32

Leaves = tuple[jax.Array, ...]


def step_of(optimizer: optax.GradientTransformation) -> Callable[..., Leaves]:
    """Returns an optimizer's step as a function of a parameter, a gradient and the leaves of the state."""

    def step(parameter: jax.Array, gradient: jax.Array, *state: jax.Array) -> Leaves:
        tree = jax.tree.structure(jax.eval_shape(optimizer.init, parameter))
        updates, new = optimizer.update(gradient, tree.unflatten(state), parameter)
        return optax.apply_updates(parameter, updates), *jax.tree.leaves(new)  # pyright: ignore[reportReturnType]

    return step


def clip_by_global_norm(first: jax.Array, second: jax.Array, *, max_norm: float = 1.0) -> Leaves:
    """Multiplies two gradients by `min(1, max_norm / norm)`, with their joint norm in float32 (arXiv:1211.5063).

    For every sharding, each device sums the squares of its own shard, and one number is reduced.
    """
    norm = global_norm(first, second)
    scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
    return _scaled(first, scale), _scaled(second, scale)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x * scale` in float32, rounded once."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def global_norm(*leaves: jax.Array) -> jax.Array:
    """The joint norm of all leaves, in float32."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.float32(0.0)))


def clip_by_value(gradient: jax.Array, *, limit: float = 1.0) -> jax.Array:
    """Clips the elements of a gradient to between `-limit` and `limit`."""
    return jnp.clip(gradient, -limit, limit)


def clip_by_leaf_norm(gradient: jax.Array, *, max_norm: float = 1.0) -> jax.Array:
    """Multiplies a gradient by `min(1, max_norm / norm)`, with the norm of this leaf alone."""
    norm = global_norm(gradient)
    return _scaled(gradient, jnp.where(norm > max_norm, max_norm / norm, 1.0))


def adaptive_gradient_clip(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    """Clips each column's norm to 0.01 times that of the parameter's column (NFNets, arXiv:2102.06171)."""
    clip = optax.adaptive_grad_clip(0.01)
    return clip.update(gradient, clip.init(parameter), parameter)[0]  # pyright: ignore[reportReturnType]


def weight_decay(parameter: jax.Array, gradient: jax.Array, *, rate: float = 0.1) -> jax.Array:
    """`gradient + rate * parameter`, as in L2 regularization."""
    return gradient + rate * parameter.astype(gradient.dtype)


def decoupled_weight_decay(parameter: jax.Array, rate: jax.Array) -> jax.Array:
    """`parameter * (1 - rate)` with this step's rate `[]` (arXiv:1711.05101)."""
    return _scaled(parameter, 1.0 - rate)


def ema(average: jax.Array, parameter: jax.Array, *, decay: float = 0.999) -> jax.Array:
    """`decay * average + (1 - decay) * parameter`, in the dtype of the average."""
    return average + (1.0 - decay) * (parameter.astype(average.dtype) - average)


def debiased_ema(average: jax.Array, value: jax.Array, count: jax.Array, *, decay: float = 0.9) -> Leaves:
    """Returns the average divided by `1 - decay^count`, the next average, and the next count `[]`."""
    new, count = ema(average, value, decay=decay), count + 1
    return new / (1.0 - decay ** count.astype(jnp.float32)), new, count


def gradient_accumulation(total: jax.Array, gradient: jax.Array, count: jax.Array, *, every: int = 4) -> Leaves:
    """Adds one microbatch's gradient to the total, and resets the total after `every` microbatches.

    Args:
        total: the sum of the gradients so far, float32.
        gradient: the microbatch's gradient, of any dtype.
        count: the number of microbatches in the total, `[]`.
        every: the number of microbatches per step.

    Returns:
        The mean gradient if the step is complete, else zeros; the next total; the next count.
    """
    total, count = total + gradient.astype(total.dtype), count + 1
    done = count == every
    zeros = jnp.zeros_like(total)
    return (
        jnp.where(done, total / every, zeros),
        jnp.where(done, zeros, total),
        jnp.where(done, jnp.zeros_like(count), count),
    )


def loss_scaling(gradient: jax.Array, scale: jax.Array, good_steps: jax.Array, *, patience: int = 2000) -> Leaves:
    """Dynamic loss scaling for float16: the gradient divided by the scale, or zeros if it is not finite.

    Args:
        gradient: the gradient of the loss times the scale.
        scale: the current scale, `[]`.
        good_steps: the number of finite steps since the scale last changed, `[]`.
        patience: the number of finite steps after which the scale doubles. It halves after any gradient that is not
            finite.

    Returns:
        The gradient in float32, the next scale, and the next `good_steps` (arXiv:1710.03740).
    """
    finite = jnp.all(jnp.isfinite(gradient))
    unscaled = jnp.where(finite, gradient.astype(jnp.float32) / scale, 0.0)
    doubles = good_steps + 1 >= patience
    new_scale = jnp.where(finite, jnp.where(doubles, scale * 2.0, scale), jnp.maximum(scale * 0.5, 1.0))
    next_good_steps = jnp.where(doubles | ~finite, jnp.zeros_like(good_steps), good_steps + 1)
    return unscaled, new_scale, next_good_steps


def mixed_precision_sgd(master: jax.Array, gradient: jax.Array, *, rate: float = 0.01) -> Leaves:
    """Applies a bfloat16 gradient to the float32 master; also returns the next bfloat16 parameter."""
    master = master - rate * gradient.astype(master.dtype)
    return master, master.astype(gradient.dtype)


def warmup_cosine_rate(count: jax.Array) -> jax.Array:
    """The learning rate of a step `[]`: rises over 100 steps, then falls over 900 to a tenth."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000, 1e-4)
    return jnp.asarray(schedule(count), jnp.float32)


def orthogonalize(gradient: jax.Array, *, steps: int = 5) -> jax.Array:
    """Brings the singular values of a matrix `[in, out]` near 1 by Newton-Schulz iteration, as in Muon.

    Iterates `X <- a X + (b A + c A^2) X` with `A = X X'` (coefficients: https://kellerjordan.github.io/posts/muon).
    """
    x = gradient.astype(jnp.float32)
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x))) + 1e-7)

    def improve(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        square = jnp.einsum("ab,cb->ac", x, x)
        mixed = -4.7750 * square + 2.0315 * jnp.einsum("ab,bc->ac", square, square)
        return 3.4445 * x + jnp.einsum("ab,bc->ac", mixed, x), None

    return lax.scan(improve, x, None, length=steps)[0].astype(gradient.dtype)


_LEAF = f32(8, 12)
_SIGN_UPDATE = "the update is a sign: its derivative with respect to the gradient is zero"


def _optimizer(
    name: str, optimizer: optax.GradientTransformation, wrt: Sequence[int] = (0, 1), note: str = ""
) -> Operator:
    """The operator of an Optax optimizer, with a sample state shaped like its initial state."""
    state = jax.tree.map(_sample, jax.eval_shape(optimizer.init, _LEAF))
    return Operator(name, step_of(optimizer), (_LEAF, _LEAF, *jax.tree.leaves(state)), tuple(wrt), note)


def _sample(leaf: Any) -> np.ndarray:
    """A sample state leaf with positive values, since roots are taken of second moments. Counts are 3."""
    values = 0.1 + np.arange(np.prod(leaf.shape, dtype=int)) % 7 / 16
    return np.asarray(values if jnp.issubdtype(leaf.dtype, jnp.inexact) else 3).astype(leaf.dtype).reshape(leaf.shape)


_RATE = 1e-2
_BF16 = jax.ShapeDtypeStruct((8, 12), jnp.bfloat16)

OPERATORS: tuple[Operator, ...] = (
    _optimizer("sgd", optax.sgd(_RATE)),
    _optimizer("momentum", optax.sgd(_RATE, momentum=0.9)),
    _optimizer("nesterov_momentum", optax.sgd(_RATE, momentum=0.9, nesterov=True)),
    _optimizer("sign_sgd", optax.sign_sgd(_RATE), (0,), _SIGN_UPDATE),
    _optimizer("signum", optax.signum(_RATE), (0,), _SIGN_UPDATE),
    _optimizer("adam", optax.adam(_RATE)),
    _optimizer("adamw", optax.adamw(_RATE)),
    _optimizer("nadamw", optax.nadamw(_RATE)),
    _optimizer("adamax", optax.adamax(_RATE)),
    _optimizer("amsgrad", optax.amsgrad(_RATE)),
    _optimizer("radam", optax.radam(_RATE)),
    _optimizer("adabelief", optax.adabelief(_RATE)),
    _optimizer("adan", optax.adan(_RATE)),
    _optimizer("adagrad", optax.adagrad(_RATE)),
    _optimizer("adadelta", optax.adadelta(_RATE)),
    _optimizer("rmsprop", optax.rmsprop(_RATE)),
    _optimizer("rprop", optax.rprop(_RATE), (0,), _SIGN_UPDATE),
    _optimizer("adafactor", optax.adafactor(_RATE, min_dim_size_to_factor=4)),
    _optimizer("sm3", optax.sm3(_RATE)),
    _optimizer("novograd", optax.novograd(_RATE)),
    _optimizer("yogi", optax.yogi(_RATE)),
    _optimizer("lamb", optax.lamb(_RATE)),
    _optimizer("lars", optax.lars(_RATE)),
    _optimizer("lion", optax.lion(_RATE), (0,), _SIGN_UPDATE),
    _optimizer("muon", optax.contrib.muon(_RATE)),
    _optimizer("ademamix", optax.contrib.ademamix(_RATE)),
    _optimizer("adopt", optax.contrib.adopt(_RATE)),
    _optimizer("prodigy", optax.contrib.prodigy(_RATE)),
    _optimizer("schedule_free_sgd", optax.contrib.schedule_free_sgd(_RATE)),
    _optimizer("lbfgs_direction", optax.scale_by_lbfgs(memory_size=2)),
    Operator("orthogonalize", orthogonalize, (_LEAF,), note="Muon's iteration"),
    Operator("global_norm", global_norm, (_LEAF, f32(16, 20)), (0, 1)),
    Operator("clip_by_global_norm", clip_by_global_norm, (_LEAF, f32(16, 20)), (0, 1)),
    Operator("clip_by_leaf_norm", clip_by_leaf_norm, (_LEAF,)),
    Operator("clip_by_value", clip_by_value, (_LEAF,)),
    Operator("adaptive_gradient_clip", adaptive_gradient_clip, (_LEAF, _LEAF), (0, 1)),
    Operator("weight_decay", weight_decay, (_LEAF, _LEAF), (0, 1)),
    Operator("decoupled_weight_decay", decoupled_weight_decay, (_LEAF, f32()), (0, 1)),
    Operator("ema", ema, (_LEAF, _LEAF), (0, 1)),
    Operator("debiased_ema", debiased_ema, (_LEAF, _LEAF, np.int32(3)), (0, 1)),
    Operator("gradient_accumulation", gradient_accumulation, (_LEAF, _BF16, np.int32(3)), (0, 1)),
    Operator("loss_scaling", loss_scaling, (_LEAF, np.float32(1024), np.int32(5)), (0,)),
    Operator("mixed_precision_sgd", mixed_precision_sgd, (_LEAF, _BF16), (0, 1)),
    Operator("warmup_cosine_rate", warmup_cosine_rate, (np.int32(7),), (), "no gradient: a function of an integer"),
)  # fmt: skip
