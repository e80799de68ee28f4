"""Run functions that create state, such as a model's init, with results that are sharded from the start."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoshard import _compat
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.lower.compiler_remarks import kept_remarks
from autoshard.sharding.program.argument_differences import differences
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.path_patterns import first_few
from autoshard.sharding.program.static_leaves import hide_static, is_static, reveal_static
from autoshard.sharding.program.tracing import Traced, name_of, path_of
from autoshard.sharding.runtime.planned_signature import PlannedSignature


def create_sharded(
    entry: PlannedSignature,
    create: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run `create(*args, **kwargs)` with its result sharded like the planned argument of the same structure.

    Results that `create` puts into host memory stay there. A warning names those that the plan has on the device.

    Raises:
        PlanError: no argument of the plan has the structure, shapes and dtypes of the result.
    """
    entry.check_target()
    leaves, tree = jax.tree.flatten((args, dict(kwargs or {})), is_leaf=lambda x: x is None)
    # The other leaves are seeds, names and settings.
    arrays = [i for i, x in enumerate(leaves) if not is_static(x, numbers=True)]

    def of_arrays(*values: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(arrays, values, strict=True):
            merged[i] = x
        a, k = jax.tree.unflatten(tree, merged)
        return create(*a, **k)

    pure, rebuild = _compat.split_graph(of_arrays)
    values = [leaves[i] for i in arrays]

    def arrays_of(*values: Any) -> Any:
        what = f"auto_shard({name}).init: result"
        return hide_static(pure(*values), what, entry.traced.static_numbers, of_results=True)

    program, shapes = jax.make_jaxpr(arrays_of, return_shape=True)(*values)  # `eval_shape` drops memory spaces
    results = jax.tree_util.tree_flatten_with_path(shapes)[0]
    made = [(tuple(keys), shape) for keys, shape in results]
    inputs = _find_arguments(entry.traced, made)
    if inputs is None:
        raise PlanError(f"auto_shard({name}).init: {_mismatch_text(entry.traced, made, create)}")
    shardings = _keeping_host_memory(entry, inputs, program.out_avals, f"auto_shard({name}).init: {name_of(create)}")
    out = jax.tree.unflatten(jax.tree.structure(shapes), shardings)
    with kept_remarks():  # it runs once, so they are left out
        return rebuild(reveal_static(jax.jit(arrays_of, out_shardings=out)(*values)))


def _keeping_host_memory(entry: PlannedSignature, inputs: list[int], made: list[Any], creator: str) -> list[Any]:
    """The planned sharding of each result, in host memory if `create` puts the result there.

    Args:
        entry: the plan.
        inputs: the planned input of each result.
        made: the avals of the results.
        creator: what made them, for the warning about results that the plan has in device memory.
    """
    shardings, paths = [entry.in_shardings[i] for i in inputs], []
    for n, (i, aval) in enumerate(zip(inputs, made, strict=True)):
        if _compat.is_on_host(aval) and not _compat.is_on_host(entry.traced.in_avals[i]):
            shardings[n] = shardings[n].with_memory_kind(_compat.HOST_KIND)
            paths.append(f"'{entry.traced.in_names[i]}'")
    if paths:
        warnings.warn(
            f"{creator} puts {first_few(paths)} into host memory, where the state stays, but the plan has it in device "
            "memory, because jax.eval_shape drops memory spaces. So the next call is planned again. Call .plan(...) "
            "with arrays, or with shapes that have a memory kind: shape.update(sharding="
            "jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind='pinned_host'))",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )
    return shardings


Leaves = list[tuple[tuple[Any, ...], Any]]  # key path and shape of each array


def _find_arguments(traced: Traced, made: Leaves) -> list[int] | None:
    """Find the inputs that have the results' paths, shapes and dtypes.

    The results are one argument, or a tuple or list of arguments: all of them, or different ones in their order.
    """
    arguments = _arguments(traced)
    for planned in arguments.values():
        if not _differences(traced, planned, made):
            return [planned[path_of(keys)] for keys, _ in made]
    found: list[int] = []
    for _, part, planned in _items(traced, made):
        if planned is None:
            return None
        found += [planned[path_of(keys)] for keys, _ in part]
    return found or None


def _items(traced: Traced, made: Leaves) -> list[tuple[str, Leaves, dict[str, int] | None]]:
    """For each item of a tuple or list of results: its path, its leaves, and the planned argument like it, if any."""
    free, found = list(_arguments(traced).values()), []
    for first, leaves in itertools.groupby(made, key=lambda leaf: leaf[0][:1]):
        part = [(keys[1:], shape) for keys, shape in leaves]
        planned = next((p for p in free if not _differences(traced, p, part)), None)
        if planned is not None:
            free.remove(planned)
        found.append((path_of(first), part, planned))
    return found


def _arguments(traced: Traced) -> dict[str, dict[str, int]]:
    """Each argument that has arrays, by number or keyword: path in it -> index of the input."""
    arguments: dict[str, dict[str, int]] = {}
    for i, path in enumerate(traced.in_paths):
        name, _, inside = path.partition("/")
        arguments.setdefault(name, {})[inside] = i
    return arguments


def _differences(traced: Traced, planned: dict[str, int], made: Leaves, name: str = "") -> list[str]:
    """How results differ from a planned argument. `name` is that of the argument, for messages."""

    def full(path: str) -> str:
        return f"{name}/{path}".strip("/")

    avals = {full(path): traced.in_avals[i] for path, i in planned.items()}
    return differences(avals, {full(path_of(keys)): shape for keys, shape in made})


def _mismatch_text(traced: Traced, made: Leaves, create: Callable[..., Any]) -> str:
    """How the results differ from the argument that is most like them."""
    creator = getattr(create, "__name__", "the function")
    text = f"{creator} returns none of the planned arguments"
    items = _items(traced, made)
    if any(planned for _, _, planned in items):
        others = first_few(f"'{path}'" for path, _, planned in items if planned is None)
        text = f"{creator} returns {len(items)} items, of which {others} is none of the planned arguments"
    elif arguments := _arguments(traced):
        nearest, planned = min(arguments.items(), key=lambda one: len(_differences(traced, one[1], made)))
        nearest = named_path(nearest, traced.arguments)
        different = _differences(traced, planned, made, nearest)
        text += f". The most similar one is '{nearest}', but {first_few(different, '; ')}"
    return f"{text}. Return an argument, or a tuple of several, with the planned structure, shapes and dtypes"
