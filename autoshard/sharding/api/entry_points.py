"""`auto_shard` and `plan`: what a user calls. A function or a Flax module class, planned and run sharded."""

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
from autoshard.sharding.layout.plan_request import Table
from autoshard.sharding.machines.device_mesh import MeshLike
from autoshard.sharding.machines.targets import check_name
from autoshard.sharding.plan.sharding_plan import Plan
from autoshard.sharding.planner.planning import PlanLike, argnums
from autoshard.sharding.planner.variants import Variants
from autoshard.sharding.program.tracing import OUTER_PLAN, name_of
from autoshard.sharding.runtime.dispatch import Entry, GraphArguments, GraphFunction, PureFunction
from autoshard.sharding.runtime.sharded_init import born_sharded


def auto_shard(
    obj: Any = None,
    /,
    *,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Variants | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    example: tuple[Any, ...] | None = None,
    verify: int = 0,
    measure: int = 0,
    strict: bool = False,
) -> Any:
    """Makes a function or a Flax module class run sharded over a mesh, by a plan that nobody has to write.

    Args:
        obj: a function of pytrees (nnx modules and optimizers among them), or an nnx or linen module class.
        mesh: where to run: a `Mesh`, sizes such as `{"data": 4, "model": 2}`, or None: all attached devices.
        target: a machine to plan for; default: the attached one.
        memory_limit_bytes: memory that one device may use.
        fixed: shardings that the plan must keep, see `autoshard.plan`.
        plan: a plan to use: "fsdp:8", a table, or a `Plan`.
        variants: static keywords to choose among, see `autoshard.plan`.
        donate_argnums: arguments whose buffers the results may take.
        static_argnums: arguments that are not arrays.
        example: arguments (or their shapes) to plan from before the first call; of an nnx class, the arguments of a
            call, which `.sharded` then need not be given.
        verify: see `autoshard.plan`.
        measure: see `autoshard.plan`.
        strict: an operator without a rule is an error.

    Returns:
        The function with `.plan`, `.lower` and `.init`, or the class with `.autoshard_plan`; `__wrapped__` is kept.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from autoshard import auto_shard
        >>> @auto_shard
        ... def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
        >>> float(loss(jnp.ones((16, 8)), jnp.ones((32, 16)))) > 0
        True
    """
    options = _checked(verify, measure, mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes, fixed=fixed,
                       plan=plan, strict=strict)  # fmt: skip
    if not isinstance(example, tuple | list | None):
        raise PlanError(f"example is {shortly(example)}; give the arguments as a tuple, such as (state, batch)")
    if obj is None:
        return functools.partial(auto_shard, **options, variants=variants, donate_argnums=donate_argnums,
                                 static_argnums=static_argnums, example=example)  # fmt: skip
    if inspect.isclass(obj):
        from autoshard.sharding.api.flax_modules import shard_class

        given = dict(variants=variants, donate_argnums=donate_argnums, static_argnums=static_argnums)
        return shard_class(obj, options, example, [k for k, v in given.items() if v is not None and v not in ((), [])])
    return AutoSharded(obj, options, variants, donate_argnums, static_argnums, example)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Variants | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: int = 0,
    measure: int = 0,
    strict: bool = False,
    **kwargs: Any,
) -> Plan:
    """Plans how to shard a function.

    Args:
        fn: a function of pytrees of arrays.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s: nothing is computed.
        mesh: a `Mesh`, an `AbstractMesh`, sizes such as `{"data": 4, "model": 2}`, or None: choose.
        target: a machine, such as "v5p:4x4x4"; default: the attached devices.
        memory_limit_bytes: memory that one device may use; default: what the machine has.
        fixed: `{path glob: PartitionSpec}`, or `{path glob: names of logical axes}`; a path goes before patterns.
            Without a mesh, the plans are searched whose mesh has the axes that the specs name.
        plan: ask for a plan: "fsdp:8 tp:4 seq", `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`, or a `Plan`.
        variants: `{static keyword: values}`, or a function from what became of the variants so far (`Attempt`s, at
            first none) to the keywords to try next: the best of them all is planned.
        donate_argnums: arguments whose buffers the results may take.
        static_argnums: arguments that are not arrays.
        verify: how many of the best plans to compile for the target, to keep the one whose program is the fastest. From
            two on up to two more are compiled that by the estimate take up to a quarter and up to half more memory than
            there is, if they would be faster than all that take less: XLA computes again what does not fit.
        measure: how many of the best plans to run for some steps on the attached devices, to keep the fastest. Values
            are made up; each plan has the devices' memory for itself. Which wins may differ from run to run. Not
            measured are programs with side effects (`jax.debug.print`, `io_callback`) and with loops whose end depends
            on values: the best by the estimate is kept, and a note of the plan says why. A plan that fails to compile
            or run (4-bit integers as inputs do) is left out, with a note.
        strict: a primitive without a rule is an error instead of a warning.
        **kwargs: arguments by keyword.

    Returns:
        The plan, bound to `fn`.

    Raises:
        PlanError: the request cannot be read, or nothing fits.

    Example:
        >>> import jax, autoshard
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> w = jax.ShapeDtypeStruct((32, 16), "float32")
        >>> autoshard.plan(lambda w, x: x @ w, w, x, target="cpu:8").mesh.size
        8
    """
    options = _checked(verify, measure, mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes, fixed=fixed,
                       plan=plan, strict=strict)  # fmt: skip
    return AutoSharded(fn, options, variants, donate_argnums, static_argnums).plan(*args, **kwargs)


def bind(made: Plan, fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Plan:
    """See `Plan.bind`."""
    if not args:
        raise PlanError("Plan.bind needs the function's arguments or their shapes: plan.bind(fn, state, batch)")
    return plan(fn, *args, plan=made, target=made.target, **options)


class AutoSharded:
    """What `auto_shard(function)` returns."""

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
        self.donate = argnums(donated, self.static)
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

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        if self.static:
            target, args, kwargs = self._without_static(args, kwargs)
        elif self._graph is not None or _compat.has_graph_nodes((args, kwargs)):
            target = self._graph_function()
        else:
            target = self._plain
        return target.entry(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or shapes); kept for the calls that follow."""
        return self._entry(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """What `jax.jit(...).lower` gives, for these arguments (arrays or shapes)."""
        entry = self._entry(args, kwargs)
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
        entry = self._planned()
        return born_sharded(entry, create, args, self.__name__, kwargs)

    def _planned(self) -> Entry:
        functions = [self._plain, *self.functions.values(), self._graph]
        found = [f.planned for f in functions if f is not None and f.planned is not None]
        if found:
            return found[-1]
        if self.example is None:
            raise PlanError(
                f"auto_shard({self.__name__}).init: there is no plan to shard by. Call "
                ".plan(...) with the shapes of the arguments first, or pass example=(...) to auto_shard"
            )
        return self._entry(self.example, {})


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


def _is_positive(n: Any) -> bool:
    """Whether this is a number above 0 of whatever type."""
    try:
        return not isinstance(n, str | bytes | bool) and float(n) > 0
    except (TypeError, ValueError, OverflowError):
        return False


def _checked(verify: int, measure: int, **options: Any) -> dict[str, Any]:
    """The options of a plan, after a look at their types.

    Raises:
        PlanError: naming the one that cannot be used.
    """
    for name, count, what in (("verify", verify, "compile for the target"), ("measure", measure, "run")):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise PlanError(f"{name} is {shortly(count)}; give the number of plans to {what}, 0 for none")
    if verify and measure:
        raise PlanError("verify and measure both choose among the best plans: give one of them")
    made, limit, target = options["plan"], options["memory_limit_bytes"], options["target"]
    if target is not None:
        check_name(target)
    if not isinstance(options["strict"], bool):
        raise PlanError(f"strict is {shortly(options['strict'])}; give True or False")
    if isinstance(made, Mapping):
        Table.read(made)
    elif made is not None and not isinstance(made, (str, Plan)):
        raise PlanError(
            f"plan is {shortly(made)}; give words such as 'fsdp:8', a table such as {{'fsdp': ['batch']}}, or a Plan"
        )
    if isinstance(made, Plan) and options["fixed"]:
        raise PlanError(
            "plan is a Plan, which says where every input lies, and fixed says it too. Drop one, or give the plan's "
            f"words with fixed: plan={made.chosen!r}"
        )
    if limit is not None and not _is_positive(limit):
        raise PlanError(
            f"memory_limit_bytes is {shortly(limit)}; give a positive number of bytes on each device, such as 4 * 2**30"
        )
    options["memory_limit_bytes"] = limit if limit is None else float(limit)
    return options | {name: n for name, n in (("verify", verify), ("measure", measure)) if n}
