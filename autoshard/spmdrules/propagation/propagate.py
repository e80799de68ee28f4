"""Propagation: where everything in a function is, once its arguments have their shardings.

Every operator takes its operands where its rule can use them and leaves its results where its rule says (`settle`).
A carry is a fixed point, branches meet, calls are walked through (`walk`, `control`).
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
)
from autoshard.spmdrules.propagation.input_specs import placement_of as given_place
from autoshard.spmdrules.propagation.walk import Walk

__all__ = ["Propagation", "PropagationError", "Reshard", "propagate"]


@shown
@dataclass(frozen=True)
class Propagation:
    """What `propagate` finds.

    Attributes:
        in_specs: shaped like the arguments: what was given or chosen, and where every use of an argument wants it
            elsewhere, that.
        out_specs: shaped like the results.
        out_partial: shaped like the results: for each `{mesh axis: operation}`.
        reshards: in program order.
        unknown: primitives without a rule, and the lines they stand on. They are replicated.
    """

    in_specs: Any
    out_specs: Any
    out_partial: Any
    reshards: tuple[Reshard, ...]
    unknown: dict[str, list[str]]

    @property
    def bytes_moved(self) -> float:
        """Bytes that each device sends in all."""
        return sum(r.bytes_moved * r.times for r in self.reshards)


def propagate(
    fn: Any, *args: Any, in_specs: Any, mesh: Any, in_partial: Any = None, out_specs: Any = None
) -> Propagation:
    """Runs the rules over a function. Needs names and sizes of mesh axes only, no devices.

    Args:
        fn: any traceable function.
        *args: its arguments, pytrees of arrays or `ShapeDtypeStruct`s.
        in_specs: shaped like `args`: for each leaf (or subtree) a `PartitionSpec`; None means choose, `P()` is
            replicated. A mesh axis that does not divide its dimension is left out.
        mesh: `{axis: size}`, a `Mesh` or an `AbstractMesh`.
        in_partial: shaped like `args`: `{mesh axis: operation}` where an argument is partial.
        out_specs: shaped like the results: where they are wanted, whole; None means wherever they are.

    Returns:
        Specs, partials and reshards. Conflicts never raise: the choice that moves the fewest bytes is taken.

    Raises:
        PropagationError: specs, partials or the mesh are wrong; it lists everything that is.
        TypeError: `fn` is no function, or an argument nothing that JAX can trace.

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
    faults = InputErrors(getattr(fn, "__name__", type(fn).__name__))
    specs = leaves_for(in_specs, args, is_spec, "in_specs", faults)
    partials = leaves_for(in_partial, args, is_partial, "in_partial", faults)
    faults.raise_any()
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_without_sharding, args))
    wanted = leaves_for(out_specs, results, is_spec, "out_specs", faults)
    with paused():
        program = build(closed)
        inputs = [
            given_place(spec, partial, program.avals[v], sizes, f"argument {path}", faults)
            for v, spec, partial, path in zip(program.inputs, specs, partials, leaf_paths(args), strict=True)
        ]
        ends = [
            given_place(spec, None, program.avals[v], sizes, f"result {path or 0}", faults)
            for v, spec, path in zip(program.outputs, wanted, leaf_paths(results), strict=True)
        ]
        goals = [None if spec is None else end.spec for spec, end in zip(wanted, ends, strict=True)]
        faults.raise_any()
        walk = Walk(program, sizes, inputs, {v for v, spec in zip(program.inputs, specs, strict=True) if spec is None})
        outs = walk.run(goals)
    in_tree, out_tree = jax.tree.structure(args), jax.tree.structure(results)
    return Propagation(
        in_tree.unflatten(
            [_spec_as_given(spec, walk.corrected(v)) for v, spec in zip(program.inputs, specs, strict=True)]
        ),
        out_tree.unflatten([to_partition_spec(p.spec) for p in outs]),
        out_tree.unflatten([dict(p.partial) for p in outs]),
        tuple(walk.reshards),
        {name: list(lines) for name, lines in program.unknown.items()},
    )


def _without_sharding(x: Any) -> Any:
    """An array as its shape and type, whatever its sharding is."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))


def _spec_as_given(given: PartitionSpec | None, found: Spec) -> PartitionSpec:
    """The spec as the caller wrote it, where it still holds."""
    same = given is not None and len(given) <= len(found) and from_partition_spec(given, len(found)) == found
    return given if same and given is not None else to_partition_spec(found)
