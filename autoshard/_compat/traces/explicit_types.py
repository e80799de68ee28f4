"""Programs for meshes with Explicit axes: traced with the shardings in their types, then written without types.

Under Explicit axes, the type of each value includes its sharding. A program requests shardings with
`jax.sharding.reshard`, with `out_sharding=`, and by the shardings of its arguments. `with_constraints` replaces these
requests by sharding constraints over Auto axes, and removes the shardings from all types. Shardings that JAX derives
from types are not requests: those in backward passes, and those of broadcasts and iotas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard._compat.jaxprs import ONE_JAXPR_TYPE, is_jaxpr, is_recomputed, is_transposed, open_jaxpr
from autoshard._compat.memory_spaces import is_on_host
from autoshard._compat.meshes import under_trace, with_axis_types

ShardingTypeError = core.ShardingTypeError

_REQUESTED = ("out_sharding", "dst_sharding")  # parameters with the sharding that a program requests of a result
_DERIVED = ("broadcast_in_dim", "iota")  # operators whose `sharding` JAX derives from types
_MOVES = ("reshard", "sharding_constraint")
_CASTS = ("mesh_cast",)


def explicit_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """Returns the mesh with Explicit axes for which a program is traced; None if there is none, or under a trace.

    It is the current mesh if that has Explicit axes, otherwise the first such mesh of the arrays in `leaves`.
    """
    if under_trace():
        return None
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [s.mesh for x in leaves if isinstance(s := getattr(x, "sharding", None), NamedSharding)]
    found = next((mesh for mesh in meshes if not mesh.empty and AxisType.Explicit in mesh.axis_types), None)
    return None if found is None else found.abstract_mesh


@contextlib.contextmanager
def explicit_axes(mesh: AbstractMesh) -> Iterator[None]:
    """Sets the current mesh of a trace to one with Explicit axes."""
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def typed_argument(shape: Any, array: Any, mesh: AbstractMesh) -> Any:
    """Returns the shape of an array with its sharding over the Explicit axes of the mesh, for `jax.make_jaxpr`.

    Args:
        shape: the shape and dtype of the array, or a Python number.
        array: the array. An array on another mesh counts as replicated over the Explicit axes.
        mesh: the mesh.
    """
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.abstract_mesh != mesh or is_on_host(shape):
        return shape
    spec = PartitionSpec(*(_of_explicit_axes(entry, mesh) for entry in sharding.spec))
    placed = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=placed)


def with_constraints(closed: Any, mesh: AbstractMesh) -> Any:
    """Rewrites a closed jaxpr that was traced for Explicit axes: for Auto axes, with sharding constraints.

    Args:
        closed: the result of `jax.make_jaxpr`.
        mesh: the mesh with Explicit axes.
    """
    with jax.sharding.use_abstract_mesh(_without_explicit(mesh)):
        return _Untyping(mesh).jaxpr(closed, backward=False)


def typed_results(closed: Any) -> dict[int, PartitionSpec]:
    """Returns the specs in the types of a closed jaxpr's results, by index; those without a mesh axis are left out."""
    avals = (getattr(atom, "aval", None) for atom in open_jaxpr(closed).outvars)
    specs = {i: aval.sharding.spec for i, aval in enumerate(avals) if isinstance(aval, core.ShapedArray)}
    return {i: spec for i, spec in specs.items() if any(entry is not None for entry in spec)}


def changed_types(
    results: Mapping[int, PartitionSpec], arguments: Sequence[Any], state: Iterable[tuple[int, int]]
) -> dict[int, PartitionSpec]:
    """Returns the shardings in the types of results, except for state that has the sharding of its argument.

    Args:
        results: index of a result -> the sharding in its type, as returned by `typed_results`.
        arguments: the shapes of the arguments, as returned by `typed_argument`.
        state: pairs (argument, result) of the leaves of state.
    """
    found = dict(results)
    for i, o in state:
        own = getattr(arguments[i], "sharding", None)
        if o in found and isinstance(own, NamedSharding) and _same_spec(own.spec, found[o]):
            del found[o]
    return found


def _same_spec(one: PartitionSpec, other: PartitionSpec) -> bool:
    longest = max(len(one), len(other))
    return [*one, *[None] * (longest - len(one))] == [*other, *[None] * (longest - len(other))]


def on_mesh(tree: Any, mesh: AbstractMesh) -> Any:
    """Returns a tree whose arrays are on meshes with the axis types of another mesh. No array is copied.

    Arrays on a mesh with other axes or sizes stay where they are.

    Args:
        tree: a pytree of arrays.
        mesh: the mesh with the new axis types; its devices do not matter.
    """
    leaves, structure = jax.tree.flatten(tree)
    moved = {i: x.sharding for i, x in enumerate(leaves) if _differs_in_types(x, mesh)}
    if not moved:
        return tree
    places = [
        NamedSharding(_typed(sharding.mesh, mesh.axis_types), sharding.spec, memory_kind=sharding.memory_kind)
        for sharding in moved.values()
    ]
    for i, x in zip(moved, jax.device_put([leaves[i] for i in moved], places), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


_typed = functools.lru_cache(maxsize=16)(with_axis_types)  # each call of a planned function needs the same mesh


def _differs_in_types(x: Any, mesh: AbstractMesh) -> bool:
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return False
    own = x.sharding.mesh
    return own.axis_types != mesh.axis_types and own.shape == mesh.shape


def _of_explicit_axes(entry: Any, mesh: AbstractMesh) -> Any:
    """The Explicit axes of an entry of a `PartitionSpec`."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry
    found = tuple(a for a in ((names,) if isinstance(names, str) else names) if types[a] is AxisType.Explicit)
    return found or None


def _without_explicit(mesh: Any) -> Any:
    """The mesh with Auto axes in place of Explicit ones. Manual axes, those of `shard_map`, stay."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    return with_axis_types(mesh, types)


class _Untyping:
    """Removes shardings from the types of jaxprs. Each one is rewritten once in and once outside backward passes."""

    def __init__(self, mesh: AbstractMesh):
        self.auto = _without_explicit(mesh)
        # If no Explicit axis shards a dimension, the planner may shard it over the Auto axes.
        self.free = PartitionSpec.UNCONSTRAINED if AxisType.Auto in mesh.axis_types else None
        self.done: dict[tuple[int, bool], tuple[Any, Any]] = {}  # as in `classic_operators`
        self.variables: dict[Any, Any] = {}
        self.contexts: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, closed: Any, backward: bool) -> Any:
        key = id(closed), backward
        if key not in self.done:
            self.done[key] = closed, self._untyped(closed, backward)
        return self.done[key][1]

    def _untyped(self, closed: Any, backward: bool) -> Any:
        jaxpr = open_jaxpr(closed)
        same: dict[Any, Any] = {}  # a result that equals an operand -> the operand
        eqns = [new for eqn in jaxpr.eqns for new in self._equation(eqn, same, backward)]
        written = jaxpr.replace(
            constvars=[self.variable(v) for v in jaxpr.constvars],
            invars=[self.variable(v) for v in jaxpr.invars],
            outvars=[self.read(same, v) for v in jaxpr.outvars],
            eqns=eqns,
            debug_info=jaxpr.debug_info,
            **({"consts": jaxpr.consts} if ONE_JAXPR_TYPE else {}),
        )
        return written if ONE_JAXPR_TYPE or jaxpr is closed else closed.replace(jaxpr=written)

    def aval(self, aval: Any) -> Any:
        if not isinstance(aval, core.ShapedArray):
            return aval
        mesh = _without_explicit(aval.sharding.mesh)
        return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim)))

    def variable(self, var: Any) -> Any:
        if var not in self.variables:
            self.variables[var] = type(var)(self.aval(var.aval))
        return self.variables[var]

    def read(self, same: dict[Any, Any], atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return core.Literal(atom.val, self.aval(atom.aval))
        return same[atom] if atom in same else self.variable(atom)

    def _equation(self, eqn: Any, same: dict[Any, Any], backward: bool) -> list[Any]:
        name = eqn.primitive.name
        backward = (backward or is_transposed(eqn)) and not is_recomputed(eqn)
        invars = [self.read(same, atom) for atom in eqn.invars]
        requested = None if backward else self._requested(eqn)
        if requested is not None and name in _MOVES:
            return [self._constraint(eqn, invars[0], self.variable(eqn.outvars[0]), requested)]
        if name in (*_CASTS, *_MOVES):
            same[eqn.outvars[0]] = invars[0]
            return []
        inside = backward or bool(eqn.params.get("differentiated", False))
        params = {key: self._parameter(key, value, inside, name) for key, value in eqn.params.items()}
        outvars = [self.variable(v) for v in eqn.outvars]
        new = eqn.replace(invars=invars, outvars=outvars, params=params, ctx=self._context(eqn.ctx))
        if requested is None:
            return [new]
        raw = core.gensym()(outvars[0].aval)
        return [new.replace(outvars=[raw]), self._constraint(eqn, raw, outvars[0], requested)]

    def _requested(self, eqn: Any) -> PartitionSpec | None:
        """The spec that the program requests of the result of an operator, over Explicit axes."""
        keys = _REQUESTED if eqn.primitive.name in _DERIVED else (*_REQUESTED, "sharding")
        sharding = next((eqn.params[key] for key in keys if eqn.params.get(key) is not None), None)
        if not isinstance(sharding, NamedSharding) or len(eqn.outvars) != 1:
            return None
        if getattr(sharding.spec, "unreduced", None):  # a sum that a later request reduces
            return None
        entries = [*sharding.spec, *[None] * (eqn.outvars[0].aval.ndim - len(sharding.spec))]
        return PartitionSpec(*(self.free if entry is None else entry for entry in entries))

    def _constraint(self, eqn: Any, operand: Any, result: Any, spec: PartitionSpec) -> Any:
        """A sharding constraint with the source line of an equation."""
        context = self._context(eqn.ctx)
        with context.manager:
            mesh = jax.sharding.get_abstract_mesh()
            wanted = NamedSharding(self.auto if mesh.empty else mesh, spec)
            traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, wanted))(operand.aval)
        (made,) = open_jaxpr(traced).eqns
        return made.replace(invars=[operand], outvars=[result], source_info=eqn.source_info, ctx=context)

    def _parameter(self, key: str, value: Any, backward: bool, name: str) -> Any:
        if is_jaxpr(value):
            return self.jaxpr(value, backward)
        if isinstance(value, (AbstractMesh, Mesh)):
            return _without_explicit(value)
        if isinstance(value, NamedSharding):
            typed = key in (*_REQUESTED, "sharding") and name not in _MOVES
            return None if typed else value.update(mesh=_without_explicit(value.mesh))
        if type(value) in (tuple, list):
            return type(value)(self._parameter(key, each, backward, name) for each in value)
        return value

    def _context(self, context: Any) -> Any:
        """The context of an equation, with Auto axes."""
        if id(context) not in self.contexts:
            with context.manager:
                mesh = _without_explicit(jax.sharding.get_abstract_mesh())
                with jax.sharding.use_abstract_mesh(mesh):
                    self.contexts[id(context)] = context, core.JaxprEqnContext()
        return self.contexts[id(context)][1]
