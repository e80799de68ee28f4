"""Programs of other libraries as a loss and its arguments: one training step of each on one device and sharded.

A program is what `make()` returns: a loss that calls a library's own model, unchanged, and its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from tests.foreign import harness

PLANS = ("fsdp:8", "dp:2 fsdp:2 tp:2")
# Relative. Sums in another order differ by this much in networks of some tens of layers. Chosen, not measured.
TOLERANCE = 1e-4
# A leaf whose norm is below this fraction of the global norm is compared relative to the global norm: the gradient of a
# scale between two batch norms is 0 up to rounding. Chosen, not measured.
NEGLIGIBLE = 1e-5


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to train for one step.

    Args:
        loss: `loss(params, *batch)` returns the loss, or a pair of the loss and other results.
        params: a pytree; its floating-point arrays are trained.
        batch: the other arguments.
        optimizer: the optimizer.
        plans: requested plans; others than the usual ones if it has no axis for these.
        tolerance: relative; a larger one if the program amplifies rounding of its inputs more than others.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    optimizer: optax.GradientTransformationExtraArgs | optax.GradientTransformation = optax.sgd(0.1, momentum=0.9)
    plans: Sequence[str] = PLANS
    tolerance: float = TOLERANCE


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of one step: `{path: array}` of its gradients, and of its state, loss and other results.

    Args:
        grads: the gradients.
        others: the other results.
        share: the fraction of the state's bytes that one device holds.
    """

    grads: harness.Arrays
    others: harness.Arrays
    share: float


def run(program: Program, plan: str | None = None) -> Step:
    """Runs one step, on one device or under a plan."""
    from autoshard import auto_shard

    optimizer = optax.with_extra_args_support(program.optimizer)

    def loss_fn(params: Any, *batch: Any) -> tuple[Any, Any]:
        out = program.loss(params, *batch)
        return out if isinstance(out, tuple) else (out, None)

    def train_step(state: Any, *batch: Any) -> Any:
        params, opt_state = state
        (loss, aux), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(params, *batch)
        trained = eqx.filter(params, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, trained, value=loss)
        return (eqx.apply_updates(params, updates), opt_state), loss, aux, grads

    step = eqx.filter_jit(train_step) if plan is None else auto_shard(train_step, plan=plan)
    state = (program.params, optimizer.init(eqx.filter(program.params, eqx.is_inexact_array)))
    state, loss, aux, grads = step(state, *program.batch)
    leaves = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    share = sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)
    others = {"params": state[0], "opt_state": state[1], "loss": loss, "aux": aux}
    return Step(harness.arrays(grads), harness.arrays(others), share)


def errors(reference: harness.Arrays, other: harness.Arrays) -> dict[str, float]:
    """Returns the relative error of each leaf, as in `harness.differences`.

    The error of integers that differ is 1; that of numbers of which only one is finite is infinite, and so is that of
    a number that is not one."""
    assert reference.keys() == other.keys(), reference.keys() ^ other.keys()
    real = {path for path, x in reference.items() if np.issubdtype(x.dtype, np.floating)}
    whole = float(np.sqrt(sum(np.sum(np.square(reference[path][np.isfinite(reference[path])])) for path in real)))
    found = {}
    for path, a in reference.items():
        b = other[path]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if path not in real:
            found[path] = float(not np.array_equal(a, b))
            continue
        finite = np.isfinite(a)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=False) or not np.isfinite(b[finite]).all():
            found[path] = np.inf
            continue
        a, b = a[finite], b[finite]
        norm = float(np.linalg.norm(a))
        found[path] = float(np.linalg.norm(a - b)) / max(norm if norm >= NEGLIGIBLE * whole else whole, 1e-300)
    return found


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Returns an array of normally distributed numbers."""
    return jax.numpy.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def integers(limit: int, *shape: int, seed: int = 0) -> jax.Array:
    """Returns an array of integers from 0 to below `limit`."""
    return jax.numpy.asarray(np.random.default_rng(seed).integers(0, limit, shape), "int32")
