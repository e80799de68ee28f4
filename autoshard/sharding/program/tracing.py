"""Traces a user's function once: its jaxpr, its pytrees and paths, and which of its arguments are state.

Results that are state (see `state_matching`) get the shardings of their inputs, so that a step can be called with what
it returned.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard._tracebacks import call_users, users_line
from autoshard.errors import AutoshardError
from autoshard.kernels.block_choice import BlockRules, under_rules
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.sharding.program.argument_names import argument_names, arguments_text, named_path
from autoshard.sharding.program.host_memory import mixed_memory_error
from autoshard.sharding.program.kernel_records import KernelRecord, KernelWord
from autoshard.sharding.program.state_matching import StateMismatch, match
from autoshard.sharding.program.static_leaves import has_hidden, hide_static, reveal_static
from autoshard.spmdrules.ir.program import Program, build

# True while a planned function is traced. Decorated modules inside it then add no shardings of their own.
OUTER_PLAN: ContextVar[bool] = ContextVar("OUTER_PLAN", default=False)


@shown
@dataclass(eq=False)
class Traced:
    """A function and its trace.

    Attributes:
        name: the function's name, for messages.
        closed: the closed jaxpr over flat inputs.
        in_tree: pytree structure of `(args, kwargs)`, with `StaticLeaf`s.
        out_tree: pytree structure of the results, with `StaticLeaf`s.
        in_paths: key path of each input leaf, joined by `/`: `0/layers/wq`.
        out_paths: key path of each result leaf.
        in_avals: shape, dtype and memory space of each input leaf.
        out_avals: shape, dtype and memory space of each result leaf.
        state: pairs (input leaf, output leaf) of the state.
        owners: for each input leaf the index of its argument; -1 for keyword arguments.
        donated: input leaves whose buffers the results may reuse.
        donated_keywords: the names of donated keyword arguments.
        donated_arguments: indices of the arguments that the user donates by number: they are meant to be state.
        annotated: input leaf -> the `PartitionSpec` with which the module that owns it is annotated.
        flags: the JAX settings at the time of the trace (`trace_flags`).
        state_like: pairs (input leaf, output leaf) of results that have the same leaves as an argument, but are not its
            updated value, such as gradients or a second moment.
        mismatches: arguments that the function returns with some leaves changed.
        user_names: what JAX's errors call the function and its input leaves, see `_compat.user_names`.
        arguments: the names of the function's positional parameters.
        explicit_mesh: the user's abstract mesh with Explicit axes; None without one. Results are put on such a mesh.
        untyped: JAX's message, if the types of a program for this mesh do not agree. The program is then planned as
            without Explicit axes.
        result_specs: result leaf -> the sharding in its type, a `PartitionSpec` that names Explicit axes. Results that
            have the type of the argument whose leaves they have are not among them.
        static_numbers: whether Python numbers are static leaves.
        offloaded: word of `offload=` -> bytes that the planner moves to the host in one step, before sharding; empty
            for the program as the user wrote it.
        kernels: what `kernels=` found in the program, replaced or left.
        kernels_word: the word of `kernels=` with which the program was rewritten.
        block_rules: what decides about the block sizes of its kernels; None for the defaults.
        microbatches: the number of parts of the batch over which the planner accumulates; 1 if it does not.
        stages: the number of stages of its pipeline; 1 if it has none.
        stage_layers: the number of layers of each of its stages, in the order of the layers; empty if it has none.
        unstaged_layers: the places of the stacks of layers that are on no stage of its pipeline.
        schedule: the word of the pipeline's schedule; empty if it has none.
        stage_bytes: the bytes of a stage's input and of its residuals, for one microbatch; empty if it has none.
        replicas: the number of groups of rows whose sums are added after the loop over microbatches.
        own_sums: the operators, with their lines, that take the sums of each microbatch in place of those of the batch.
        batch: where the batch is, if it is known before the analysis: an input leaf, its dimension, the place among
            the logical axes of this dimension, and the number of rows.
        input_roles: the role of each input leaf, if it is known before the analysis: a step that was cut into
            microbatches has the roles of the whole step. Empty if it is not known.
        spread_updates: whether each device updates only some of the matrices (`rewrite.updates`).
        moved_inputs: input leaves that the user's program has in device memory and the planner in host memory.
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
    donated_keywords: frozenset[str]
    donated_arguments: frozenset[int]
    annotated: dict[int, Any]
    flags: tuple[Any, ...]
    state_like: list[tuple[int, int]]
    mismatches: list[StateMismatch]
    user_names: Any
    arguments: tuple[str, ...] = ()
    explicit_mesh: Any = None
    untyped: str = ""
    result_specs: Mapping[int, Any] = field(default_factory=dict)
    static_numbers: bool = False
    offloaded: Mapping[str, float] = field(default_factory=dict)
    moved_inputs: frozenset[int] = frozenset()
    kernels: tuple[KernelRecord, ...] = ()
    kernels_word: KernelWord = "off"
    block_rules: BlockRules | None = None
    microbatches: int = 1
    replicas: int = 1
    stages: int = 1
    stage_layers: tuple[int, ...] = ()
    unstaged_layers: tuple[str, ...] = ()
    schedule: str = ""
    stage_bytes: tuple[int, ...] = ()
    own_sums: tuple[str, ...] = ()
    batch: tuple[int, int, int, int] | None = None
    input_roles: tuple[str, ...] = ()
    spread_updates: bool = False

    @cached_property
    def program(self) -> Program:
        """The program of numbered values, after dead code elimination."""
        return build(_compat.dce(self.closed))

    def jit_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as positional ones for `jax.jit`, because with shardings it takes no keyword arguments.

        Keyword arguments are one mapping after the positional arguments, and a second one if some are donated.
        """
        if not kwargs:
            return args
        if not self.donated_keywords:
            return (*args, kwargs)
        kept = {name: x for name, x in kwargs.items() if name not in self.donated_keywords}
        return (*args, kept, {name: kwargs[name] for name in kwargs if name in self.donated_keywords})

    @cached_property
    def in_names(self) -> list[str]:
        """The path of each input leaf with the name of its argument: `state/layers/wq`."""
        return [named_path(path, self.arguments) for path in self.in_paths]

    @cached_property
    def static_results(self) -> bool:
        """Whether the results have static leaves."""
        return has_hidden(jax.tree.unflatten(self.out_tree, self.out_avals))

    @cached_property
    def static_arguments(self) -> bool:
        """Whether the arguments have static leaves."""
        return has_hidden(jax.tree.unflatten(self.in_tree, self.in_avals))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of paths, shapes, dtypes and memory kinds. A plan is valid for functions with its fingerprint."""
        text = repr([(p, a.shape, str(a.dtype)) for p, a in zip(self.in_paths, self.in_avals, strict=True)])
        text += repr([(a.shape, str(a.dtype)) for a in self.out_avals])
        if on_host := [i for i, a in enumerate((*self.in_avals, *self.out_avals)) if _compat.is_on_host(a)]:
            text += f"on the host: {on_host}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TRACE_FLAGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "threefry_partitionable",
)


# What JAX raises where the types of a program over Explicit axes do not agree.
_TYPE_ERRORS = (
    _compat.ShardingTypeError,  # the operands of an operator
    TypeError,  # branches, or the carry of a loop
    NotImplementedError,  # an operator, such as `ragged_dot`, that has no rule for Explicit axes in JAX
)


# What JAX raises where a program needs the value of an array while it is traced.
_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def trace_flags() -> tuple[Any, ...]:
    """The values of the JAX settings that change the result of a trace."""
    return (*(getattr(jax.config, f"jax_{name}") for name in TRACE_FLAGS), *_compat.upgrade_flags())


def abstract(tree: Any) -> Any:
    """Replaces each array of a pytree by its shape, dtype, weak type and memory; Python numbers stay as they are."""

    def abstract_leaf(x: Any) -> Any:
        if isinstance(x, (bool, int, float, complex)) or not hasattr(x, "shape"):
            return x
        if isinstance(x, (np.ndarray, np.generic)):
            x = jax.eval_shape(lambda: jax.numpy.asarray(x)) if x.dtype in (np.int64, np.float64, np.uint64) else x
        return _compat.abstract_array(x.shape, x.dtype, bool(getattr(x, "weak_type", False)), _compat.is_on_host(x))

    return jax.tree.map(abstract_leaf, tree)


def path_of(keys: Sequence[Any]) -> str:
    """A key path as text, `0/layers/wq`, without the trailing `value` of an nnx variable."""
    keys = list(keys)
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name in ("value", "raw_value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def name_of(fn: Any) -> str:
    """The name of a function in messages; for a `functools.partial`, that of the underlying function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate_argnums: Sequence[int] = (),
    donate_argnames: Collection[str] = (),
    input_paths: list[str] | None = None,
    annotations: Sequence[Any] = (),
    static_numbers: bool = False,
    arguments: Sequence[str] | None = None,
    donate_from: int | None = None,
    machine: Planned | None = None,
    block_rules: BlockRules | None = None,
) -> Traced:
    """Traces `fn(*args, **kwargs)` from shapes alone.

    Args:
        fn: the function, over pytrees.
        args: pytrees of arrays or `ShapeDtypeStruct`s, with `StaticLeaf`s in place of other leaves.
        kwargs: keyword arguments of the same types.
        donate_argnums: indices of arguments whose buffers the results may reuse.
        donate_argnames: names of keyword arguments whose buffers the results may reuse.
        input_paths: paths of the input leaves, if their key paths are not meaningful.
        annotations: for each input leaf the `PartitionSpec` with which its module is annotated, or None.
        static_numbers: whether Python numbers among the results are static.
        arguments: names of the positional arguments; by default, those of the function's parameters.
        donate_from: if given, the positional arguments from this index on are donated as well. Keyword arguments are
            donated, too, if all arguments before the index are given by position; otherwise one of those may be among
            them.
        machine: the machine to trace for, which decides between kernels; by default the platform of JAX's default
            backend.
        block_rules: what decides about the block sizes of kernels; None for the defaults.
    """
    name = name_of(fn)
    shapes = abstract((args, kwargs))
    flat, in_tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = [path_of(k[1:]) for k, _ in flat]
    out: list[Any] = []

    def run(*leaves: Any) -> Any:
        a, k = reveal_static(jax.tree.unflatten(in_tree, leaves))
        what = f"auto_shard({name}): result"
        results = hide_static(call_users(fn, a, k), what, static_numbers, of_results=True)
        result, tree = jax.tree.flatten(results)
        out.append(tree)
        return result

    names = _compat.user_names(fn, shapes[0], shapes[1], input_paths)

    def traced_with(mesh: Any) -> tuple[Any, Any, Any, dict[int, Any]]:
        """The closed jaxpr, the shapes of its arguments and results, and with a mesh the results' types."""
        given = [shape for _, shape in flat]
        if mesh is not None:
            given = [_compat.typed_argument(*each, mesh) for each in zip(given, arrays, strict=True)]
        axes = _compat.auto_axes() if mesh is None else _compat.explicit_axes(mesh)
        with axes, _compat.classic_scans(), planned_for(machine), under_rules(block_rules):
            made, shapes_of_results = jax.make_jaxpr(_compat.with_names(run, names), return_shape=True)(*given)
        made = _compat.classic(made)
        if mesh is None:
            return made, given, shapes_of_results, {}
        return _compat.with_constraints(made, mesh), given, shapes_of_results, _compat.typed_results(made)

    def traced_once() -> tuple[Any, str]:
        """Return the results of `traced_with`, and JAX's message if the types do not agree and are not used."""
        try:
            return traced_with(mesh), ""
        except _TYPE_ERRORS as error:
            if mesh is not None:
                # If it is traced without types, a program that requests shardings raises ValueError.
                with contextlib.suppress(*_TYPE_ERRORS, ValueError):
                    return traced_with(None), str(error).strip().split("\n")[0]
            raise

    arrays = jax.tree.leaves((args, kwargs))
    mesh = _compat.explicit_mesh(arrays)
    token = OUTER_PLAN.set(True)
    try:
        (closed, typed, out_shapes, result_specs), untyped = traced_once()
    except _VALUE_ERRORS as error:
        at = f" at {line}" if (line := users_line(error)) else ""
        error.add_note(
            f"auto_shard({name}): the program needs a value{at} before it runs. Shapes, Python branches and loops must "
            "not depend on values of arrays: use jnp.where, jax.lax.cond, jax.lax.while_loop, or size= of jnp.nonzero "
            "and jnp.unique"
        )
        raise
    except Exception as error:
        shown = [named_path(path, arguments or argument_names(fn)) for path in input_paths or keys]
        given = dict(zip(shown, (x for _, x in flat), strict=True))
        if isinstance(error, ValueError) and (mixed := mixed_memory_error(name, error, given)):
            raise mixed from error
        if not isinstance(error, AutoshardError):
            error.add_note(f"auto_shard({name}): the function was called with {arguments_text(given) or 'no arrays'}")
        raise
    finally:
        OUTER_PLAN.reset(token)
    out_keys = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(out[-1], out_shapes))[0]
    owners = [i for i, a in enumerate(shapes[0]) for _ in jax.tree.leaves(a)] + [-1 for _ in jax.tree.leaves(shapes[1])]
    keywords = frozenset(kwargs) if _is_from(donate_from, len(args)) else frozenset(kwargs) & frozenset(donate_argnames)
    in_avals = [v.aval for v in _compat.open_jaxpr(closed).invars]
    leaves_of: dict[int, dict[tuple[str, ...], int]] = {}
    for i, (owner, (k, _)) in enumerate(zip(owners, flat, strict=True)):
        if owner >= 0:
            leaves_of.setdefault(owner, {})[tuple(map(str, k[2:]))] = i
    found = match(leaves_of, in_avals, [k for k, _ in out_keys], out_shapes, frozenset(donate_argnums))
    # `input_paths` is given for nnx objects. Calling them may add and drop leaves (sown values), which does not count
    # as a mismatch.
    mismatches = [d for d in found.mismatches if input_paths is None or d.same_paths]
    return Traced(
        name=name,
        closed=closed,
        in_tree=in_tree,
        out_tree=out[-1],
        in_paths=input_paths or keys,
        out_paths=[path_of(k) for k, _ in out_keys],
        in_avals=in_avals,
        out_avals=[v.aval for v in _compat.open_jaxpr(closed).outvars],
        state=found.state,
        owners=owners,
        donated=frozenset(
            i
            for i, owner in enumerate(owners)
            if (flat[i][0][1].key in keywords if owner < 0 else owner in donate_argnums or _is_from(donate_from, owner))
        ),
        donated_keywords=keywords,
        donated_arguments=frozenset(donate_argnums),
        annotated={i: spec for i, spec in enumerate(annotations) if spec is not None},
        flags=trace_flags(),
        state_like=found.state_like,
        mismatches=mismatches,
        user_names=names,
        arguments=argument_names(fn) if arguments is None else tuple(arguments),
        explicit_mesh=mesh,
        untyped=untyped,
        block_rules=block_rules,
        result_specs=_compat.changed_types(result_specs, typed, [*found.state, *found.state_like]),
        static_numbers=static_numbers,
    )


def _is_from(first: int | None, index: int) -> bool:
    return first is not None and index >= first
