"""Read a saved train state whose guard had other settings, which a resumed run may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.ckpt import Checkpointer
from autoshard.train.step.guard import kept_guard
from autoshard.train.step.train_state import Program, TrainState

_PART = "guard/"


def restore_state(
    checkpoints: Checkpointer, like: TrainState, program: Program, config: Mapping[str, Any], step: int | None = None
) -> TrainState:
    """Read a state. If the guard's part has other leaves or shapes, only its counts are kept.

    Args:
        checkpoints: Where the state was saved.
        like: Shapes, dtypes and shardings of the state.
        program: Its model and optimizer.
        config: The config to compare with the saved one.
        step: The step; None for the newest intact one.

    Raises:
        CheckpointError: No step is intact, or the step is of another model.
    """
    leaves = checkpoints.describe(step).leaves
    saved = {leaf.name.removeprefix(_PART): leaf for leaf in leaves if leaf.name.startswith(_PART)}
    wanted = like.guard or {}
    if saved.keys() == wanted.keys() and all(tuple(saved[name].shape) == wanted[name].shape for name in saved):
        return checkpoints.restore(step, like, config=config)
    # On the devices of the step counter, which is on all of them.
    read = {
        name: jax.ShapeDtypeStruct(tuple(leaf.shape), jnp.dtype(leaf.dtype), sharding=like.step.sharding)
        for name, leaf in saved.items()
    }
    state = checkpoints.restore(step, replace(like, guard=read or None), config=config)
    if like.guard is None:
        return replace(state, guard=None)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like.guard)
    first = jax.jit(program.first_guard, out_shardings=shardings)()
    return replace(state, guard=kept_guard(state.guard or {}, first))
