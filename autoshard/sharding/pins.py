"""What users fix, and what programs bring along: specs that every plan keeps, or refuses by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard.sharding.axes import LogicalAxes
from autoshard.sharding.layout import Layout
from autoshard.sharding.plan import PlanError
from autoshard.sharding.tracing import Traced
from autoshard.spmdrules.given import names_axes
from autoshard.spmdrules.place import Spec, from_partition_spec
from autoshard.spmdrules.program import Op

_EITHER = (
    "give {path glob: PartitionSpec} on a named mesh, or {path glob: names of logical axes, None for what is free}, "
    "such as {'0/*/kernel': PartitionSpec(None, 'model')} or {'0/*/kernel': (None, 'ffn')}"
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


def fixed_pins(
    traced: Traced, axes: LogicalAxes, layout: Layout, fixed: Mapping[str, Any], word: str
) -> dict[int, Spec]:
    """The specs that the user fixed, by value; `word` is how messages call them.

    Raises:
        PlanError: every pattern that matches nothing and every spec that cannot hold.
    """
    pins: dict[int, Spec] = {}
    wrong = _strange(fixed, word)
    for pattern, what in () if wrong else fixed.items():
        found = [i for i, path in enumerate(traced.in_paths) if path == pattern]
        found = found or [i for i, path in enumerate(traced.in_paths) if fnmatch.fnmatchcase(path, pattern)]
        if not found:
            wrong.append(f"{word} '{pattern}' matches no input; inputs are {', '.join(traced.in_paths[:6])}, ...")
        for i in found:
            value, aval = traced.program.inputs[i], traced.in_avals[i]
            try:
                pins[value] = _fixed_spec(what, aval, f"{word} '{traced.in_paths[i]}'", layout, axes, value)
            except PlanError as error:
                wrong.append(str(error))
    if wrong:
        raise PlanError(f"auto_shard({traced.name}): " + "; ".join(wrong))
    return pins


def _strange(fixed: Any, word: str) -> list[str]:
    """What of the user's table is no path, no `PartitionSpec` and no sequence of names."""
    if not isinstance(fixed, Mapping):
        return [f"{word} is {fixed!r}; {_EITHER}"]
    pairs = [(p, w) for p, w in fixed.items() if not isinstance(p, str) or not _says_something(w)]
    return [f"{word} {pattern!r}: {what!r}; {_EITHER}" for pattern, what in pairs]


def _says_something(what: Any) -> bool:
    if isinstance(what, PartitionSpec):
        return all(map(names_axes, what.partitions))
    return isinstance(what, (tuple, list)) and all(name is None or isinstance(name, str) for name in what)


def _fixed_spec(what: Any, aval: Any, where: str, layout: Layout, axes: LogicalAxes, value: int) -> Spec:
    if not isinstance(what, PartitionSpec):
        names = {name: c for c, name in axes.names.items()}
        asked = [names.get(n) for n in what]
        if unknown := [n for n in what if n is not None and n not in names]:
            raise PlanError(f"{where} names {unknown}, which is no logical axis; there are {sorted(names)}")
        spec = layout.spec(value)
        return tuple(
            spec[d] if d < len(asked) and asked[d] is not None and asked[d] in axes.of_value[value][d] else ()
            for d in range(aval.ndim)
        )
    if len(what) > aval.ndim:
        raise PlanError(f"{where}: {what} has {len(what)} entries, the array has {aval.ndim} dimensions {aval.shape}. "
                        "Drop the last ones")  # fmt: skip
    spec = from_partition_spec(what, aval.ndim)
    flat = [a for dim in spec for a in dim]
    if unknown := [a for a in flat if a not in layout.mesh]:
        raise PlanError(f"{where}: {what} names mesh axis {unknown[0]!r}, the mesh has {dict(layout.mesh)}; "
                        "give mesh= with the names that the specs use")  # fmt: skip
    if twice := [a for a in flat if flat.count(a) > 1]:
        raise PlanError(f"{where}: {what} uses mesh axis {twice[0]!r} twice. Keep it on one dimension")
    for d, dim in enumerate(spec):
        n = layout.ways(dim)
        if aval.shape[d] % n:
            raise PlanError(f"{where} dim {d} has size {aval.shape[d]}, not divisible by mesh axes {dim} ({n}). "
                            f"Pad it to {-(-aval.shape[d] // n) * n}, or drop {dim} from its spec")  # fmt: skip
    return spec
