"""Dispatches a call to its planned program: selects the plan for the arguments and moves them to its shardings.

A call costs what a call under `jax.jit` costs: the last planned function is called immediately, and jit's own cache
checks the arguments. They are inspected only if that raises (another structure, shape, setting or sharding).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard._gc import paused
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import PlanError, PlanRequestError
from autoshard.kernels.block_choice import BlockRules
from autoshard.sharding.autotune.selection import requested_selection
from autoshard.sharding.lower.executable import NewSignature
from autoshard.sharding.lower.separate_arrays import SeparateArrays, is_shared_memory_error
from autoshard.sharding.machines.device_mesh import traced_machine
from autoshard.sharding.machines.kernel_rules import block_rules
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.infeasible import report_infeasible
from autoshard.sharding.planner.planning import plan_traced
from autoshard.sharding.planner.variants import Attempt, attempt, variant_rounds
from autoshard.sharding.program.argument_names import argument_names, named_path
from autoshard.sharding.program.donated_arrays import (
    donated_error,
    without_shared_memory,
)
from autoshard.sharding.program.static_leaves import hide_static, reveal_static
from autoshard.sharding.program.tracing import name_of, path_of, trace_flags
from autoshard.sharding.runtime.absent_arguments import absent_error
from autoshard.sharding.runtime.argument_types import is_placed, type_of
from autoshard.sharding.runtime.offloaded_arguments import (
    run_under_trace,
    signatures_in_other_memory,
    trace_for_offload,
)
from autoshard.sharding.runtime.planned_signature import PlannedSignature
from autoshard.sharding.runtime.static_changes import StaticChanges


class GraphArguments(Exception):
    """A plain function was called with nnx objects, so it must be called with the semantics of `nnx.jit`."""


class PureFunction:
    """A function of pytrees that plans each signature once. Leaves that are neither arrays nor numbers are static."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        donate: tuple[int, ...],
        variants: Any = None,
        filter_jit: _compat.FilterJit | None = None,
        donated_names: frozenset[str] = frozenset(),
    ):
        self.fn, self.options, self.donate, self.variants = fn, options, donate, variants
        self.donated_names = donated_names
        self.filter_jit, self.static_numbers = filter_jit, filter_jit is not None
        self.donates = bool(donate or donated_names) or (filter_jit is not None and filter_jit.donate_from is not None)
        self.has_static = self.static_numbers  # a call had static leaves
        self.takes_placement = all(options.get(k) is None for k in ("mesh", "target", "plan"))
        self.static_changes = StaticChanges(fn)
        self.separate = SeparateArrays(needed=False)
        self.arguments: tuple[str, ...] | None = None  # names of the arguments, if `fn` does not have them
        self.entries: dict[Any, PlannedSignature] = {}
        self.by_memory: dict[Any, PlannedSignature] = {}  # entries for arguments that the planner moved to the host
        self.by_placement: dict[Any, PlannedSignature] = {}
        self.last: PlannedSignature | None = None  # called last
        self.planned: PlannedSignature | None = None  # planned last
        self.graph_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (
            None  # nnx objects behind the pure arguments
        )
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the plan for these arguments."""
        if self.has_static:
            args, kwargs = self.hide_static(args, kwargs)
        leaves = self.check_not_donated(args, kwargs) if _compat.CRASHES_ON_DONATED or self.donates else []
        entry = self.last
        if len(self.entries) > 1:
            entry = self.known(self.signature(args, kwargs))
        if entry is None or not entry.inspected:
            return self.inspect_and_call(args, kwargs)
        donated = entry.traced.donated
        if donated and (distinct := self.separate.distinct(leaves, donated, entry.memory_kinds)):
            leaves = distinct
            args, kwargs = jax.tree.unflatten(jax.tree.structure((args, kwargs)), leaves)
        try:
            results = entry.call(args, kwargs)
            if donated:
                self.separate.learn(leaves, donated, results)
            return entry.revealed(results)
        except NewSignature:
            return self.inspect_and_call(args, kwargs)
        except (ValueError, TypeError, AssertionError, RuntimeError) as error:
            if "deleted" in str(error):
                self.check_not_donated(args, kwargs)
            if is_shared_memory_error(error):  # nothing was donated yet
                self.separate.needed = True
                return self.inspect_and_call(args, kwargs)
            if isinstance(error, RuntimeError):
                raise
            args, kwargs = self.hide_static(args, kwargs)
            known = self.known(self.signature(args, kwargs)) is entry
            if known and not entry.misplaced(jax.tree.leaves((args, kwargs))):
                raise  # the arguments are as planned, so the error is the function's own
            return self.inspect_and_call(args, kwargs)

    def hide_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with their static leaves as parts of the structure."""
        arguments = (args, kwargs)
        what = f"auto_shard({name_of(self.fn)}): argument"
        hidden = hide_static(arguments, what, self.static_numbers, skip=1, names=self.arguments or self.own_names)
        self.has_static |= hidden is not arguments
        return hidden

    @functools.cached_property
    def own_names(self) -> tuple[str, ...]:
        """The names of the positional parameters of the function itself."""
        return argument_names(self.fn)

    def paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the path of each leaf of the arguments; of nnx objects, its path in them."""
        if self.graph_arguments is not None:
            return _compat.nnx_paths(*self.graph_arguments)
        names = self.arguments or self.own_names
        flat = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        return [named_path(path_of(keys[1:]), names) for keys, _ in flat]

    def check_not_donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of the arguments, of which none was donated to an earlier call.

        Raises:
            PlanError: some were.
        """
        leaves = jax.tree.leaves((args, kwargs))
        if _compat.has_deleted(leaves):
            raise donated_error(name_of(self.fn), self.paths(args, kwargs), leaves) from None
        return leaves

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a plan depends on: structure, shapes, dtypes, memory kinds, JAX's settings, the current mesh."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        mesh = _compat.current_mesh() if self.takes_placement else None
        try:
            types = tuple(map(type_of, leaves))
        except TypeError:
            hidden = self.hide_static(args, kwargs)
            if hidden[0] is args and hidden[1] is kwargs:
                raise self.bad_argument_error(args, kwargs) from None
            return self.signature(*hidden)
        return tree, types, trace_flags(), mesh

    def bad_argument_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanError:
        """Make the error that names the first leaf of the arguments that is neither an array nor a number."""
        for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
            try:
                type_of(leaf)
            except TypeError:
                path = named_path(path_of(keys[1:]), self.arguments or self.own_names)
                problem = f"argument '{path}' is {leaf!r:.60}, a {type(leaf).__name__}"
                break
        else:
            problem = "an argument has a type that JAX does not support"
        return PlanError(
            f"auto_shard({name_of(self.fn)}): {problem}: JAX has no arrays of that type. Remove it, or make the whole "
            "argument static with static_argnums"
        )

    def inspect_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function after an inspection of the arguments: plan new signatures and move misplaced arrays."""
        args, kwargs = self.hide_static(args, kwargs)
        leaves = self.check_not_donated(args, kwargs)
        traced = [i for i, x in enumerate(leaves) if _compat.is_tracer(x)]
        if traced and not _compat.under_trace():
            path = self.paths(args, kwargs)[traced[0]]
            raise PlanError(
                f"auto_shard({name_of(self.fn)}): argument '{path}' is a leaked tracer "
                f"({leaves[traced[0]].aval.str_short()}): a value of a function under trace was stored outside of it. "
                "Return it from that function instead"
            )
        entry = self.entry(args, kwargs)
        if traced:  # inside another transformation: only add sharding constraints
            return reveal_static(jax.tree.unflatten(entry.traced.out_tree, run_under_trace(entry, leaves)))
        entry.check_target()
        entry = self.entry_for_placement(entry, args, kwargs)
        entry.check_agreement()
        self.last, entry.inspected = entry, True
        self.separate.needed |= entry.mesh.size > 1
        leaves = without_shared_memory(entry.place(leaves), entry.traced.donated)
        args, kwargs = jax.tree.unflatten(entry.traced.in_tree, leaves)
        results = entry.call(args, kwargs)
        self.separate.learn(leaves, entry.traced.donated, results)
        return entry.revealed(results)

    def entry_for_placement(
        self, entry: PlannedSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PlannedSignature:
        """Return a plan that keeps arrays as the caller sharded them. The function's own state is moved instead."""
        leaves = jax.tree.leaves((args, kwargs))
        placement = tuple(
            (i, leaves[i].sharding)
            for i in entry.misplaced(leaves)
            if i not in entry.state and is_placed(leaves[i]) and self.takes_placement
        )
        if not placement:
            return entry
        signature = self.signature(args, kwargs)
        placed = self.by_placement.get((signature, placement))
        if placed is None:
            placed = self.by_placement[signature, placement] = self.make(args, kwargs)
        self.entries[signature] = placed
        return placed

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedSignature:
        """Return the planned signature of these arguments. Plans it if it is new."""
        args, kwargs = self.hide_static(args, kwargs)
        key = self.signature(args, kwargs)
        entry = self.known(key)
        if entry is None:
            if self.graph_arguments is None and _compat.has_graph_nodes((args, kwargs)):
                raise GraphArguments
            if self.has_static:
                self.static_changes.note((args, kwargs), key[1:])
            try:
                entry = self.entries[key] = self.make(args, kwargs)
            except (TypeError, AttributeError, ValueError) as error:
                if absent := absent_error((args, kwargs), self.planned and self.planned.traced):
                    raise absent from error
                raise
            for other in signatures_in_other_memory(key, entry.traced):
                self.by_memory[other] = entry
        self.planned = entry
        return entry

    def known(self, signature: Any) -> PlannedSignature | None:
        """Return the entry of a signature; None if it is new."""
        return self.entries.get(signature) or self.by_memory.get(signature)

    @paused()
    @_compat.classic_scans()
    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedSignature:
        """Trace and plan a new signature, with the fastest variant that fits."""
        made, errors = [], []
        warnings_of: dict[tuple[int, str], Sequence[warnings.WarningMessage]] = {}
        originals = self.graph_arguments and self.hide_static(*self.graph_arguments)
        names = _compat.nnx_paths(*originals) if originals is not None else None
        written = _compat.annotated_specs(*(originals or (args, kwargs)), graph=originals is not None)
        options: dict[str, Any] = dict(self.options)
        selection = requested_selection(options, bool(self.variants))
        for name in ("verify", "verify_timeout_s", "measure"):
            options.pop(name, None)
        attempts: list[Attempt] = []
        donate_from = self.filter_jit and self.filter_jit.donate_from
        machine = traced_machine(options["mesh"], options["target"])
        rules = _block_rules(options)
        donated = self.donate, self.donated_names
        trace_options = *donated, names, written, self.static_numbers, self.arguments, donate_from, machine, rules
        for choice in itertools.chain.from_iterable(variant_rounds(self.variants, attempts)):
            fn = functools.partial(self.fn, **choice) if choice else self.fn
            traced = trace_for_offload(options["offload"], fn, args, kwargs, *trace_options)
            with warnings.catch_warnings(record=selection.discards) as caught:
                try:
                    bound = plan_traced(traced, (args, kwargs), **options, shortlist=selection.within)
                except (PlanError, PlanRequestError) as error:
                    errors.append(error)
                    attempts.append(attempt(choice, None))
                    continue
            made.append((choice, bound))
            attempts.append(attempt(choice, bound.plan))
            warnings_of[id(bound.traced), bound.plan.chosen] = caught or []
        if not made:
            if errors:
                raise errors[0]
            raise PlanError(f"auto_shard({name_of(self.fn)}): variants gives no variant to try; give at least one")
        within = [one for one in made if one[1].plan.fits_host] or made  # a request beyond the host's memory only warns
        if not isinstance(options["plan"], ShardingPlan) and not any(bound.plan.fits_device for _, bound in within):
            report_infeasible(within)

        def replan(bound: BoundPlan, strategy: str) -> BoundPlan | None:
            try:
                # The program is rewritten already.
                done = {"offload": (), "kernels": "off", "microbatches": 1}
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    again = plan_traced(bound.traced, (args, kwargs), **{**options, "plan": strategy, **done})
            except (PlanError, PlanRequestError):  # a requested plan that shards nothing is an error
                return None
            warnings_of[id(again.traced), again.plan.chosen] = caught or []
            return again

        chosen = selection.choose(made, replan)
        for warning in warnings_of.get((id(chosen.traced), chosen.plan.chosen), ()):  # not those of other plans
            warnings.warn(warning.message, warning.category, stacklevel=users_stacklevel())
        return PlannedSignature(chosen, self.filter_jit is not None and self.filter_jit.hides_warnings)


def _block_rules(options: Mapping[str, Any]) -> BlockRules | None:
    """What decides about the block sizes of kernels under the options of a plan."""
    plan, request = options["plan"], options.get("compiler_options", ())
    if not isinstance(plan, ShardingPlan):
        return block_rules(options["mesh"], options["target"], request)
    if plan.requested_options:
        request = (plan.requested_options,)
    return block_rules(options["mesh"], options["target"], request, plan.kernel_blocks)


class GraphFunction:
    """A function of nnx objects with the semantics of `nnx.jit`. Its pure part is planned."""

    def __init__(self, fn: Callable[..., Any], make: Callable[[Callable[..., Any]], PureFunction]):
        self.fn = fn
        self.wrapped, self.pure = _compat.nnx_jit(fn, make)
        self.pure.arguments = argument_names(fn)

    @property
    def planned(self) -> PlannedSignature | None:
        """The entry that was planned last."""
        return self.pure.planned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the plan for these arguments."""
        self.pure.graph_arguments = (args, kwargs)
        try:
            return self.wrapped(*args, **kwargs)
        finally:
            self.pure.graph_arguments = None

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedSignature:
        """Return the planned signature of these arguments. Plans it if it is new."""
        self.pure.graph_arguments = (args, kwargs)
        try:
            entry = _compat.nnx_pure_call(self.wrapped, self.pure.entry, args, kwargs)
        finally:
            self.pure.graph_arguments = None
        entry.bound.executable.wrap = lambda jitted: _compat.nnx_jit(self.fn, lambda _: jitted)[0]
        return entry
