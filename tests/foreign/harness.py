"""Runs a foreign program on one device and sharded, and compares the results.

A program is a module that does not mention autoshard. Its `make()` returns `(step, state, batches)`: a train step, the
tuple of its state arguments and a list of tuples of its batch arguments. If `state` is one pytree, `step(*state,
*batch)` returns `(new state, loss)`. If it is nnx objects, the step updates them in place and returns the loss. The
program's `grad_fn` takes the same arguments and returns the gradients. Its `jit`, if it has one, is used in place of
`jax.jit` on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Arrays = dict[str, np.ndarray]
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

TOLERANCE = 1e-5  # relative; chosen, not measured
# A leaf whose norm is below this fraction of the global norm is noise, such as the gradient of a bias before a norm: it
# is compared relative to the global norm. Chosen, not measured.
NEGLIGIBLE = 1e-6


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a run, and how its state was distributed.

    Args:
        losses: the loss of each step.
        state: the state after the last step, `{path: array}`; for nnx objects their variables.
        grads: the first batch's gradients from the initial state.
        last_grads: the first batch's gradients from the state after the last step.
        devices: how many devices hold the final state.
        share: the fraction of the state's bytes that one device holds, from 1 / devices to 1.
    """

    losses: list[float]
    state: Arrays
    grads: Arrays
    last_grads: Arrays
    devices: int
    share: float


def run_single(program: ModuleType, steps: int) -> Result:
    """Runs a program as its author would, on one device, under `nnx.jit`, `jax.jit` or its own `jit`."""
    return run(program, steps, jit_of(program))


def jit_of(program: ModuleType) -> Transform:
    """Returns the transformation under which a program runs on one device."""
    return nnx.jit if is_nnx(program) else getattr(program, "jit", jax.jit)


def run_sharded(program: ModuleType, steps: int, **options: Any) -> Result:
    """Runs a program under `auto_shard(step, **options)`, otherwise unchanged."""
    from autoshard import auto_shard

    return run(program, steps, lambda fn: auto_shard(fn, **options))


def is_nnx(program: ModuleType) -> bool:
    """Returns whether a program's state is nnx objects, which it updates in place."""
    return isinstance(program.make()[1][0], nnx.Module)


def run(program: ModuleType, steps: int, transform: Transform, place: Callable[..., Any] | None = None) -> Result:
    """Runs a program's step `steps` times and its `grad_fn` before and after, each under `transform`.

    Args:
        program: the module.
        steps: number of steps; the batches repeat in order.
        transform: applied to both functions, such as `jax.jit`.
        place: if given, `place(state, batches)` places both on devices first.
    """
    in_place = is_nnx(program)
    _, state, batches = _made(program, place)
    grad_fn = transform(program.grad_fn)
    grads = arrays(grad_fn(*state, *batches[0]))
    # Start again: computing gradients may have updated batch statistics and random streams.
    step, state, batches = _made(program, place)
    step = transform(step)
    losses = []
    for index in range(steps):
        out = step(*state, *batches[index % len(batches)])
        if in_place:
            losses.append(float(out))
        else:
            state, loss = (out[0],), out[1]
            losses.append(float(loss))
    leaves = [x for x in jax.tree.leaves(_tree(state)) if isinstance(x, jax.Array)]
    total = sum(x.nbytes for x in leaves)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    devices = len(set().union(*(x.sharding.device_set for x in leaves)))
    final = arrays(state)
    last_grads = arrays(grad_fn(*state, *batches[0]))
    return Result(losses, final, grads, last_grads, devices, held / total)


def _made(program: ModuleType, place: Callable[..., Any] | None) -> tuple[Any, Any, Any]:
    step, state, batches = program.make()
    if place is not None:
        state, batches = place(state, batches)
    return step, state, batches


def _tree(state: Any) -> Any:
    """Converts nnx objects in `state` to trees of arrays, with each shared variable once."""
    if isinstance(state, tuple) and any(isinstance(x, nnx.Module) for x in state):
        return tuple(nnx.to_pure_dict(nnx.state(x)) for x in state)
    return nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state


def arrays(tree: Any) -> Arrays:
    """Converts a tree to `{path: array}`: floating-point leaves as float64, counters and random keys as integers.

    Leaves that are not arrays or numbers are left out.
    """
    found = {}
    for path, leaf in jax.tree.leaves_with_path(_tree(tree)):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        value = np.asarray(leaf)
        if value.dtype.kind in "OSU":
            continue
        if np.issubdtype(value.dtype, np.floating):
            value = value.astype(np.float64)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = value
    return found


def compare(reference: Result, other: Result, *, tolerance: float = TOLERANCE, state: bool = True) -> None:
    """Compares two results.

    Args:
        reference: the result on one device.
        other: the result to check.
        tolerance: for losses, and for each leaf of gradients and state as defined in `differences`.
        state: whether to compare final states and their gradients. False for adaptive optimizers if a leaf has no true
            gradient: they turn its rounding noise into steps of full size.

    Raises:
        AssertionError: if there are differences beyond the tolerance; the message lists all of them.
    """
    found = []
    pairs = zip(reference.losses, other.losses, strict=True)
    for step, (a, b) in enumerate(pairs):
        if not abs(a - b) <= tolerance * max(1.0, abs(a)):
            found.append(f"loss of step {step}: {b:.9g}, one device has {a:.9g}")
    found += [f"gradient of {text}" for text in differences(reference.grads, other.grads, tolerance)]
    if state:
        found += [f"final {text}" for text in differences(reference.state, other.state, tolerance)]
        last = differences(reference.last_grads, other.last_grads, tolerance)
        found += [f"last gradient of {text}" for text in last]
    if found:
        raise AssertionError(f"{len(found)} differences from one device:\n  " + "\n  ".join(found))


def differences(reference: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tolerance: float) -> list[str]:
    """Lists the leaves that differ, one line for each.

    A floating-point leaf is compared by the norm of the difference, relative to the leaf's norm, or to the global norm
    if the leaf is negligible. Integers must be equal.
    """
    found = [f"{path}: only in one of the results" for path in sorted(reference.keys() ^ other.keys())]
    real = [path for path in reference if np.issubdtype(reference[path].dtype, np.floating)]
    whole = float(np.sqrt(sum(np.sum(np.square(reference[path])) for path in real)))
    for path in sorted(reference.keys() & other.keys()):
        a, b = reference[path], other[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{path}: {b.dtype}{list(b.shape)}, one device has {a.dtype}{list(a.shape)}")
        elif path not in real:
            if not np.array_equal(a, b):
                found.append(f"{path}: {b.ravel()[:4]}, one device has {a.ravel()[:4]}")
        else:
            norm = float(np.linalg.norm(a))
            scale = norm if norm >= NEGLIGIBLE * whole else whole
            error = float(np.linalg.norm(a - b))
            if not error <= tolerance * scale:
                ratio = np.linalg.norm(b) / norm if norm else np.inf
                found.append(f"{path}: {error / max(scale, 1e-300):.2e} off (norm {norm:.4g}, {ratio:.6g} times it)")
    return found
