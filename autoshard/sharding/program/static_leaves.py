"""Static leaves: leaves of arguments and results that are neither arrays nor numbers, such as an activation function.

They are part of the structure of the tree: a `StaticLeaf`, a node without leaves, replaces each of them. Two calls have
the same plan if their static leaves are equal, in type and value. An object whose class does not define `==` equals
only itself. Python numbers are data, as under `jax.jit`. In Equinox modules, and in all arguments of
`equinox.filter_jit`, they are static.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.hidden_arrays import array_inside

_ONE_SHOT = (types.GeneratorType, map, filter, zip, enumerate)
_ASYNCHRONOUS = (types.CoroutineType, types.AsyncGeneratorType)
_GRAPH_NODES = (nnx.Pytree, nnx.Variable)  # `nnx.split` separates their data from the rest


@shown
@jax.tree_util.register_static
class StaticLeaf:
    """A static leaf, as a part of the structure of a tree.

    Attributes:
        value: the leaf.
        key: equal for leaves of equal type and value.
    """

    def __init__(self, value: Any):
        self.value, self.key = value, frozen(value, "a static leaf")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticLeaf) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


def hide_static(tree: Any, what: str, numbers: bool = False, skip: int = 0, *, of_results: bool = False,
                names: Sequence[str] = ()) -> Any:  # fmt: skip
    """Replace the static leaves of a tree by `StaticLeaf`s. Return the tree itself if it has none.

    Args:
        tree: a pytree. Objects of nnx in it are kept as they are.
        what: its name in messages.
        numbers: whether Python numbers are static.
        skip: number of keys to leave out at the start of a path in messages.
        names: the names of the function's parameters, if these are its arguments.
        of_results: whether these are the results of a function under trace.

    Raises:
        PlanError: a static leaf is not hashable, is a generator, or holds arrays that can change unseen.
    """
    module = _compat.equinox_module()
    whole = _GRAPH_NODES if module is None else (*_GRAPH_NODES, module)

    def where(leaf: Any) -> str:
        """`auto_shard(step): argument 'batch'`; without a path if the leaf is the whole tree."""
        path = named_path(_path_to(tree, leaf, skip), names)
        return f"{what} '{path}'" if path else what

    def hidden(leaf: Any, numbers: bool) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        if module is not None and isinstance(leaf, module):
            leaves, structure = jax.tree.flatten(leaf)
            inside = [hidden(x, True) for x in leaves]
            return leaf if _same(leaves, inside) else jax.tree.unflatten(structure, inside)
        if not is_static(leaf, numbers):
            return leaf
        if isinstance(leaf, _ASYNCHRONOUS):
            raise PlanError(
                f"{where(leaf)} is a {type(leaf).__name__}: the function is asynchronous. Define it "
                "with `def`, without `async`"
            )
        if isinstance(leaf, _ONE_SHOT):
            raise PlanError(
                f"{where(leaf)} is a {type(leaf).__name__}, whose items can be read only once, "
                "while the function is traced: pass a list or an array of its items"
            )
        if inside := array_inside(leaf, only_traced=of_results):
            raise _hidden_array_error(where(leaf), leaf, inside)
        try:
            return StaticLeaf(leaf)
        except PlanError:
            raise _unhashable_error(where(leaf), leaf) from None

    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, whole))
    replaced = [hidden(x, numbers) for x in leaves]
    return tree if _same(leaves, replaced) else jax.tree.unflatten(structure, replaced)


def reveal_static(tree: Any) -> Any:
    """Put the static leaves of a tree back in place of their `StaticLeaf`s."""
    return jax.tree.map(lambda x: x.value if isinstance(x, StaticLeaf) else x, tree, is_leaf=_is_hidden)


def has_hidden(tree: Any) -> bool:
    """Return whether a tree contains `StaticLeaf`s."""
    return any(map(_is_hidden, jax.tree.leaves(tree, is_leaf=_is_hidden)))


def is_static(leaf: Any, numbers: bool) -> bool:
    """Return whether a leaf is static: a value for which JAX has no type or, with `numbers`, a Python number."""
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return numbers
    if isinstance(leaf, _GRAPH_NODES):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return True
    return False


def _is_hidden(x: Any) -> bool:
    return isinstance(x, StaticLeaf)


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _path_to(tree: Any, leaf: Any, skip: int) -> str:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, _GRAPH_NODES))[0]
    keys = next((keys for keys, x in flat if x is leaf), ())
    return jax.tree_util.keystr(tuple(keys[skip:]), simple=True, separator="/")


def _hidden_array_error(where: str, leaf: Any, inside: str) -> PlanError:
    owner = leaf.__self__ if isinstance(leaf, types.MethodType) else leaf
    return PlanError(
        f"{where} is a {type(leaf).__name__}, which holds an array at {inside}: it "
        "is no pytree, so the array would be a constant of the plan. Register the class "
        f"{type(owner).__name__} as a pytree (jax.tree_util.register_dataclass), or pass the array itself"
    )


def _unhashable_error(where: str, leaf: Any) -> PlanError:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "USTO":
        kind = "Python objects" if leaf.dtype.kind == "O" else "text"
        return PlanError(
            f"{where} is {leaf!r:.60}, an array of {kind} ({leaf.dtype}), and JAX has arrays of numbers only. "
            "Remove it, convert it to numbers, or use a tuple of its items, which is static"
        )
    kind = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
    return PlanError(
        f"{where} is {leaf!r:.60}, {kind}: it is neither an array of numbers nor a number, and not hashable, "
        "so calls with different values cannot be distinguished. Remove it, give its class a __hash__, or, if it "
        "holds arrays, register its class as a pytree (jax.tree_util.register_dataclass)"
    )


def frozen(value: Any, where: str) -> Any:
    """Return a hashable key of a static value. Keys are equal if values and types are; `True`, `1` and `1.0` differ.

    Args:
        value: a hashable value, or lists, mappings, sets, linen modules and other dataclasses of such values.
        where: the value's name in messages; if it is empty, objects that are not hashable are compared by identity.

    Raises:
        PlanError: the value contains an object that is not hashable.
    """
    if isinstance(value, Mapping):
        return type(value), tuple((frozen(k, where), frozen(v, where)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(x, where) for x in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(frozen(x, where) for x in value)
    if isinstance(value, float):
        return float, value.hex()  # NaN equals itself here, and 0.0 differs from -0.0
    if isinstance(value, linen.Module) or (dataclasses.is_dataclass(value) and type(value).__hash__ is None):
        fields = [f.name for f in dataclasses.fields(value) if f.name != "parent"]
        return type(value), tuple((f, frozen(getattr(value, f, None), where)) for f in fields)
    try:
        hash(value)
    except TypeError:
        if not where:
            return type(value), id(value)
        raise PlanError(
            f"{where} contains an instance of {type(value).__name__}, which is neither an array nor hashable, so "
            "calls with different values cannot be distinguished: give its class a __hash__, or make it an array"
        ) from None
    return type(value), value
