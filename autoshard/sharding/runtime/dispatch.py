"""From a call to the planned program: which plan fits these arguments, and where they must lie.

A call costs what `jax.jit` costs: the last planned function is called at once, and jit's own cache says what is new.
Only if it refuses (another structure, shape or setting, arrays that lie elsewhere) are the arguments looked at.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard.errors import PlanError, PlanRequestError
from autoshard.sharding.autotune.contest import requested_shortlist
from autoshard.sharding.lower.executable import NewSignature
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.infeasible import report_infeasible
from autoshard.sharding.planner.planning import plan_traced
from autoshard.sharding.planner.shortlist import fastest_of_all
from autoshard.sharding.planner.variants import Attempt, attempt, fastest, variant_rounds
from autoshard.sharding.program.tracing import name_of, path_of, trace, trace_flags
from autoshard.sharding.runtime.process_agreement import check_same_plan


class GraphArguments(Exception):
    """A plain function was called with nnx objects: it must be called as `nnx.jit` would."""


class Entry:
    """One planned signature: the plan, the function jitted by it, and the shardings of its inputs."""

    def __init__(self, bound: BoundPlan):
        self.bound, self.plan, self.traced = bound, bound.plan, bound.traced
        self.state = frozenset(i for i, _ in self.traced.state)

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of devices; only a call needs them, a plan can be for a machine that is not here."""
        return self.bound.executable.mesh_over(None)

    @functools.cached_property
    def jitted(self) -> Any:
        """The annotated function under `jax.jit`."""
        executable = self.bound.executable
        return executable.jit(self.mesh if executable.mesh is None else None)

    @functools.cached_property
    def in_shardings(self) -> list[Any]:
        """The sharding of each flat input."""
        return self.plan.shardings(self.mesh)[0]

    @functools.cache  # noqa: B019  an entry lives as long as its function
    def agreed(self) -> None:
        """Raises where another process is about to run another plan on these devices."""
        if len({d.process_index for d in self.mesh.devices.flat}) > 1:
            check_same_plan(self.plan)

    def misplaced(self, leaves: Sequence[Any]) -> list[int]:
        """The inputs that lie elsewhere than the plan has them, or on Explicit axes."""
        pairs = zip(leaves, self.in_shardings, strict=True)
        return [i for i, (x, s) in enumerate(pairs) if isinstance(x, jax.Array) and _lies_elsewhere(x, s)]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with what lies elsewhere moved to where the plan has it.

        State is always put there; of the rest only what was put elsewhere on purpose: jit takes the others itself.
        """
        out = list(leaves)
        for i in self.misplaced(leaves):
            if i in self.state or getattr(leaves[i], "committed", True):
                out[i] = jax.device_put(leaves[i], self.in_shardings[i])
        return out

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result for arguments of the planned signature."""
        return self.jitted(*args, kwargs) if kwargs else self.jitted(*args)


def _lies_elsewhere(x: jax.Array, wanted: Any) -> bool:
    if not x.sharding.is_equivalent_to(wanted, x.ndim):
        return True
    mesh = getattr(x.sharding, "mesh", None)  # jit traces with the argument's own mesh, even where the shards agree
    return mesh is not None and mesh != wanted.mesh


class PureFunction:
    """A function of pytrees of arrays that plans each signature once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        donate: tuple[int, ...],
        variants: Any = None,
    ):
        self.fn, self.options, self.donate, self.variants = fn, options, donate, variants
        self.takes_placement = all(options.get(k) is None for k in ("mesh", "target", "plan"))
        self.entries: dict[Any, Entry] = {}
        self.by_placement: dict[Any, Entry] = {}
        self.last: Entry | None = None  # the one that was called last
        self.planned: Entry | None = None  # the one that was planned last
        self.originals: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # nnx objects behind the pure arguments
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, planned for these arguments."""
        entry = self.last
        if len(self.entries) > 1:
            entry = self.entries.get(self.signature(args, kwargs))
        if entry is None:
            return self.look(args, kwargs)
        try:
            return entry.call(args, kwargs)
        except NewSignature:
            return self.look(args, kwargs)
        except (ValueError, TypeError, AssertionError):
            known = self.entries.get(self.signature(args, kwargs)) is entry
            if known and not entry.misplaced(jax.tree.leaves((args, kwargs))):
                raise  # the arguments are the planned ones: the error is the function's own
            return self.look(args, kwargs)

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a plan depends on: structure, shapes, types, JAX's settings and the mesh in force."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        mesh = _compat.current_mesh() if self.takes_placement else None
        try:
            types = tuple(map(_type_of, leaves))
        except TypeError:
            raise self.refusal(args, kwargs) from None
        return tree, types, trace_flags(), mesh

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanError:
        """The error that names the first leaf of the arguments that is neither an array nor a number."""
        for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
            try:
                _type_of(leaf)
            except TypeError:
                found = f"argument '{path_of(keys[1:])}' is {leaf!r:.60}, a {type(leaf).__name__}"
                break
        else:
            found = "an argument is of a type that JAX does not know"
        return PlanError(
            f"auto_shard({name_of(self.fn)}): {found}: arguments are pytrees of arrays and numbers. Leave it out, or "
            "name a whole argument in static_argnums"
        )

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with the arguments looked at: plans what is new, moves what lies elsewhere."""
        leaves = jax.tree.leaves((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if _compat.is_tracer(x)]
        if traced and not _compat.under_trace():
            path = path_of(jax.tree_util.tree_flatten_with_path((args, kwargs))[0][traced[0]][0][1:])
            raise PlanError(
                f"auto_shard({name_of(self.fn)}): argument '{path}' is a leaked tracer "
                f"({leaves[traced[0]].aval.str_short()}): a value of a function that was being traced was kept outside "
                "of it. Return it from that function instead"
            )
        entry = self.entry(args, kwargs)
        if traced:  # somebody's trace: only constrain
            run = entry.bound.executable.run(entry.mesh)
            return jax.tree.unflatten(entry.traced.out_tree, run(*leaves))
        entry = self.where_they_lie(entry, args, kwargs)
        entry.agreed()
        self.last = entry
        args, kwargs = jax.tree.unflatten(entry.traced.in_tree, entry.place(leaves))
        return entry.call(args, kwargs)

    def where_they_lie(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The plan that takes arrays where others have put them; state of one's own is moved instead."""
        leaves = jax.tree.leaves((args, kwargs))
        put = tuple(
            (i, leaves[i].sharding)
            for i in entry.misplaced(leaves)
            if i not in entry.state and _is_put(leaves[i]) and self.takes_placement
        )
        if not put:
            return entry
        signature = self.signature(args, kwargs)
        found = self.by_placement.get((signature, put))
        if found is None:
            found = self.by_placement[signature, put] = self.make(args, kwargs)
        self.entries[signature] = found
        return found

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The plan for these arguments, made if there is none."""
        key = self.signature(args, kwargs)
        found = self.entries.get(key)
        if found is None:
            if self.originals is None and _compat.has_graph_nodes((args, kwargs)):
                raise GraphArguments
            found = self.entries[key] = self.make(args, kwargs)
        self.planned = found
        return found

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Traces and plans; of variants the fastest that fits."""
        made, refused, told = [], [], {}
        originals = self.originals
        names = _compat.nnx_paths(*originals) if originals is not None else None
        written = _compat.written_specs(*(originals or (args, kwargs)), graph=originals is not None)
        options: dict[str, Any] = dict(self.options)
        asked = requested_shortlist(options.pop("verify", 0), options.pop("measure", 0))
        attempts: list[Attempt] = []
        for choice in itertools.chain.from_iterable(variant_rounds(self.variants, attempts)):
            fn = functools.partial(self.fn, **choice) if choice else self.fn
            traced = trace(fn, args, kwargs, self.donate, names, written)
            with warnings.catch_warnings(record=bool(self.variants)) as caught:
                try:
                    bound = plan_traced(traced, (args, kwargs), **options, asked=None if self.variants else asked)
                except (PlanError, PlanRequestError) as error:
                    refused.append(error)
                    attempts.append(attempt(choice, None))
                    continue
            made.append((choice, bound))
            attempts.append(attempt(choice, bound.plan))
            told[id(traced)] = caught or []
        if not made:
            raise refused[0] if refused else PlanError(f"auto_shard({name_of(self.fn)}): variants name nothing to try")
        if not isinstance(options["plan"], ShardingPlan) and not any(bound.plan.fits for _, bound in made):
            report_infeasible(made)

        def replan(bound: BoundPlan, words: str) -> BoundPlan | None:
            try:
                return plan_traced(bound.traced, (args, kwargs), **{**options, "plan": words})
            except (PlanError, PlanRequestError):  # a candidate that cuts nothing is refused where it is asked for
                return None

        chosen = fastest_of_all(made, asked, replan) if asked and self.variants else fastest(made)
        for warning in told[id(chosen.traced)]:  # those of the other variants are nobody's concern
            warnings.warn(warning.message, warning.category, stacklevel=2)
        return Entry(chosen)


def _type_of(x: Any) -> tuple[Any, Any, bool]:
    if not hasattr(x, "dtype"):  # a Python number
        return (), jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)), True
    if getattr(x.dtype, "kind", "") in tuple("OSU"):
        raise TypeError(f"{x.dtype} is no type of JAX's")
    dtype = x.dtype if _compat.is_extended(x.dtype) else jax.dtypes.canonicalize_dtype(x.dtype)
    return x.shape, dtype, bool(getattr(x, "weak_type", False))


def _is_put(x: Any) -> bool:
    """Whether an array was put over several devices on purpose."""
    return isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size > 1 and getattr(x, "committed", True)


class GraphFunction:
    """A function of nnx objects, with the semantics of `nnx.jit`; its pure part is planned."""

    def __init__(self, fn: Callable[..., Any], make: Callable[[Callable[..., Any]], PureFunction]):
        self.fn = fn
        self.wrapped, self.pure = _compat.nnx_jit(fn, make)

    @property
    def planned(self) -> Entry | None:
        """The entry that was planned last."""
        return self.pure.planned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, planned for these arguments."""
        self.pure.originals = (args, kwargs)
        try:
            return self.wrapped(*args, **kwargs)
        finally:
            self.pure.originals = None

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The plan for these arguments."""
        self.pure.originals = (args, kwargs)
        try:
            found = _compat.nnx_pure_call(self.wrapped, self.pure.entry, args, kwargs)
        finally:
            self.pure.originals = None
        found.bound.executable.wrap = lambda jitted: _compat.nnx_jit(self.fn, lambda _: jitted)[0]
        return found
