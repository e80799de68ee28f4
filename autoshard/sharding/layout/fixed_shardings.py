"""What users fix, and what programs bring along: specs that every plan keeps, or refuses by name."""

from __future__ import annotations

import difflib
import fnmatch
import glob
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.program.path_patterns import first_few, suggestions
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, names_axes
from autoshard.spmdrules.ir.program import Op

Named = tuple[str, Layout]  # a candidate's words and its layout

_EITHER = (
    "give {path glob: PartitionSpec} on a named mesh, or {path glob: names of logical axes, None for what stays "
    "whole}, such as {'0/*/kernel': PartitionSpec(None, 'model')} or {'0/*/kernel': (None, 'ffn')}"
)


def own_specs(op: Op) -> list[NamedSharding]:
    """Every sharding that the program itself wrote on an operator: a constraint's, a nested `jit`'s."""
    params = op.eqn.params
    if op.name == "sharding_constraint":
        found = (params["sharding"],)
    elif op.name in ("jit", "pjit"):
        found = (*params["in_shardings"], *params["out_shardings"])
    else:
        found = ()
    return [s for s in found if isinstance(s, NamedSharding)]


def own_constraints(traced: Traced) -> list[tuple[Op, NamedSharding]]:
    """Every sharding that the program wrote, with its operator."""
    return [(op, sharding) for op in traced.program.ops() for sharding in own_specs(op)]


def constraint_mesh(constraints: Sequence[tuple[Op, NamedSharding]]) -> Any:
    """The mesh that the program's own sharding constraints are written for, None where there are none."""
    for _, sharding in constraints:
        if not sharding.mesh.empty and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def check_constraints(name: str, constraints: Sequence[tuple[Op, NamedSharding]], layout: Layout) -> None:
    """Checks that the program's own sharding constraints can be kept on the plan's mesh.

    Raises:
        PlanError: naming every constraint that cannot.
    """
    wrong = []
    for op, sharding in constraints:
        spec = sharding.spec
        names = [a for dim in from_partition_spec(spec, len(spec)) for a in dim]
        if missing := [a for a in names if a not in layout.mesh]:
            wrong.append(
                f"the constraint {spec} at {_compat.source_line(op.eqn)} names mesh axis {missing[0]!r}, the "
                f"plan's mesh has {dict(layout.mesh)}; give auto_shard the mesh that it was written for"
            )
    if wrong:
        raise PlanError(f"auto_shard({name}): " + "; ".join(wrong))


class NoSuchAxisError(PlanError):
    """A spec names a mesh axis that the mesh does not have."""


class FixedError(PlanError):
    """Specs that were fixed and cannot hold, or contradict each other; `complaints` has one sentence for each.

    The message has the first of them: one pattern may match hundreds of inputs. `lacks_axis` says whether one of them
    is that the mesh lacks an axis.
    """

    def __init__(self, name: str, complaints: Sequence[str], hint: str = "", lacks_axis: bool = False):
        super().__init__(f"auto_shard({name}): {first_few(complaints, '; ')}{hint}")
        self.name, self.complaints, self.lacks_axis = name, tuple(complaints), lacks_axis


def fixed_pins(
    traced: Traced, axes: LogicalAxes, layout: Layout, fixed: Mapping[str, Any], word: str
) -> dict[int, Spec]:
    """The specs that the user fixed, by value; `word` is how messages call them.

    Raises:
        FixedError: every pattern that matches nothing, every spec that cannot hold and every two that differ.
    """
    pins: dict[int, Spec] = {}
    wrong, lacks_axis = _strange(fixed, word), False
    for i, what in {} if wrong else found_inputs(traced, fixed, word, wrong).items():
        value, aval = traced.program.inputs[i], traced.in_avals[i]
        try:
            pins[value] = _fixed_spec(what, aval, f"{word} '{traced.in_paths[i]}'", layout, axes, value)
        except PlanError as error:
            wrong.append(str(error))
            lacks_axis |= isinstance(error, NoSuchAxisError)
    if wrong:
        raise FixedError(traced.name, wrong, lacks_axis=lacks_axis)
    return pins


def pin_all(layouts: Sequence[Named], pin: Callable[[Layout], None], mesh_is_given: bool) -> list[Named]:
    """Pins layouts; those on whose mesh what is fixed cannot hold are left out.

    Raises:
        FixedError: it holds on none.
    """
    kept: list[Named] = []
    failed: list[FixedError] = []
    for named in layouts:
        try:
            pin(named[1])
            kept.append(named)
        except FixedError as error:
            failed.append(error)
    if kept or not failed:
        return kept
    nearest = min(failed, key=lambda error: len(error.complaints))
    if mesh_is_given or not nearest.lacks_axis:
        raise nearest
    used = ", ".join(dict.fromkeys(a for _, layout in layouts for a in layout.mesh))
    raise FixedError(nearest.name, nearest.complaints, f". No mesh was given, and the plans tried have axes {used}")


def found_inputs(traced: Traced, fixed: Mapping[str, Any], word: str, wrong: list[str]) -> dict[int, Any]:
    """What is fixed for which input; a path of its own goes before patterns.

    Complaints are added to `wrong`: patterns that match nothing, and two that match one input and differ.
    """
    exact: dict[int, list[str]] = {}
    by_pattern: dict[int, list[str]] = {}
    for pattern in fixed:
        same = [i for i, path in enumerate(traced.in_paths) if pattern in (path, glob.escape(path))]
        found = same or [i for i, path in enumerate(traced.in_paths) if fnmatch.fnmatchcase(path, pattern)]
        if not found:
            wrong.append(f"{word} '{pattern}' matches no input. {suggestions(pattern, traced.in_paths)}")
        for i in found:
            (exact if same else by_pattern).setdefault(i, []).append(pattern)
    chosen = {i: (exact if i in exact else by_pattern)[i] for i in sorted({*exact, *by_pattern})}
    contrary: dict[tuple[str, str], list[int]] = {}
    for i, patterns in chosen.items():
        others = [p for p in patterns[1:] if _differ(fixed[patterns[0]], fixed[p], traced.in_avals[i].ndim)]
        for other in others:
            contrary.setdefault((patterns[0], other), []).append(i)
    for (one, other), some in contrary.items():
        also = f" and {len(some) - 1} more" if len(some) > 1 else ""
        path = traced.in_paths[some[0]]
        wrong.append(
            f"{word} '{one}' says {fixed[one]} and {word} '{other}' says {fixed[other]}, and both match "
            f"'{path}'{also}: drop one, or give '{path}' by its own path, which goes before patterns"
        )
    open_still = {i for some in contrary.values() for i in some}
    return {i: fixed[patterns[0]] for i, patterns in chosen.items() if i not in open_still}


def _differ(one: Any, other: Any, rank: int) -> bool:
    """Whether two specs, or two lists of names, say different things of an array of `rank` dimensions."""
    if isinstance(one, PartitionSpec) != isinstance(other, PartitionSpec):
        return True
    if isinstance(one, PartitionSpec):
        return not same_spec(one, other, rank)
    return [*one, *[None] * (rank - len(one))] != [*other, *[None] * (rank - len(other))]


def same_spec(one: PartitionSpec, other: PartitionSpec, rank: int) -> bool:
    """Whether two specs mean the same of an array of `rank` dimensions."""
    rank = max(rank, len(one), len(other))
    return from_partition_spec(one, rank) == from_partition_spec(other, rank)


def disagreements(traced: Traced, axes: LogicalAxes, pins: Mapping[int, Spec]) -> list[str]:
    """The logical axes that two pins cut over different mesh axes: both hold, and where they meet one is moved."""
    over: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    for value, path in zip(traced.program.inputs, traced.in_paths, strict=True):
        for dim, cut in zip(axes.of_value[value], pins.get(value, ()), strict=False):
            if len(dim) == 1 and cut:
                over.setdefault(dim[0], []).append((path, cut))
    notes = []
    for c, found in over.items():
        path, cut = found[0]
        other = next(((p, x) for p, x in found if x[: len(cut)] != cut[: len(x)]), None)
        if other is not None:
            notes.append(
                f"fixed '{path}' has {axes.name(c)} over {', '.join(cut)}, fixed '{other[0]}' over "
                f"{', '.join(other[1])}: both hold, and where they meet one of them is moved in every step; "
                "fix them alike to save that"
            )
    return notes


def _strange(fixed: Any, word: str) -> list[str]:
    """What of the user's table is no path, no `PartitionSpec` and no sequence of names."""
    if not isinstance(fixed, Mapping):
        return [f"{word} is {fixed!r}; {_EITHER}"]
    pairs = [(p, w) for p, w in fixed.items() if not isinstance(p, str) or not is_sharding_wish(w)]
    return [f"{word} {pattern!r}: {what!r}; {_EITHER}" for pattern, what in pairs]


def is_sharding_wish(what: Any) -> bool:
    """Whether this is a `PartitionSpec`, or names of logical axes and None."""
    if isinstance(what, PartitionSpec):
        return all(map(names_axes, what.partitions))
    return isinstance(what, (tuple, list)) and all(name is None or isinstance(name, str) for name in what)


def _fixed_spec(what: Any, aval: Any, where: str, layout: Layout, axes: LogicalAxes, value: int) -> Spec:
    if not isinstance(what, PartitionSpec):
        return _spec_of_names(what, aval, where, layout, axes, value)
    if len(what) > aval.ndim:
        raise _too_long(what, aval, where)
    spec = from_partition_spec(what, aval.ndim)
    flat = [a for dim in spec for a in dim]
    if unknown := [a for a in flat if a not in layout.mesh]:
        close = difflib.get_close_matches(unknown[0], layout.mesh, n=1)
        raise NoSuchAxisError(f"{where}: {what} names mesh axis {unknown[0]!r}, the mesh has {dict(layout.mesh)}; "
                        + (f"did you mean {close[0]!r}? Or " if close else "")
                        + "give mesh= with the names that the specs use")  # fmt: skip
    if twice := [a for a in flat if flat.count(a) > 1]:
        raise PlanError(f"{where}: {what} uses mesh axis {twice[0]!r} twice. Keep it on one dimension")
    for d, dim in enumerate(spec):
        n = layout.ways(dim)
        if aval.shape[d] % n:
            raise PlanError(f"{where} dim {d} has size {aval.shape[d]}, not divisible by mesh axes {dim} ({n}). "
                            f"Pad it to {-(-aval.shape[d] // n) * n}, or drop {dim} from its spec")  # fmt: skip
    return spec


def _spec_of_names(
    what: Sequence[str | None], aval: Any, where: str, layout: Layout, axes: LogicalAxes, value: int
) -> Spec:
    """The dimensions that are named as the layout has them, the others whole."""
    names = set(axes.names.values())
    if unknown := [n for n in what if n is not None and n not in names]:
        raise PlanError(f"{where} names {unknown}, which is no logical axis; there are {sorted(names)}")
    if len(what) > aval.ndim:
        raise _too_long(what, aval, where)
    asked = [*what, *[None] * (aval.ndim - len(what))]
    own = [[axes.name(c) for c in dim] for dim in axes.of_value[value]]
    wrong = [d for d, name in enumerate(asked) if name is not None and name not in own[d]]
    if wrong:
        others = ", ".join(f"dim {d} is {' x '.join(own[d]) or 'of size 1'}, not {asked[d]}" for d in wrong)
        raise PlanError(f"{where} says {tuple(what)}: {others}. Name what a dimension is, or None to keep it whole")
    spec = layout.spec(value)
    return tuple(() if name is None else spec[d] for d, name in enumerate(asked))


def _too_long(what: Any, aval: Any, where: str) -> PlanError:
    return PlanError(
        f"{where}: {what} has {len(what)} entries, the array has {aval.ndim} dimensions {aval.shape}. Drop the last "
        "ones"
    )
