"""Plans as JSON. Reading a plan checks the types of its fields, and that its parts do not contradict each other."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import AbstractMesh, PartitionSpec

from autoshard._typed import Readers, convert, fields_of, finite, short_repr
from autoshard.errors import PlanError
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.machines.targets import MOST_DEVICES
from autoshard.sharding.plan.search_record import PricedPlan
from autoshard.sharding.plan.sharding_plan import FORMAT, SEQUENCE_WAYS, ShardingPlan
from autoshard.sharding.plan.tensors import Leaf

_MOST_ELEMENTS = 2**62  # of one array; chosen: beyond it, sizes overflow 64 bits
_SHOWN = 3  # problems that an error message lists; chosen
_ABSENT_IF_EMPTY = (
    "offload",
    "gather",
    "overlap",
    "module_us",
    "kernels",
    "kernels_word",
    "requested_options",
    "host_limit_bytes",
    "usable_bytes",
    "kernel_blocks",
    "sequence",
    "microbatches",
    "replicas",
    "stages",
    "schedule",
    "allow_numerics",
    "spread_updates",
)  # absent from the plans of older versions
_OPTIONAL = ("padding", "arguments", *_ABSENT_IF_EMPTY)  # fields that a plan of this format may lack
_WRITTEN_IF_SET = {  # fields of arrays and estimates, with their defaults
    "memory_kind": "device",
    "host_memory_bytes": 0.0,
    "host_traffic_bytes": 0.0,
    "host_us": 0.0,
    "host_exposed_us": 0.0,
}

P = TypeVar("P", bound=ShardingPlan)
Spec = tuple[str | None | tuple[str, ...], ...]


def plan_data(plan: ShardingPlan) -> dict[str, Any]:
    """A plan as lists, tables, text and numbers. Numbers that are not finite become None: JSON has none."""
    off = ("kernels", "kernels_word") if plan.kernels_word == "off" else ()
    off += tuple(name for name in ("microbatches", "replicas", "stages") if getattr(plan, name) == 1)
    names = [name for name in _names() if name not in off and (name not in _ABSENT_IF_EMPTY or getattr(plan, name))]
    return {"format": FORMAT} | {name: _plain(getattr(plan, name)) for name in names}


def plan_json(plan: ShardingPlan) -> str:
    """See `Plan.to_json`."""
    for name, value in plan.variant.items():
        if not _in_json(value):
            raise PlanError(f"the plan's variant {name!r} is {short_repr(value)}, which JSON cannot express. Give "
                            "variants as text, finite numbers, true or false, or lists of them")  # fmt: skip
    return _lists_on_one_line(json.dumps(plan_data(plan), indent=1, default=repr))


def plan_from_json(text: str, cls: type[P]) -> P:
    """See `Plan.from_json`. The plan is an instance of `cls`."""
    try:
        data = json.loads(text)
    except TypeError:
        problem = f"{short_repr(text)} is a {type(text).__name__}. Pass the text that Plan.to_json() returned"
        raise PlanError(f"this is not a plan: {problem}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(text, str) and text.endswith(".json"):
            raise PlanError(
                f"this is not a plan: {short_repr(text)} is the name of a file. Read it first: "
                f"Plan.from_json(pathlib.Path({short_repr(text)}).read_text())"
            ) from None
        raise PlanError(f"this is not a plan: it is not JSON ({error}). Plan.to_json() writes one.") from error
    found = data.get("format") if isinstance(data, Mapping) else FORMAT
    if found is not None and found != FORMAT:
        raise PlanError(f"this plan has format {short_repr(found)}, this version reads {FORMAT}: plan again")
    problems: list[str] = []
    values = _read(data, problems)
    plan = cls(**values) if not problems else None
    problems += _contradictions(plan) if plan is not None else []
    if plan is None or problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PlanError(f"this is not a plan: {'; '.join(problems[:_SHOWN])}{more}. Plan.to_json() writes one.")
    return plan


def _names() -> list[str]:
    return [name for name in fields_of(ShardingPlan) if name not in ("audits", "measured")]


def _read(data: Any, problems: list[str]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        problems.append(f"it is {short_repr(data)}; it must be a table")
        return {}
    problems += [f"'{name}' is missing" for name in ("format", *_names()) if name not in (*data, *_OPTIONAL)]
    kinds = fields_of(ShardingPlan)
    return {name: convert(data[name], kinds[name][0], name, problems, _READERS) for name in _names() if name in data}


def _read_mesh(value: Any, where: str, problems: list[str]) -> Any:
    sizes = convert(value, Mapping[str, int], where, wrong := [])
    if not wrong and all(n > 0 for n in sizes.values()) and math.prod(sizes.values()) <= MOST_DEVICES:
        return abstract_mesh(sizes)
    problems.append(f"{where} is {short_repr(value)}; its sizes must be positive whole numbers, with at most "
                    f"{MOST_DEVICES} devices in total")  # fmt: skip
    return value


def _read_spec(value: Any, where: str, problems: list[str]) -> Any:
    entries = convert(value, Spec, where, wrong := [])
    problems += wrong
    return value if wrong else PartitionSpec(*entries)


_READERS: Readers = {float: finite, AbstractMesh: _read_mesh, PartitionSpec: _read_spec}


def _contradictions(plan: ShardingPlan) -> Iterator[str]:
    """Parts of a plan that contradict each other."""
    axes = plan.mesh.axis_names
    for leaf in (*plan.inputs, *plan.outputs, *plan.activations):
        yield from _leaf_contradictions(leaf, dict(zip(axes, plan.mesh.axis_sizes, strict=True)))
    if unknown := [way for way in plan.sequence.values() if way not in SEQUENCE_WAYS]:
        yield f"sequence has {unknown[0]!r}; it must be one of {', '.join(SEQUENCE_WAYS)}"
    named = {"axis_rules": [*plan.axis_rules], "placing": [*plan.placing], "sequence": [*plan.sequence],
             "storage": [a for some in plan.storage.values() for a in some]}  # fmt: skip
    for what, some in named.items():
        if unknown := [a for a in some if a not in axes]:
            yield f"{what} names mesh axis {unknown[0]!r}, but the mesh has {', '.join(axes)}"
    if len(plan.traffic_us) not in (0, len(plan.traffic)):
        yield f"traffic has {len(plan.traffic)} rows and traffic_us {len(plan.traffic_us)}"
    yield from _wrong_assignments(plan)


def _leaf_contradictions(leaf: Leaf, mesh: Mapping[str, int]) -> Iterator[str]:
    axes_of_dims = [() if e is None else e if isinstance(e, tuple) else (e,) for e in tuple(leaf.spec)]
    flat = [axis for dim_axes in axes_of_dims for axis in dim_axes]
    if unknown := [axis for axis in flat if axis not in mesh]:
        yield f"the spec of '{leaf.path}' names mesh axis {unknown[0]!r}, but the mesh has {', '.join(mesh)}"
    elif len(set(flat)) < len(flat):
        yield f"the spec of '{leaf.path}' names a mesh axis twice"
    if len(axes_of_dims) > len(leaf.shape) or len(leaf.axes) not in (0, len(leaf.shape)):
        yield (
            f"'{leaf.path}' has {len(leaf.shape)} dimensions, its spec {len(axes_of_dims)} entries, its axes "
            f"{len(leaf.axes)}"
        )
    if min(leaf.shape, default=0) < 0 or math.prod(leaf.shape) > _MOST_ELEMENTS:
        yield f"the shape of '{leaf.path}' is {short_repr(list(leaf.shape))}, which no array has"


def _wrong_assignments(plan: ShardingPlan) -> Iterator[str]:
    """Device assignments that are not in the topology, or that do not use each device once."""
    dims, sizes = dict(plan.topology), dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    if len(dims) < len(plan.topology) or min(dims.values(), default=1) < 1 or math.prod(dims.values()) > MOST_DEVICES:
        yield (
            f"topology is {_listed(plan.topology)}; its names must differ and its sizes be positive, with at most "
            f"{MOST_DEVICES} devices in total"
        )
    elif plan.placing:
        pieces = [piece for some in plan.placing.values() for piece in some]
        assigned = {axis: math.prod(n for _, n, _ in some) for axis, some in plan.placing.items()}
        whole = all(name in dims and n > 0 and stride > 0 for name, n, stride in pieces)
        if not whole or assigned != sizes or sorted(plan.device_order) != list(range(math.prod(dims.values()))):
            yield f"placing does not assign the mesh {sizes} to the topology {_listed(plan.topology)}"


def _listed(rows: Sequence[Any]) -> str:
    return short_repr(list(map(list, rows)))


def _plain(thing: Any) -> Any:
    if isinstance(thing, float):
        return thing if math.isfinite(thing) else None
    if isinstance(thing, AbstractMesh):
        return dict(zip(thing.axis_names, thing.axis_sizes, strict=True))
    if isinstance(thing, PartitionSpec | tuple | list):
        return [_plain(each) for each in tuple(thing)]
    if isinstance(thing, PricedPlan):  # there are many, so each is one row
        return [_plain(each) for each in vars(thing).values()]
    if dataclasses.is_dataclass(thing):
        return _plain({k: v for k, v in vars(thing).items() if k not in _WRITTEN_IF_SET or v != _WRITTEN_IF_SET[k]})
    return {key: _plain(each) for key, each in thing.items()} if isinstance(thing, Mapping) else thing


def _in_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _lists_on_one_line(text: str) -> str:
    """Indented JSON with each innermost list on one line, so that a diff of two plans can be read."""
    return re.sub(r"\[\n *([^\[\]{}]*)\n *\]", lambda row: "[" + re.sub(r"\n *", " ", row[1]) + "]", text)
