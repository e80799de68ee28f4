"""What a caller of `propagate` says: trees matched to arrays and checked, all faults told at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.errors import AutoshardError
from autoshard.spmdrules.place import Place, Spec, from_partition_spec
from autoshard.spmdrules.rule import POSITIONS, REDUCTIONS

PARTIALS = tuple(op for op in REDUCTIONS if op not in POSITIONS)


class PropagationError(AutoshardError):
    """Specs, partials or a mesh that say nothing sensible; the message lists every fault."""


@dataclass
class Faults:
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


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis names and sizes of a `Mesh`, an `AbstractMesh` or a dict."""
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(sizes, Mapping) or not all(isinstance(n, int) and n > 0 for n in sizes.values()):
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


def leaves_for(given: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, faults: Faults) -> list[Any]:
    """For each leaf of `tree` what `given` says of it; one entry may stand for a whole subtree."""
    count = jax.tree.structure(tree).num_leaves
    found: list[Any] = []

    def spread(entry: Any, subtree: Any) -> None:
        if not is_leaf(entry):
            raise ValueError(f"{entry!r} is neither")
        found.extend([entry] * jax.tree.structure(subtree).num_leaves)

    try:
        jax.tree.map(spread, given, tree, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()
        faults.add(
            f"{name} does not match the tree it describes: {reason[0] if reason else 'another structure'}. Give one "
            f"entry for each leaf, or one for a whole subtree; the tree is {jax.tree.structure(tree)}"
        )
        return [None] * count
    return found


def leaf_paths(tree: Any) -> list[str]:
    """The `/`-joined path of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def place_of(
    spec: PartitionSpec | None,
    partial: Mapping[str, str] | None,
    aval: Any,
    mesh: Mapping[str, int],
    where: str,
    faults: Faults,
) -> Place:
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
    terms = {**{a: "sum" for a in getattr(spec, "unreduced", None) or ()}, **(partial or {})}
    entries: Spec = from_partition_spec(spec or (), rank)
    used = [axis for dim in entries for axis in dim]
    what = f"{where} ({aval.str_short() if hasattr(aval, 'str_short') else tuple(aval.shape)})"
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
        if axis in used:
            faults.add(f"{what}: partial over '{axis}', which shards the same array. Use another axis, or drop one.")
    if len(faults.found) > told:
        return Place(((),) * rank)
    return Place(_that_divide(entries, aval.shape, mesh), tuple(sorted(terms.items())))


def _that_divide(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec:
    kept = []
    for axes, size in zip(spec, shape, strict=True):
        count = next(k for k in range(len(axes), -1, -1) if size % math.prod(mesh[a] for a in axes[:k]) == 0)
        kept.append(axes[:count])
    return tuple(kept)
