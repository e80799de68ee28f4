"""A function with its plans: one for each signature, and one function for each set of static arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax

from autoshard import _compat
from autoshard._typed import shortly
from autoshard.errors import PlanError
from autoshard.sharding.program.tracing import OUTER_PLAN, name_of
from autoshard.sharding.runtime.dispatch import Entry, GraphArguments, GraphFunction, PureFunction
from autoshard.sharding.runtime.sharded_init import born_sharded


class PlannedFunction:
    """A function that is planned for the arguments that it is called with, and then runs by its plan."""

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
                f"auto_shard takes a function or a Flax module class, got {type(fn).__name__} {shortly(fn)}"
            )
        functools.update_wrapper(self, fn)
        self.__name__ = name_of(fn)
        self.fn, self.options, self.variants, self.example = fn, options, variants, example
        self.names = _positional(fn)
        count, most = len(self.names or ()), None if _takes_any_number(fn) else len(self.names or ())
        self.static = _numbers(static_argnums, count, most, f"auto_shard({self.__name__}): static_argnums")
        donated = _numbers(donate_argnums, count, most, f"auto_shard({self.__name__}): donate_argnums")
        self.donate = _argnums(donated, self.static)
        self.functions: dict[Any, PureFunction | GraphFunction] = {}
        self._plain = self._make(fn)
        self._graph: GraphFunction | None = None

    def __repr__(self) -> str:
        return f"auto_shard({getattr(self, '__name__', 'of nothing yet')})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, planned for these arguments."""
        if OUTER_PLAN.get():
            return self.fn(*args, **kwargs)  # inside a function that is being planned, whose plan rules
        if self.static:
            target, args, kwargs = self._without_static(args, kwargs)
            return target(*args, **kwargs)
        if self._graph is not None:
            return self._graph(*args, **kwargs)
        try:
            return self._plain(*args, **kwargs)
        except GraphArguments:
            return self._graph_function()(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _make(self, fn: Callable[..., Any]) -> PureFunction:
        return PureFunction(fn, self.options, self.donate, self.variants)

    def _graph_function(self) -> GraphFunction:
        if self._graph is None:
            self._graph = GraphFunction(self.fn, self._make)
        return self._graph

    def _without_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict]:
        """The function with its static arguments filled in, and the rest."""
        fixed = {n: args[n] for n in self.static if n < len(args)}
        by_name = {self.names[n]: kwargs[self.names[n]] for n in self.static if n < len(self.names or ())
                   and self.names[n] in kwargs} if self.names else {}  # fmt: skip
        rest = tuple(a for i, a in enumerate(args) if i not in fixed)
        left = {k: v for k, v in kwargs.items() if k not in by_name}
        graph = _compat.has_graph_nodes((rest, left))
        key = (graph, tuple((k, type(v), v) for k, v in (*fixed.items(), *sorted(by_name.items()))))
        try:
            found = self.functions.get(key)
        except TypeError:
            raise PlanError(
                f"auto_shard({self.__name__}): a static argument is not hashable: "
                f"{[*fixed.values(), *by_name.values()]!r:.200}. Pass a tuple or a frozen dataclass"
            ) from None
        if found is None:
            fn, count = self.fn, len(args)

            def call(*arrays: Any, **keywords: Any) -> Any:
                each = iter(arrays)
                return fn(*(fixed[i] if i in fixed else next(each) for i in range(count)), **by_name, **keywords)

            functools.update_wrapper(call, fn)
            found = self.functions[key] = GraphFunction(call, self._make) if graph else self._make(call)
        return found, rest, left

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The plan for these arguments (arrays or shapes), made if there is none."""
        if self.static:
            target, args, kwargs = self._without_static(args, kwargs)
        elif self._graph is not None or _compat.has_graph_nodes((args, kwargs)):
            target = self._graph_function()
        else:
            target = self._plain
        return target.entry(args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """What `jax.jit(...).lower` gives, for these arguments (arrays or shapes)."""
        entry = self.entry(args, kwargs)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in entry.traced.in_avals]
        args, kwargs = jax.tree.unflatten(entry.traced.in_tree, shapes)
        return entry.jitted.lower(*args, kwargs) if kwargs else entry.jitted.lower(*args)

    def init(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `create(*args, **kwargs)` so that its result is born sharded as this function's plan has it.

        Args:
            create: makes the state; it is never whole on one device.
            *args: its arguments, such as a random key; what is no array is taken as it is.
            **kwargs: the same by keyword.

        Raises:
            PlanError: there is no plan yet, or no argument of the planned function has this structure.
        """
        entry = self.planned()
        return born_sharded(entry, create, args, self.__name__, kwargs)

    def planned(self) -> Entry:
        """The entry that was planned last; by the example, if nothing was planned."""
        functions = [self._plain, *self.functions.values(), self._graph]
        found = [f.planned for f in functions if f is not None and f.planned is not None]
        if found:
            return found[-1]
        if self.example is None:
            raise PlanError(
                f"auto_shard({self.__name__}).init: there is no plan to shard by. Call "
                ".plan(...) with the shapes of the arguments first, or pass example=(...) to auto_shard"
            )
        return self.entry(self.example, {})


def _argnums(donated: Sequence[int], statics: Sequence[int]) -> tuple[int, ...]:
    """Donated argument numbers as they are once the static ones are gone."""
    return tuple(d - sum(s < d for s in statics) for d in donated)


def _positional(fn: Callable[..., Any]) -> list[str] | None:
    """Names of the positional parameters; None if they cannot be told."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _takes_any_number(fn: Callable[..., Any]) -> bool:
    """Whether a function takes `*args`, or cannot tell what it takes."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def _numbers(given: int | Sequence[int], count: int, most: int | None, what: str) -> list[int]:
    """Argument numbers, negative ones counted from the end.

    Raises:
        PlanError: there is no such argument.
    """
    numbers = list(given) if isinstance(given, Iterable) else [given]
    wrong = [n for n in numbers if not _is_whole(n) or n < -count or (most is not None and n >= most)]
    if wrong:
        raise PlanError(
            f"{what} {shortly(wrong[0])}: the function has {count} positional arguments"
            + (f", numbered 0 to {count - 1}" if count else "")
        )
    return list(dict.fromkeys(int(n % count if n < 0 else n) for n in numbers))


def _is_whole(n: Any) -> bool:
    return isinstance(n, Integral) and not isinstance(n, bool)
