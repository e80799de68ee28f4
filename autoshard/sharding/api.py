"""`auto_shard`: a function or a Flax module class, planned at its first call and run sharded.

A call costs what `jax.jit` costs: the last planned function is called at once, and jit's own cache says what is new.
Only if it refuses (another structure, another shape, arrays that lie elsewhere) are the arguments looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.sharding.machine import MeshLike
from autoshard.sharding.plan import Plan, PlanError
from autoshard.sharding.planner import NewSignature, PlanLike, argnums, plan_traced
from autoshard.sharding.tracing import Traced, path_of, trace


def auto_shard(
    obj: Any = None,
    /,
    *,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Mapping[str, Sequence[Any]] | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    example: tuple[Any, ...] | None = None,
    verify: int = 0,
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
        example: arguments (or their shapes) to plan from before the first call.
        verify: see `autoshard.plan`.
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
    options = dict(
        mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes, fixed=fixed, plan=plan, strict=strict,
    )  # fmt: skip
    if verify:
        raise PlanError("verify: compiling plans for a target is not there yet; leave verify=0")
    if obj is None:
        return functools.partial(auto_shard, **options, variants=variants, donate_argnums=donate_argnums,
                                 static_argnums=static_argnums, example=example)  # fmt: skip
    if inspect.isclass(obj):
        from autoshard.sharding.modules import shard_class

        return shard_class(obj, options)
    if not callable(obj):
        raise PlanError(f"auto_shard takes a function or a Flax module class, got {type(obj).__name__} {obj!r:.60}")
    return AutoSharded(obj, options, variants, donate_argnums, static_argnums, example)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Mapping[str, Sequence[Any]] | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: int = 0,
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
        fixed: `{path glob: PartitionSpec}` on a named mesh, or `{path glob: names of logical axes}`.
        plan: ask for a plan: "fsdp:8 tp:4 seq", `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`, or a `Plan`.
        variants: `{static keyword: values}`: the best of them is planned.
        donate_argnums: arguments whose buffers the results may take.
        static_argnums: arguments that are not arrays.
        verify: how many of the best plans to compile for the target; must be 0 in this version.
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
    if verify:
        raise PlanError("verify: compiling plans for a target is not there yet; leave verify=0")
    options = dict(
        mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes, fixed=fixed, plan=plan, strict=strict
    )
    return AutoSharded(fn, options, variants, donate_argnums, static_argnums).plan(*args, **kwargs)


def bind(plan: Plan, fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Plan:
    """See `Plan.bind`."""
    if not args:
        raise PlanError("Plan.bind needs the function's arguments or their shapes: plan.bind(fn, state, batch)")
    return globals()["plan"](fn, *args, plan=plan, target=plan.target, **options)


class Entry:
    """One planned signature: the plan, the function jitted by it, and the shardings of its inputs."""

    def __init__(self, plan: Plan, traced: Traced):
        self.plan, self.traced = plan, traced

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of devices; only a call needs them, a plan can be for a machine that is not here."""
        return self.plan.bound.mesh_over(self.plan, None)

    @functools.cached_property
    def jitted(self) -> Any:
        """The annotated function under `jax.jit`."""
        return self.plan.bound.jit(self.plan, self.mesh if self.plan.bound.mesh is None else None)

    @functools.cached_property
    def in_shardings(self) -> list[Any]:
        """The sharding of each flat input."""
        return self.plan.shardings(self.mesh)[0]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, those that lie elsewhere moved to where the plan has them."""
        return [
            jax.device_put(x, s) if lies_elsewhere(x, s) else x for x, s in zip(leaves, self.in_shardings, strict=True)
        ]


def lies_elsewhere(x: Any, wanted: Any) -> bool:
    """Whether an array must be moved to where a plan has it, or to Auto axes."""
    if not isinstance(x, jax.Array) or _compat.is_tracer(x):
        return False
    return not x.sharding.is_equivalent_to(wanted, x.ndim) or _compat.has_explicit_axes(x.sharding)


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
        self.entries: dict[Any, Entry] = {}
        self.last: Entry | None = None
        self.originals: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # nnx objects behind the pure arguments
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, planned for these arguments."""
        entry = self.last
        if entry is None or kwargs or len(self.entries) > 1:
            return self.look(args, kwargs)
        try:
            return entry.jitted(*args)
        except NewSignature:
            return self.look(args, kwargs)
        except (ValueError, TypeError, AssertionError):
            if self.signature(args, kwargs) in self.entries and not self.misplaced(entry, args):
                raise  # the arguments are the planned ones: the error is the function's own
            return self.look(args, kwargs)

    @staticmethod
    def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a plan depends on: structure, shapes, dtypes."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        return tree, tuple((jax.numpy.shape(x), _dtype(x)) for x in leaves)

    @staticmethod
    def misplaced(entry: Entry, args: tuple[Any, ...]) -> bool:
        """Whether an argument lies elsewhere than the plan has it."""
        leaves = jax.tree.leaves((args, {}))
        return len(leaves) == len(entry.in_shardings) and any(
            lies_elsewhere(x, s) for x, s in zip(leaves, entry.in_shardings, strict=True)
        )

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with the arguments looked at: plans what is new, moves what lies elsewhere."""
        leaves = jax.tree.leaves((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if _compat.is_tracer(x)]
        if traced and not _compat.under_trace():
            path = path_of(jax.tree_util.tree_flatten_with_path((args, kwargs))[0][traced[0]][0][1:])
            raise PlanError(
                f"auto_shard({getattr(self, '__name__', 'function')}): argument '{path}' is a leaked tracer "
                f"({leaves[traced[0]].aval.str_short()}): a value of a function that was being traced was kept outside "
                "of it. Return it from that function instead"
            )
        entry = self.entry(args, kwargs)
        if traced:  # somebody's trace: only constrain
            run = entry.plan.bound.run(entry.mesh)
            return jax.tree.unflatten(entry.traced.out_tree, run(*leaves))
        args, kwargs = jax.tree.unflatten(entry.traced.in_tree, entry.place(leaves))
        self.last = entry
        return entry.jitted(*args, kwargs) if kwargs else entry.jitted(*args)

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The plan for these arguments, made if there is none."""
        key = self.signature(args, kwargs)
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = self.make(args, kwargs)
            self.last = found
        return found

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Traces and plans."""
        made, originals = [], self.originals
        names = _compat.nnx_paths(*originals) if originals is not None else None
        written = _compat.written_specs(*(originals or (args, kwargs)), graph=originals is not None)
        for choice in _choices(self.variants):
            fn = functools.partial(self.fn, **choice) if choice else self.fn
            traced = trace(fn, args, kwargs, self.donate, names, written)
            plan = plan_traced(traced, (args, kwargs), **self.options)
            made.append((plan.where(notes=(f"variant: {choice}", *plan.notes)) if choice else plan, traced))
        return Entry(*min(made, key=lambda pair: pair[0].estimate.step_time_us))


def _choices(variants: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    import itertools

    if not variants:
        return [{}]
    return [dict(zip(variants, values, strict=True)) for values in itertools.product(*variants.values())]


def _dtype(x: Any) -> Any:
    dtype = x.dtype if hasattr(x, "dtype") else jax.numpy.result_type(x)
    return dtype if _compat.is_extended(dtype) else jax.dtypes.canonicalize_dtype(dtype)


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
        functools.update_wrapper(self, fn)
        self.fn, self.options, self.variants, self.example = fn, options, variants, example
        self.static = [static_argnums] if isinstance(static_argnums, int) else list(static_argnums)
        self.donate = argnums(donate_argnums, self.static)
        self.pure: dict[Any, PureFunction] = {}
        self._call = self._plain_call if not self.static else self._static_call
        self._plain = self._make(fn) if not self.static else None
        self._graph: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, planned for these arguments."""
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _make(self, fn: Callable[..., Any]) -> PureFunction:
        return PureFunction(fn, self.options, self.donate, self.variants)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain
        assert plain is not None
        if plain.last is None and _compat.has_graph_nodes((args, kwargs)):
            self._call = self._graph_call
            return self._graph_call(*args, **kwargs)
        return plain(*args, **kwargs)

    def _graph_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._graph_function()(*args, **kwargs)

    def _graph_function(self) -> Any:
        if self._graph is None:
            self._graph = GraphFunction(self.fn, self._make)
        return self._graph

    def _static_call(self, *args: Any, **kwargs: Any) -> Any:
        target, rest = self._without_static(args)
        return target(*rest, **kwargs)

    def _without_static(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The function with its static arguments filled in, and the rest."""
        fixed = {n % len(args): args[n] for n in self.static}
        rest = tuple(a for i, a in enumerate(args) if i not in fixed)
        key = tuple(fixed.items())
        if key not in self.pure:
            fn, count = self.fn, len(args)

            def call(*arrays: Any, **kwargs: Any) -> Any:
                left = iter(arrays)
                return fn(*(fixed[i] if i in fixed else next(left) for i in range(count)), **kwargs)

            functools.update_wrapper(call, fn)
            graph = _compat.has_graph_nodes(rest)
            self.pure[key] = GraphFunction(call, self._make) if graph else self._make(call)  # type: ignore[assignment]
        return self.pure[key], rest

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        if self.static:
            return self._without_static(args)
        if _compat.has_graph_nodes((args, kwargs)):
            self._call = self._graph_call
            return self._graph_function(), args
        return self._plain, args

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        target, rest = self._target(args, kwargs)
        return target.entry(rest, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or shapes); kept for the calls that follow."""
        return self._entry(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """What `jax.jit(...).lower` gives, for these arguments (arrays or shapes)."""
        entry = self._entry(args, kwargs)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in entry.traced.in_avals]
        args, kwargs = jax.tree.unflatten(entry.traced.in_tree, shapes)
        return entry.jitted.lower(*args, kwargs) if kwargs else entry.jitted.lower(*args)

    def init(self, create: Callable[..., Any], *args: Any) -> Any:
        """Runs `create(*args)` so that its result is born sharded as this function's plan has it.

        Args:
            create: makes the state; it is never whole on one device.
            *args: its arguments, such as a random key.

        Raises:
            PlanError: there is no plan yet, or no argument of the planned function has this structure.
        """
        entry = self._planned()
        return born_sharded(entry, create, args, getattr(self, "__name__", "function"))

    def _planned(self) -> Entry:
        functions = [self._plain, *self.pure.values(), self._graph]
        found = [f.last for f in functions if f is not None and f.last is not None]
        if found:
            return found[-1]
        if self.example is None:
            raise PlanError(
                f"auto_shard({getattr(self, '__name__', 'function')}).init: there is no plan to shard by. Call "
                ".plan(...) with the shapes of the arguments first, or pass example=(...) to auto_shard"
            )
        return self._entry(self.example, {})


class GraphFunction:
    """A function of nnx objects, with the semantics of `nnx.jit`; its pure part is planned."""

    def __init__(self, fn: Callable[..., Any], make: Callable[[Callable[..., Any]], PureFunction]):
        self.fn = fn
        self.wrapped, self.pure = _compat.nnx_jit(fn, make)

    @property
    def last(self) -> Entry | None:
        """The entry that was planned last."""
        return self.pure.last

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
        found.plan.bound.wrap = lambda jitted: _compat.nnx_jit(self.fn, lambda _: jitted)[0]
        return found


def born_sharded(entry: Entry, create: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """See `AutoSharded.init`."""
    numbers = {i: a for i, a in enumerate(args) if isinstance(a, (bool, int, float))}  # seeds and the like
    args = tuple(a for i, a in enumerate(args) if i not in numbers)

    def with_numbers(*arrays: Any) -> Any:
        left = iter(arrays)
        return create(*(numbers[i] if i in numbers else next(left) for i in range(len(numbers) + len(arrays))))

    pure, rebuild = _compat.split_graph(with_numbers)
    shapes = jax.eval_shape(pure, *args)
    wanted = jax.tree_util.tree_flatten_with_path(shapes)[0]
    paths, avals = entry.traced.in_paths, entry.traced.in_avals
    by_owner: dict[int, dict[str, int]] = {}
    for i, (owner, path) in enumerate(zip(entry.traced.owners, paths, strict=True)):
        by_owner.setdefault(owner, {})[path.partition("/")[2]] = i
    everything = dict(zip(paths, range(len(paths)), strict=True))
    for part in [*by_owner.values(), everything]:
        picked = [part.get(path_of(k)) for k, _ in wanted]
        if all(i is not None and avals[i].shape == s.shape and avals[i].dtype == s.dtype
               for i, (_, s) in zip(picked, wanted, strict=True)) and wanted:  # fmt: skip
            shardings = [entry.in_shardings[i] for i in picked]  # type: ignore[index]
            out = jax.tree.unflatten(jax.tree.structure(shapes), shardings)
            return rebuild(jax.jit(pure, out_shardings=out)(*args))
    have = ", ".join(sorted({p.partition("/")[0] for p in paths}))
    raise PlanError(
        f"auto_shard({name}).init: {getattr(create, '__name__', 'the function')} makes {len(wanted)} arrays "
        f"({', '.join(path_of(k) for k, _ in wanted[:4])}, ...), which fit none of the planned arguments ({have}). "
        "It must return one of them, with the same structure, shapes and dtypes"
    )
