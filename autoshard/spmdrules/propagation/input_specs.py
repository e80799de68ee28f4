"""What a caller of `propagate` says: trees matched to arrays and checked, all faults told at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard.errors import AutoshardError
from autoshard.spmdrules.core.placement import Placement, Spec, from_partition_spec, names_axes
from autoshard.spmdrules.core.rule import POSITIONS, REDUCTIONS

PARTIALS = tuple(op for op in REDUCTIONS if op not in POSITIONS)


class PropagationError(AutoshardError):
    """Specs, partials or a mesh that say nothing sensible; the message lists every fault."""


@dataclass
class InputErrors:
    """Faults of one call, collected to be told together."""

    where: str
    found: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Adds one."""
        self.found.append(text)

    def raise_any(self) -> None:
        """Raises all of them as one error.

        Raises:
            PropagationError: there are some.
        """
        if self.found:
            head = f"propagate({self.where}): "
            lines = self.found if len(self.found) == 1 else [f"{len(self.found)} faults", *self.found]
            raise PropagationError(head + "\n  ".join(lines))


def needs_function(what: str, fn: Any) -> None:
    """Says that `what` is about a function, where it was given something else.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"{what} takes a function and then its arguments, {what}(fn, x, y); the first is {fn!r:.80}")


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis names and sizes of a `Mesh`, an `AbstractMesh` or a dict."""
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if (
        not isinstance(sizes, Mapping)
        or not all(isinstance(n, int) and n > 0 for n in sizes.values())
        or not all(isinstance(axis, str) for axis in sizes)
    ):
        raise PropagationError(
            "mesh must be axis names with sizes, such as {'data': 4, 'model': 2}, a Mesh or an AbstractMesh; "
            f"got {mesh!r}"
        )
    return dict(sizes)


def is_spec(value: Any) -> bool:
    """Whether a value stands for one array's spec: a `PartitionSpec`, or None for 'choose'."""
    return value is None or isinstance(value, PartitionSpec)


def is_partial(value: Any) -> bool:
    """Whether a value stands for one array's partials: `{mesh axis: operation}`, or None."""
    return value is None or isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())


_NOT_A_LEAF: dict[Callable[[Any], bool], str] = {
    is_spec: "no spec. Write P('data') for an array's dimensions, None to let it be chosen.",
    is_partial: "nothing that is partial. Write {mesh axis: operation}, such as {'data': 'sum'}, or None.",
}
_ADVICE: dict[Callable[[Any], bool], str] = {
    is_spec: "Give one PartitionSpec or None for each array, or one for a whole subtree.",
    is_partial: "Give one {mesh axis: operation} or None for each array, or one for a whole subtree.",
}


def leaves_for(given: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, faults: InputErrors) -> list[Any]:
    """For each leaf of `tree` what `given` says of it; one entry may stand for a whole subtree."""
    found: list[Any] = []
    told = len(faults.found)
    _match(given, tree, is_leaf, name, "", found, faults)
    return found if told == len(faults.found) else [None] * jax.tree.structure(tree).num_leaves


def _match(
    given: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, path: str, found: list[Any], faults: InputErrors
) -> None:
    """Adds to `found` what `given` says of each leaf of `tree`, to `faults` where they have another structure."""
    where = f"{name} does not match the tree" + (f" at {path}" if path else "")
    if is_leaf(given):
        found.extend([given] * jax.tree.structure(tree).num_leaves)
        return
    mine, own = _children(given), _children(tree)
    if mine is None:
        faults.add(f"{where}: {given!r} is {_NOT_A_LEAF[is_leaf]}")
    elif own is None:
        faults.add(f"{where}: {given!r} stands where the arguments or results have one array. {_ADVICE[is_leaf]}")
    elif type(given) is not type(tree):
        faults.add(f"{where}: {_describe_node(given)} stands where there is {_describe_node(tree)}. {_ADVICE[is_leaf]}")
    elif list(mine) != list(own):
        faults.add(f"{where}: {_key_difference(given, mine, own)}. {_ADVICE[is_leaf]}")
    else:
        for key, entry in mine.items():
            _match(entry, own[key], is_leaf, name, f"{path}/{key}".lstrip("/"), found, faults)


def _children(tree: Any) -> dict[str, Any] | None:
    """The children of a pytree's outermost node by their keys; None of a leaf."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if any(not path for path, _ in pairs):
        return None
    return {jax.tree_util.keystr(path, simple=True, separator="/"): child for path, child in pairs}


def _key_difference(given: Any, mine: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """How the keys of what was given differ from those of the tree."""
    if isinstance(given, (tuple, list)):
        return f"it has {len(mine)} entries, there are {len(own)}"
    missing, unknown = [k for k in own if k not in mine], [k for k in mine if k not in own]
    said = [f"it lacks {', '.join(missing)}"] * bool(missing) + [f"there is no {', '.join(unknown)}"] * bool(unknown)
    return " and ".join(said) or "its entries have another order"


def _describe_node(tree: Any) -> str:
    return f"a {type(tree).__name__} of {len(_children(tree) or ())}"


def leaf_paths(tree: Any) -> list[str]:
    """The `/`-joined path of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def placement_of(
    spec: PartitionSpec | None,
    partial: Mapping[str, str] | None,
    aval: Any,
    mesh: Mapping[str, int],
    where: str,
    faults: InputErrors,
) -> Placement:
    """The place that a spec and partials mean, axes that do not divide their dimension left out.

    Args:
        spec: what the caller said; None is replicated, for the moment.
        partial: the same.
        aval: the array's shape and dtype.
        mesh: mesh axis -> size.
        where: the array, for messages.
        faults: takes what is wrong.
    """
    rank = len(aval.shape)
    what = f"{where} ({aval.str_short() if hasattr(aval, 'str_short') else tuple(aval.shape)})"
    if strange := [e for e in getattr(spec, "partitions", ()) if not names_axes(e)]:
        faults.add(f"{what}: {spec} holds {strange[0]!r}, which is no name of a mesh axis, nor a tuple of names.")
        return Placement(((),) * rank)
    terms = {**{a: "sum" for a in getattr(spec, "unreduced", None) or ()}, **(partial or {})}
    entries: Spec = from_partition_spec(() if spec is None else spec, rank)
    used = [axis for dim in entries for axis in dim]
    told = len(faults.found)
    if len(entries) > rank:
        faults.add(f"{what}: {spec} has {len(entries)} entries, the array has {rank} dimensions. Drop the last ones.")
    for axis in dict.fromkeys([*used, *terms]):
        if axis not in mesh:
            faults.add(f"{what}: there is no mesh axis '{axis}'. The mesh has {', '.join(map(repr, mesh)) or 'none'}.")
    for axis in dict.fromkeys(a for a in used if used.count(a) > 1):
        faults.add(f"{what}: {spec} uses mesh axis '{axis}' twice. Keep it on one dimension.")
    for axis, op in terms.items():
        if op not in PARTIALS:
            faults.add(f"{what}: unknown reduction '{op}' over '{axis}'. Known: {', '.join(PARTIALS)}.")
        elif not _can_reduce(op, aval.dtype):
            faults.add(f"{what}: '{op}' over '{axis}' is no reduction of {aval.dtype} terms.")
        if axis in used:
            faults.add(f"{what}: partial over '{axis}', which shards the same array. Use another axis, or drop one.")
    if len(faults.found) > told:
        return Placement(((),) * rank)
    return Placement(_drop_indivisible(entries, aval.shape, mesh), tuple(sorted(terms.items())))


def _can_reduce(op: str, dtype: Any) -> bool:
    """Whether terms of a type can be reduced by an operation."""
    if op in ("and", "or", "xor"):
        return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    return op in ("max", "min") or dtype != jnp.bool_


def _drop_indivisible(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec:
    kept = []
    for axes, size in zip(spec, shape, strict=True):
        count = next(k for k in range(len(axes), -1, -1) if size % math.prod(mesh[a] for a in axes[:k]) == 0)
        kept.append(axes[:count])
    return tuple(kept)
