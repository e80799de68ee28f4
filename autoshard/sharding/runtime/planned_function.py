"""`PlannedFunction`: a function with a plan for each signature and each set of static arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from autoshard import _compat
from autoshard._tracebacks import hide_own_frames, hides_own_frames
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.planner.variants import checked_variants
from autoshard.sharding.program.argument_names import argument_names, without_parameters
from autoshard.sharding.program.tracing import OUTER_PLAN, name_of
from autoshard.sharding.runtime.batch_sharding import shard_batch
from autoshard.sharding.runtime.dispatch import GraphArguments, GraphFunction, PureFunction
from autoshard.sharding.runtime.keyword_arguments import by_position, keyword_names
from autoshard.sharding.runtime.planned_signature import PlannedSignature
from autoshard.sharding.runtime.sharded_init import create_sharded


class PlannedFunction:
    """A function that is planned for the arguments of its first call, and then runs under its plan."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        variants: Any = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        example: tuple[Any, ...] | None = None,
    ):
        if not callable(fn):
            raise PlanError(
                f"auto_shard and plan take a function or a Flax module class, got "
                f"{short_repr(fn)}. Pass the function first: auto_shard(step), plan(step, state, batch)"
            )
        functools.update_wrapper(self, fn)
        self.__name__ = name_of(fn)
        self.fn, self.options, self.example = fn, options, example
        self.variants = checked_variants(variants, fn)
        self.names, self.keyword_names = argument_names(fn), keyword_names(fn)
        limit, where = None if _takes_any_number(fn) else len(self.names), f"auto_shard({self.__name__}):"
        own = _compat.jit_settings(fn)  # `auto_shard(jax.jit(f, ...))` keeps the settings of the jit
        if static_argnums in ((), []):
            static_argnums = _below(own.static_argnums, limit)
        names: frozenset[str] = frozenset()
        if donate_argnums in ((), []):
            donate_argnums, names = _below(own.donate_argnums, limit), frozenset(own.donate_argnames)
        self.static_keywords = frozenset(own.static_argnames)
        self.static = _checked_argnums(static_argnums, self.names, limit, f"{where} static_argnums")
        donated = _checked_argnums(donate_argnums, self.names, limit, f"{where} donate_argnums")
        self.donate = _without_static_positions(donated, self.static)
        self.donated_names = names | {self.names[n] for n in donated if n < len(self.names)}
        self.filter_jit = _compat.filter_jit_of(fn)
        if self.filter_jit is not None and self.filter_jit.donate_from is not None:
            (first,) = _without_static_positions([self.filter_jit.donate_from], self.static)
            self.filter_jit = dataclasses.replace(self.filter_jit, donate_from=first)
        self.functions: dict[Any, PureFunction | GraphFunction] = {}
        self._plain = self._make(fn)
        self._graph: GraphFunction | None = None

    def __repr__(self) -> str:
        return f"auto_shard({getattr(self, '__name__', 'of nothing yet')})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the plan for these arguments."""
        if OUTER_PLAN.get():
            return self.fn(*args, **kwargs)  # inside a planned function: the outer plan applies
        if kwargs:
            args, kwargs = by_position(args, kwargs, self.keyword_names)
        try:
            if self.static or self.static_keywords:
                target, args, kwargs = self._without_static(args, kwargs)
                return target(*args, **kwargs)
            if self._graph is not None:
                return self._graph(*args, **kwargs)
            try:
                return self._plain(*args, **kwargs)
            except GraphArguments:
                pass
            return self._graph_function()(*args, **kwargs)
        except Exception as error:  # of any type: only its traceback changes, and it is raised again
            hide_own_frames(error)
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _make(self, fn: Callable[..., Any]) -> PureFunction:
        return PureFunction(fn, self.options, self.donate, self.variants, self.filter_jit, self.donated_names)

    def _graph_function(self) -> GraphFunction:
        if self._graph is None:
            self._graph = GraphFunction(self.fn, self._make)
        return self._graph

    def _without_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict]:
        """Return the function with its static arguments bound, and the other arguments."""
        statics = {n: args[n] for n in self.static if n < len(args)}
        names = {self.names[n] for n in self.static if n < len(self.names)} | self.static_keywords
        by_name = {k: v for k, v in kwargs.items() if k in names}
        rest = tuple(a for i, a in enumerate(args) if i not in statics)
        keywords = {k: v for k, v in kwargs.items() if k not in by_name}
        graph = _compat.has_graph_nodes((rest, keywords))
        key = (graph, tuple((k, type(v), v) for k, v in (*statics.items(), *sorted(by_name.items()))))
        try:
            function = self.functions.get(key)
        except TypeError:
            raise PlanError(
                f"auto_shard({self.__name__}): static argument {_unhashable_text(statics | by_name)} is not "
                "hashable. Pass a tuple or a frozen dataclass, or leave it out of static_argnums"
            ) from None
        if function is None:
            fn, count = self.fn, len(args)

            def call(*args: Any, **kwargs: Any) -> Any:
                remaining = iter(args)
                merged = (statics[i] if i in statics else next(remaining) for i in range(count))
                return fn(*merged, **by_name, **kwargs)

            functools.update_wrapper(call, fn)
            call.__signature__ = without_parameters(fn, self.static)  # pyright: ignore[reportFunctionMemberAccess]
            function = self.functions[key] = GraphFunction(call, self._make) if graph else self._make(call)
        return function, rest, keywords

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedSignature:
        """Return the planned signature of these arguments (arrays or shapes). Plans it if it is new."""
        args, kwargs = by_position(args, kwargs, self.keyword_names)
        if self.static or self.static_keywords:
            target, args, kwargs = self._without_static(args, kwargs)
        elif self._graph is not None or _compat.has_graph_nodes((args, kwargs)):
            target = self._graph_function()
        else:
            target = self._plain
        return target.entry(args, kwargs)

    @hides_own_frames
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the planned function for these arguments (arrays or shapes), as `jax.jit(...).lower` does."""
        entry = self.entry(args, kwargs)
        return entry.lower()

    @hides_own_frames
    def init(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `create(*args, **kwargs)` with its result sharded as this function's plan requires.

        Args:
            create: creates the state. The state is sharded from the start, never complete on one device.
            *args: its arguments, such as a random key. Values that are not arrays are passed unchanged.
            **kwargs: its keyword arguments.

        Raises:
            PlanError: there is no plan yet, `create` is not callable, or no argument of the planned function has this
                structure.
        """
        entry = self.planned()
        if not callable(create):
            raise PlanError(
                f"auto_shard({self.__name__}).init takes a function that creates the state, got "
                f"{short_repr(create)}. Pass the function and its arguments: "
                "step.init(create_state, rng). A state that exists needs no init: call step(state, batch)"
            )
        return create_sharded(entry, create, args, self.__name__, kwargs)

    @hides_own_frames
    def shard_batch(self, *batch: Any) -> Any:
        """Make the global arrays of a batch from the rows that this process loaded.

        Every process calls it in the same order. The rows of the global batch are those of process 0, then those of
        process 1, and so on; arrays of the planned shape are the same in every process. Rows are sent to other
        processes only where the plan needs them there.

        Args:
            *batch: this process's share of the planned arguments that are neither parameters nor state.

        Returns:
            The argument with global arrays, or a tuple if several are given.

        Raises:
            PlanError: there is no plan yet, or the batch does not fit it.
        """
        made = shard_batch(self.planned(), batch, self.__name__)
        return made[0] if len(batch) == 1 else tuple(made)

    def planned(self) -> PlannedSignature:
        """Return the signature that was planned last; if there is none, plan the example."""
        functions = [self._plain, *self.functions.values(), self._graph]
        planned = [f.planned for f in functions if f is not None and f.planned is not None]
        if planned:
            return planned[-1]
        if self.example is None:
            raise PlanError(
                f"auto_shard({self.__name__}): there is no plan yet. Call "
                ".plan(...) with the shapes of the arguments first, or pass example=(...) to auto_shard"
            )
        return self.entry(self.example, {})


def _unhashable_text(arguments: Mapping[int | str, Any]) -> str:
    """Return the number or name of the first argument that is not hashable, and its type."""
    for which, value in arguments.items():
        try:
            hash(value)
        except TypeError:
            return f"{which}, a value of type {type(value).__name__},"
    return "?"


def _without_static_positions(donated: Sequence[int], statics: Sequence[int]) -> tuple[int, ...]:
    """Return the donated argument numbers, counted without the static arguments."""
    return tuple(d - sum(s < d for s in statics) for d in donated)


def _below(numbers: Sequence[int], limit: int | None) -> list[int]:
    """The numbers below the limit: if a partial binds a keyword, arguments after it cannot be given by position."""
    return [n for n in numbers if limit is None or n < limit]


def _takes_any_number(fn: Callable[..., Any]) -> bool:
    """Return whether a function takes `*args` or has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def _checked_argnums(argnums: int | Sequence[int], names: Sequence[str], limit: int | None, what: str) -> list[int]:
    """Normalize argument numbers; negative ones count from the end.

    Args:
        argnums: the numbers.
        names: the names of the function's positional arguments.
        limit: one more than the largest possible number, if there is one.
        what: the name of the numbers in messages.

    Raises:
        PlanError: there is no such argument.
    """
    count = len(names)
    given: Any = argnums
    single = isinstance(given, str) or not isinstance(given, Iterable)
    numbers: list[Any] = [given] if single else [*given]
    wrong = [n for n in numbers if not _is_integer(n) or n < -count or (limit is not None and n >= limit)]
    if wrong:
        positions = ", ".join(f"{i} ({name})" for i, name in enumerate(names))
        must = (
            f"it must be positions of arguments, as numbers: {positions}" if count else "the function has no arguments"
        )
        raise PlanError(f"{what} is {short_repr(wrong[0])}; {must}")
    return list(dict.fromkeys(int(n % count if n < 0 else n) for n in numbers))


def _is_integer(n: Any) -> bool:
    return isinstance(n, Integral) and not isinstance(n, bool)
