"""Makes the global arrays of a batch from the rows that each process loaded.

The rows of the global batch are those of process 0, then those of process 1, and so on. A device gets the rows of its
shard. If a process holds rows of another process, as when tensor parallelism spans processes, all processes exchange
their rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from autoshard.errors import PlanError
from autoshard.sharding.program.path_patterns import first_few
from autoshard.sharding.program.tracing import path_of
from autoshard.sharding.runtime.planned_signature import PlannedSignature


def shard_batch(entry: PlannedSignature, batches: Sequence[Any], name: str) -> list[Any]:
    """Make the global arrays of data arguments.

    Args:
        entry: the plan and its mesh.
        batches: this process's rows of each data argument, or of some of them, in their order.
        name: the function's name, for messages.

    Raises:
        PlanError: `batches` are not the data arguments of the plan, or their rows are not a share of the planned rows.
    """
    entry.check_target()
    made, free = [], _data_arguments(entry)
    for batch in batches:
        flat, tree = jax.tree_util.tree_flatten_with_path(batch)
        local = {path_of(keys): leaf for keys, leaf in flat}
        argument = next((one for one in free if one.keys() == local.keys()), None)
        if argument is None:
            raise PlanError(
                f"auto_shard({name}).shard_batch: {_other_batch_text(entry, free, local, type(batch).__name__)}"
            )
        free.remove(argument)
        made.append(
            jax.tree.unflatten(tree, [_global(entry, argument[path], leaf, name) for path, leaf in local.items()])
        )
    return made


def _data_arguments(entry: PlannedSignature) -> list[dict[str, int]]:
    """The arguments without parameters and state: path in the argument -> index of the input."""
    arguments: dict[str, dict[str, int]] = {}
    others = set()
    for i, leaf in enumerate(entry.plan.inputs):
        argument, _, inside = leaf.path.partition("/")
        arguments.setdefault(argument, {})[inside] = i
        if i in entry.state or leaf.role in ("parameter", "optimizer"):
            others.add(argument)
    return [inputs for argument, inputs in arguments.items() if argument not in others]


def _other_batch_text(entry: PlannedSignature, free: Sequence[dict[str, int]], local: dict[str, Any], kind: str) -> str:
    """How a batch differs from the data argument that is most like it. Shapes are checked later."""
    if not free:
        return "the plan has no further argument that is data"
    nearest = min(free, key=lambda one: len(one.keys() ^ local.keys()))
    argument = entry.traced.in_names[next(iter(nearest.values()))].partition("/")[0]
    text = f"the batch is none of the planned arguments: '{argument}' "
    if "" in nearest:
        return f"{text}is one array, but this is a {kind}. Pass one array, such as np.asarray(rows)"
    if "" in local:
        return f"{text}has the leaves {first_few(map(repr, nearest))}, but this is one array. Pass the same structure"
    different = [f"'{path}' is missing" for path in nearest if path not in local]
    different += [f"'{path}' is new" for path in local if path not in nearest]
    return f"{text}has other leaves: {first_few(different)}. Pass the same structure"


def _global(entry: PlannedSignature, index: int, leaf: Any, name: str) -> jax.Array:
    """The global array of one leaf."""
    aval, sharding, path = entry.traced.in_avals[index], entry.in_shardings[index], entry.traced.in_names[index]
    rows, processes = np.asarray(leaf), jax.process_count()
    if rows.dtype != aval.dtype:
        rows = rows.astype(aval.dtype)
    if rows.shape == aval.shape:  # the same in every process
        return jax.make_array_from_callback(aval.shape, sharding, rows.__getitem__)
    differing = [d for d in range(aval.ndim) if rows.ndim == aval.ndim and rows.shape[d] != aval.shape[d]]
    if len(differing) != 1 or rows.shape[differing[0]] * processes != aval.shape[differing[0]]:
        raise PlanError(
            f"auto_shard({name}).shard_batch: '{path}' has shape {rows.shape} in process {jax.process_index()}, but "
            f"the plan is for {aval.shape} over {processes} process{'es' * (processes > 1)}. Pass this process's share "
            "of the planned rows, and pad a smaller last batch"
        )
    dim, count = differing[0], rows.shape[differing[0]]
    start = jax.process_index() * count
    if not _holds_own_rows(sharding, aval.shape, dim, count):
        everything = multihost_utils.process_allgather(np.moveaxis(rows, dim, 0), tiled=True)
        rows, start = np.moveaxis(np.asarray(everything), 0, dim), 0

    def shard(place: Any) -> np.ndarray:
        first, stop, _ = place[dim].indices(aval.shape[dim])
        return rows[(*place[:dim], slice(first - start, stop - start), *place[dim + 1 :])]

    return jax.make_array_from_callback(aval.shape, sharding, shard)


def _holds_own_rows(sharding: NamedSharding, shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Whether each process's devices hold no rows but its own `count`. The answer is the same in every process."""
    for device, place in sharding.devices_indices_map(shape).items():
        first, stop, _ = place[dim].indices(shape[dim])
        if not device.process_index * count <= first <= stop <= (device.process_index + 1) * count:
            return False
    return True
