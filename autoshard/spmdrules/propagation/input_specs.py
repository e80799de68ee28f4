"""Checks the arguments of `propagate`: matches trees of specs to arrays, and reports all errors at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.spmdrules.core.placement import Placement, Spec, from_partition_spec, is_spec_entry
from autoshard.spmdrules.core.rule import POSITIONS, REDUCTIONS

PARTIALS = tuple(op for op in REDUCTIONS if op not in POSITIONS)


class PropagationError(AutoshardError):
    """The specs, partials or mesh are invalid; the message lists every error."""


@shown
@dataclass
class InputErrors:
    """The errors of one call, collected so that they can be reported together.

    Attributes:
        where: the name of the function that is propagated.
        found: the messages so far.
    """

    where: str
    found: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Adds an error."""
        self.found.append(message)

    def raise_any(self) -> None:
        """Raises all errors as one.

        Raises:
            PropagationError: there is at least one.
        """
        if self.found:
            head = f"propagate({self.where}): "
            lines = self.found if len(self.found) == 1 else [f"{len(self.found)} errors", *self.found]
            raise PropagationError(head + "\n  ".join(lines))


def needs_function(what: str, fn: Any) -> None:
    """Checks that the first argument of `what` is a function.

    Raises:
        TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(
            f"{what} takes a function followed by its arguments, as in {what}(fn, x, y), but got {fn!r:.80} first"
        )


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Returns axis name -> size of a `Mesh`, an `AbstractMesh` or a dict."""
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if (
        not isinstance(sizes, Mapping)
        or not all(isinstance(n, int) and n > 0 for n in sizes.values())
        or not all(isinstance(axis, str) for axis in sizes)
    ):
        raise PropagationError(
            "mesh must be axis names with sizes, such as {'data': 4, 'model': 2}, a Mesh or an AbstractMesh, but got "
            f"{mesh!r}"
        )
    return dict(sizes)


def is_spec(value: Any) -> bool:
    """Whether a value is the spec of one array: a `PartitionSpec`, or None for 'choose'."""
    return value is None or isinstance(value, PartitionSpec)


def is_partial(value: Any) -> bool:
    """Whether a value is the partials of one array: `{mesh axis: operation}`, or None."""
    return value is None or isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())


_NOT_A_LEAF: dict[Callable[[Any], bool], str] = {
    is_spec: "not a spec. Write P('data') to shard an array, or None to let its sharding be chosen.",
    is_partial: "not a dict of partials. Write {mesh axis: operation}, such as {'data': 'sum'}, or None.",
}
_ADVICE: dict[Callable[[Any], bool], str] = {
    is_spec: "Give one PartitionSpec or None for each array, or one for a whole subtree.",
    is_partial: "Give one {mesh axis: operation} or None for each array, or one for a whole subtree.",
}


def leaves_for(given: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, errors: InputErrors) -> list[Any]:
    """Returns the entry of `given` for each leaf of `tree`; one entry may cover a whole subtree."""
    found: list[Any] = []
    before = len(errors.found)
    _match(given, tree, is_leaf, name, "", found, errors)
    return found if before == len(errors.found) else [None] * jax.tree.structure(tree).num_leaves


def _match(
    given: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, path: str, found: list[Any], errors: InputErrors
) -> None:
    """Adds the entry of `given` for each leaf of `tree` to `found`, and each difference in structure to `errors`."""
    where = f"{name} does not match the tree" + (f" at {path}" if path else "")
    if is_leaf(given):
        found.extend([given] * jax.tree.structure(tree).num_leaves)
        return
    entries, subtrees = _children(given), _children(tree)
    if entries is None:
        errors.add(f"{name}{f' at {path}' * bool(path)}: {given!r} is {_NOT_A_LEAF[is_leaf]}")
    elif subtrees is None:
        errors.add(f"{where}: got {given!r} where the arguments or results have one array. {_ADVICE[is_leaf]}")
    elif type(given) is not type(tree):
        errors.add(
            f"{where}: got {_describe_node(given)} where the tree has {_describe_node(tree)}. {_ADVICE[is_leaf]}"
        )
    elif list(entries) != list(subtrees):
        errors.add(f"{where}: {_key_difference(given, entries, subtrees)}. {_ADVICE[is_leaf]}")
    else:
        for key, entry in entries.items():
            _match(entry, subtrees[key], is_leaf, name, f"{path}/{key}".lstrip("/"), found, errors)


def _children(tree: Any) -> dict[str, Any] | None:
    """Returns the children of a pytree's outermost node by key; None for a leaf."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if any(not path for path, _ in pairs):
        return None
    return {jax.tree_util.keystr(path, simple=True, separator="/"): child for path, child in pairs}


def _key_difference(given: Any, entries: Mapping[str, Any], subtrees: Mapping[str, Any]) -> str:
    """Describes how the keys of `given` differ from those of the tree."""
    if isinstance(given, (tuple, list)):
        return f"its length is {len(entries)}, but that of the tree is {len(subtrees)}"
    missing, unknown = [k for k in subtrees if k not in entries], [k for k in entries if k not in subtrees]
    differences = [f"it lacks {', '.join(missing)}"] * bool(missing)
    differences += [f"the tree has no {', '.join(unknown)}"] * bool(unknown)
    return " and ".join(differences) or "its entries are in another order"


def _describe_node(tree: Any) -> str:
    return f"a {type(tree).__name__} of length {len(_children(tree) or ())}"


def leaf_paths(tree: Any) -> list[str]:
    """Returns the `/`-joined path of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def placement_of(
    spec: PartitionSpec | None,
    partial: Mapping[str, str] | None,
    aval: Any,
    mesh: Mapping[str, int],
    where: str,
    errors: InputErrors,
) -> Placement:
    """Returns the placement that a spec and partials describe, without axes that do not divide their dimension.

    Args:
        spec: the given spec; None is treated as replicated here.
        partial: the given partials, `{mesh axis: operation}`, or None.
        aval: the array's shape and dtype.
        mesh: mesh axis -> size.
        where: the array, for messages.
        errors: the errors of the call; this function adds its own.
    """
    rank = len(aval.shape)
    what = f"{where} ({aval.str_short() if hasattr(aval, 'str_short') else tuple(aval.shape)})"
    if strange := [e for e in getattr(spec, "partitions", ()) if not is_spec_entry(e)]:
        errors.add(
            f"{what}: {spec} has the entry {strange[0]!r}, which is not an axis name or a tuple of axis names. Write "
            "P('data') or P(('data', 'model')), for example."
        )
        return Placement(((),) * rank)
    terms = {**{a: "sum" for a in getattr(spec, "unreduced", None) or ()}, **(partial or {})}
    entries: Spec = from_partition_spec(() if spec is None else spec, rank)
    used = [axis for dim in entries for axis in dim]
    before = len(errors.found)
    if len(entries) > rank:
        errors.add(
            f"{what}: {spec} has {len(entries)} entries, but the array has rank {rank}. Remove the last entries."
        )
    for axis in dict.fromkeys([*used, *terms]):
        if axis not in mesh:
            errors.add(f"{what}: there is no mesh axis '{axis}'. The mesh has {', '.join(map(repr, mesh)) or 'none'}.")
    for axis in dict.fromkeys(a for a in used if used.count(a) > 1):
        errors.add(f"{what}: {spec} uses mesh axis '{axis}' twice. Keep it on one dimension.")
    for axis, op in terms.items():
        if op not in PARTIALS:
            errors.add(f"{what}: unknown reduction '{op}' over '{axis}'. Known reductions: {', '.join(PARTIALS)}.")
        elif not _can_reduce(op, aval.dtype):
            possible = ", ".join(other for other in PARTIALS if _can_reduce(other, aval.dtype))
            errors.add(f"{what}: '{op}' over '{axis}' cannot reduce {aval.dtype} terms. Use one of {possible}.")
        if axis in used:
            errors.add(f"{what}: it is both sharded and partial over '{axis}'. Use another mesh axis, or remove one.")
    if len(errors.found) > before:
        return Placement(((),) * rank)
    return Placement(_drop_indivisible(entries, aval.shape, mesh), tuple(sorted(terms.items())))


def _can_reduce(op: str, dtype: Any) -> bool:
    """Whether an operation can reduce terms of a type."""
    if op in ("and", "or", "xor"):
        return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    return op in ("max", "min") or dtype != jnp.bool_


def _drop_indivisible(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec:
    """Keeps, for each dimension, the longest prefix of its mesh axes that divides its size."""
    kept = []
    for axes, size in zip(spec, shape, strict=True):
        count = next(k for k in range(len(axes), -1, -1) if size % math.prod(mesh[a] for a in axes[:k]) == 0)
        kept.append(axes[:count])
    return tuple(kept)
