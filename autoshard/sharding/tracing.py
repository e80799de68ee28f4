"""A user's function traced once: its jaxpr, the trees and paths around it, and what of it is state.

State is an argument that comes back: a part of the results whose leaves have the same relative paths, shapes and
dtypes. Its results are stored as its inputs are, so that a step can be called on what it returned.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autoshard import _compat
from autoshard.errors import AutoshardError
from autoshard.spmdrules.program import Program, build

# Set while a planned function is traced: the decorated modules in it leave all decisions to its plan.
OUTER_PLAN: ContextVar[bool] = ContextVar("OUTER_PLAN", default=False)


class StateChangedError(AutoshardError):
    """A donated state that does not come back as it went in."""


@dataclass(eq=False)
class Traced:
    """A function and its trace.

    Attributes:
        name: the function's name, for messages.
        closed: the closed jaxpr over flat inputs.
        in_tree: tree of `(args, kwargs)`.
        out_tree: tree of the results.
        in_paths: `/`-joined key path of each input leaf, `0/layers/wq`.
        out_paths: the same for the results.
        in_avals: shape and dtype of each input leaf.
        out_avals: the same for the results.
        state: pairs (input leaf, output leaf) of what comes back.
        owners: the number of the argument that each input leaf belongs to, -1 for keywords.
        donated: input leaves whose buffers the results may take.
        written: input leaf -> the `PartitionSpec` that its owner wrote on it.
        flags: JAX's settings under which it was traced.
        alike: pairs (input leaf, output leaf) of results that have the leaves of an argument that came back already.
    """

    name: str
    closed: Any
    in_tree: Any
    out_tree: Any
    in_paths: list[str]
    out_paths: list[str]
    in_avals: list[Any]
    out_avals: list[Any]
    state: list[tuple[int, int]]
    owners: list[int]
    donated: frozenset[int]
    written: dict[int, Any]
    flags: tuple[Any, ...]
    alike: list[tuple[int, int]]

    @cached_property
    def program(self) -> Program:
        """The program of numbered values, without what nobody uses."""
        return build(_compat.dce(self.closed))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of structure, shapes and dtypes: what a plan must fit."""
        text = repr([(p, a.shape, str(a.dtype)) for p, a in zip(self.in_paths, self.in_avals, strict=True)])
        text += repr([(a.shape, str(a.dtype)) for a in self.out_avals])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TRACE_FLAGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "threefry_partitionable",
)


def trace_flags() -> tuple[Any, ...]:
    """JAX's settings that change what a trace means."""
    return tuple(getattr(jax.config, f"jax_{name}") for name in TRACE_FLAGS)


def abstract(tree: Any) -> Any:
    """A pytree with every array turned into its shape, dtype and weak type; Python numbers stay."""

    def one(x: Any) -> Any:
        if isinstance(x, (bool, int, float, complex)) or not hasattr(x, "shape"):
            return x
        if isinstance(x, (np.ndarray, np.generic)):
            x = jax.eval_shape(lambda: jax.numpy.asarray(x)) if x.dtype in (np.int64, np.float64, np.uint64) else x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))

    return jax.tree.map(one, tree)


def path_of(keys: Sequence[Any]) -> str:
    """A key path as text, `0/layers/wq`; the `value` of an nnx variable is left out."""
    keys = list(keys)
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name in ("value", "raw_value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def name_of(fn: Any) -> str:
    """What messages call a function; a partial one is called like the function that it is made of."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate_argnums: Sequence[int] = (),
    input_paths: list[str] | None = None,
    written: Sequence[Any] = (),
) -> Traced:
    """Traces `fn(*args, **kwargs)` from shapes alone.

    Args:
        fn: the function, over pytrees of arrays.
        args: arrays or `ShapeDtypeStruct` pytrees.
        kwargs: the same by keyword.
        donate_argnums: arguments whose buffers the results may take.
        input_paths: names of the input leaves, where their key paths would say nothing.
        written: the `PartitionSpec` written on each input leaf by its owner, or None.

    Raises:
        StateChangedError: a donated argument comes back with other shapes or dtypes.
    """
    name = name_of(fn)
    shapes = abstract((args, kwargs))
    flat, in_tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = [path_of(k[1:]) for k, _ in flat]
    out: list[Any] = []

    def run(*leaves: Any) -> Any:
        a, k = jax.tree.unflatten(in_tree, leaves)
        result, tree = jax.tree.flatten(fn(*a, **k))
        out.append(tree)
        return result

    token = OUTER_PLAN.set(True)
    try:
        with _compat.auto_axes():
            closed, out_shapes = jax.make_jaxpr(run, return_shape=True)(*(leaf for _, leaf in flat))
    finally:
        OUTER_PLAN.reset(token)
    out_keys = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(out[-1], out_shapes))[0]
    owners = [i for i, a in enumerate(shapes[0]) for _ in jax.tree.leaves(a)] + [-1 for _ in jax.tree.leaves(shapes[1])]
    in_avals = [v.aval for v in _compat.open_jaxpr(closed).invars]
    relative = [tuple(map(str, k[2:])) for k, _ in flat]
    state, alike = _match_state(
        name, owners, relative, in_avals, [k for k, _ in out_keys], out_shapes, frozenset(donate_argnums)
    )
    donated = frozenset(i for i, owner in enumerate(owners) if owner in donate_argnums)
    return Traced(name, closed, in_tree, out[-1], input_paths or keys, [path_of(k) for k, _ in out_keys], in_avals,
                  list(out_shapes), state, owners, donated,
                  {i: spec for i, spec in enumerate(written) if spec is not None}, trace_flags(), alike)  # fmt: skip


def _match_state(
    name: str,
    owners: list[int],
    relative: list[tuple[str, ...]],
    avals: list[Any],
    out_keys: list[Any],
    out_avals: list[Any],
    donated: frozenset[int],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs each argument with the part of the results that has the same leaves, each part used once."""
    parts: dict[tuple[str, ...], dict[tuple[str, ...], int]] = {}
    for n, keys in enumerate(out_keys):
        words = tuple(map(str, keys))
        for depth in range(min(3, len(words)) + 1):
            parts.setdefault(words[:depth], {})[words[depth:]] = n
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for owner in sorted(set(owners)):
        leaves = {relative[i]: i for i, o in enumerate(owners) if o == owner}
        if owner < 0:
            continue
        fits = [part for part in parts.values() if part.keys() == leaves.keys() and not used & set(part.values())]
        if len(leaves) == 1 and owner not in donated:  # a lone array: an activation, unless it stands where it stood
            fits = [part for part in fits if len(out_keys) > 1 and _stands_at(out_keys[min(part.values())], owner)]
        same = [p for p in fits if all(_same(avals[leaves[k]], out_avals[p[k]]) for k in leaves)]
        if same:
            pairs += [(leaves[k], same[0][k]) for k in leaves]
            used |= set(same[0].values())
        elif owner in donated and fits and len(leaves) > 1:
            _complain(name, owner, leaves, fits[0], avals, out_avals)
    return pairs, _match_alike(owners, relative, avals, out_avals, parts, used)


def _match_alike(
    owners: list[int],
    relative: list[tuple[str, ...]],
    avals: list[Any],
    out_avals: list[Any],
    parts: dict[tuple[str, ...], dict[tuple[str, ...], int]],
    used: set[int],
) -> list[tuple[int, int]]:
    """Pairs what is left of the results with arguments that have the same leaves: both moments of an optimizer."""
    pairs: list[tuple[int, int]] = []
    for owner in sorted(set(owners) - {-1}):
        leaves = {relative[i]: i for i, o in enumerate(owners) if o == owner}
        for part in parts.values():
            if len(leaves) > 1 and part.keys() == leaves.keys() and not used & set(part.values()):
                if all(_same(avals[leaves[k]], out_avals[part[k]]) for k in leaves):
                    pairs += [(leaves[k], part[k]) for k in leaves]
                    used |= set(part.values())
    return pairs


def _stands_at(keys: Any, owner: int) -> bool:
    return len(keys) > 0 and getattr(keys[0], "idx", None) == owner


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _complain(name: str, owner: int, leaves: dict, part: dict, avals: list[Any], out_avals: list[Any]) -> None:
    changed = [
        f"'{'/'.join(k).translate(str.maketrans('', '', chr(39) + '[].'))}' from {avals[i].str_short()} to "
        f"{out_avals[part[k]].dtype.name}{list(out_avals[part[k]].shape)}"
        for k, i in leaves.items()
        if not _same(avals[i], out_avals[part[k]])
    ]
    raise StateChangedError(
        f"auto_shard({name}): argument {owner} is donated, but comes back changed: {'; '.join(changed[:5])}"
        f"{' ...' if len(changed) > 5 else ''}. A step must return its state with the shapes and dtypes it took."
    )
