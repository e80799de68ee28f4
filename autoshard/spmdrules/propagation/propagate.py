"""Propagation: finds the shardings of a function's results, and its reshards, from the shardings of its arguments.

Each operator's rule decides where it needs its operands and where it leaves its results (`conflict_resolution`). The
walks over the program are in `walk`, loops and branches in `control_flow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard._gc import paused
from autoshard._shown import shown
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, to_partition_spec
from autoshard.spmdrules.core.reshard import Reshard
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.propagation.input_specs import (
    InputErrors,
    PropagationError,
    is_partial,
    is_spec,
    leaf_paths,
    leaves_for,
    mesh_sizes,
    needs_function,
    placement_of,
)
from autoshard.spmdrules.propagation.walk import Walk

__all__ = ["Propagation", "PropagationError", "Reshard", "propagate"]


@shown
@dataclass(frozen=True)
class Propagation:
    """The result of `propagate`.

    Attributes:
        in_specs: shaped like the arguments: the given or chosen spec of each. If all uses of an argument agree on
            another spec, it is that spec.
        out_specs: shaped like the results: the spec of each.
        out_partial: shaped like the results: `{mesh axis: operation}` of each.
        reshards: the reshards in program order.
        unknown: primitives without a rule -> the source lines that use them. They are replicated.
    """

    in_specs: Any
    out_specs: Any
    out_partial: Any
    reshards: tuple[Reshard, ...]
    unknown: dict[str, list[str]]

    @property
    def bytes_moved(self) -> float:
        """Bytes that each device sends in total."""
        return sum(r.bytes_moved * r.times for r in self.reshards)


def propagate(
    fn: Any, *args: Any, in_specs: Any, mesh: Any, in_partial: Any = None, out_specs: Any = None
) -> Propagation:
    """Runs the rules over a function. Needs only the names and sizes of mesh axes, no devices.

    Args:
        fn: any traceable function.
        *args: its arguments, pytrees of arrays or `ShapeDtypeStruct`s.
        in_specs: shaped like `args`: a `PartitionSpec` for each leaf or subtree; None means choose, `P()` means
            replicated. A mesh axis that does not divide its dimension is left out.
        mesh: `{axis: size}`, a `Mesh` or an `AbstractMesh`.
        in_partial: shaped like `args`: `{mesh axis: operation}` for each argument that is partial.
        out_specs: shaped like the results: the requested spec of each, with partials reduced; None leaves a result
            where it is.

    Returns:
        Specs, partials and reshards. Conflicts never raise: the choice that moves the fewest bytes is taken.

    Raises:
        PropagationError: specs, partials or the mesh are wrong; the message lists every error.
        TypeError: `fn` is not callable, or JAX cannot trace an argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
        >>> found = propagate(jnp.matmul, x, w, in_specs=(P("data", "model"), None), mesh={"data": 2, "model": 4})
        >>> found.in_specs[1] == P("model"), found.out_specs == P("data"), found.out_partial
        (True, True, {'model': 'sum'})
    """
    needs_function("propagate", fn)
    sizes = mesh_sizes(mesh)
    errors = InputErrors(getattr(fn, "__name__", type(fn).__name__))
    specs = leaves_for(in_specs, args, is_spec, "in_specs", errors)
    partials = leaves_for(in_partial, args, is_partial, "in_partial", errors)
    errors.raise_any()
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_without_sharding, args))
    requested = leaves_for(out_specs, results, is_spec, "out_specs", errors)
    with paused():
        program = build(closed)
        inputs = [
            placement_of(spec, partial, program.avals[v], sizes, f"argument {path}", errors)
            for v, spec, partial, path in zip(program.inputs, specs, partials, leaf_paths(args), strict=True)
        ]
        result_placements = [
            placement_of(spec, None, program.avals[v], sizes, f"result {path or 0}", errors)
            for v, spec, path in zip(program.outputs, requested, leaf_paths(results), strict=True)
        ]
        goals = [
            None if spec is None else placement.spec
            for spec, placement in zip(requested, result_placements, strict=True)
        ]
        errors.raise_any()
        walk = Walk(program, sizes, inputs, {v for v, spec in zip(program.inputs, specs, strict=True) if spec is None})
        outs = walk.run(goals)
    in_tree, out_tree = jax.tree.structure(args), jax.tree.structure(results)
    final_specs = [_spec_as_given(spec, walk.corrected_spec(v)) for v, spec in zip(program.inputs, specs, strict=True)]
    return Propagation(
        in_tree.unflatten(final_specs),
        out_tree.unflatten([to_partition_spec(p.spec) for p in outs]),
        out_tree.unflatten([dict(p.partial) for p in outs]),
        tuple(walk.reshards),
        {name: list(lines) for name, lines in program.unknown.items()},
    )


def _without_sharding(x: Any) -> Any:
    """Replaces an array by its shape and type, without its sharding."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))


def _spec_as_given(given: PartitionSpec | None, found: Spec) -> PartitionSpec:
    """Returns the given spec as the caller wrote it if it equals the found one, else the found one."""
    same = given is not None and len(given) <= len(found) and from_partition_spec(given, len(found)) == found
    return given if same and given is not None else to_partition_spec(found)
