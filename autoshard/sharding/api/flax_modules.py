"""`auto_shard` on a Flax module class: parameters are created sharded, and calls run under a plan.

The class is changed in place and keeps its name. A module is planned for training: a plan of its forward pass and its
gradient fixes the shardings of the parameters. Every call of the module is then planned with these shardings: with the
same strategy if the call supports it (a call without a batch has no axis for some of its words), else by a search.
Inside a step that is itself under `auto_shard`, and while its class is being planned, a module does nothing: the outer
plan applies.

Arrays and floats are the data of a call. Everything else (flags, ints, `None`, lists of them) is static. A call with
other static arguments is planned again, so pass values that change at every call as arrays.

A class derived from a decorated nnx class inherits its planned `__call__`, and `.sharded` plans the `__call__` of the
derived class. If that overrides `__call__`, only its `super().__call__` runs under a plan; decorate the derived class
too, and it has its own plan. In a linen class `apply` and `init` are planned, so a derived class is always planned
completely. `.autoshard_plan` of each class is its last plan. Other methods are unchanged.
"""

from __future__ import annotations

import functools
import glob
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import FlaxError

from autoshard import _compat
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.sharding.api.auto_sharded import AutoSharded
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.program.static_leaves import frozen
from autoshard.sharding.program.tracing import OUTER_PLAN, path_of
from autoshard.sharding.runtime.dispatch import PureFunction
from autoshard.sharding.runtime.planned_signature import PlannedSignature
from autoshard.sharding.runtime.sharded_init import create_sharded
from autoshard.sharding.runtime.static_arguments import Arguments, split_arguments


def shard_class(
    cls: type, options: Mapping[str, Any], example: tuple[Any, ...] | None = None, others: Sequence[str] = ()
) -> type:
    """Apply `auto_shard` to a class; `others` are the names of options that were given and apply to functions only.

    Raises:
        PlanError: the class is not a Flax module, has no `__call__`, or does not support an option.
    """
    if others:
        raise PlanError(f"auto_shard({cls.__name__}): {', '.join(others)} cannot be used on a class: its calls donate, "
                        "offload and replace nothing, and arguments that are not arrays are static. Use it on the step "
                        "that calls the module")  # fmt: skip
    if example is not None and issubclass(cls, linen.Module):
        raise PlanError(f"auto_shard({cls.__name__}): example cannot be used on a linen class: its init plans from its "
                        "own arguments. Leave it out")  # fmt: skip
    if issubclass(cls, linen.Module):
        return _shard_linen(cls, options)
    if not issubclass(cls, nnx.Module):
        raise PlanError(f"auto_shard takes a function or a Flax module class, got class {cls.__name__}: decorate the "
                        "step that uses it, or derive it from nnx.Module or linen.Module")  # fmt: skip
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise PlanError(f"auto_shard({cls.__name__}): the class has no __call__ to plan. Decorate the derived class "
                        "that has one, or the function that calls its methods")  # fmt: skip
    return _shard_nnx(cls, options, example)


# --- plans of a class's calls -----------------------------------------------------------------------------------------


class ModuleCalls:
    """The planned forward passes of a module class, one function for each set of static arguments."""

    def __init__(self, forward: Callable[..., Any], options: Mapping[str, Any], name: str, trainings: list[Plan]):
        self.forward, self.options, self.name = forward, options, name
        self.trainings = trainings  # plans for training, which fix the shardings of the parameters
        self.functions: dict[Any, ForwardFunction] = {}
        self.warned = False

    def function(self, arguments: Arguments) -> ForwardFunction:
        """Return the planned function for these static arguments."""
        function = self.functions.get(arguments.key)
        if function is None:
            function = self.functions[arguments.key] = ForwardFunction(self)
        function.arguments = arguments  # a list may have been changed since the last call: trace with this call's
        return function

    def __call__(self, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Any]:
        """Return the plan and the result of a call on `first`: the module, or a linen module's variables."""
        arguments = split_arguments((first, *args), kwargs, self.name)
        if _compat.under_trace() and not self.warned and not self.trainings:
            self.warned = True
            warnings.warn(
                f"auto_shard({self.name}): the first call is inside a transformed function (jit, grad, ...): its "
                "values get sharding constraints, but its parameters are not moved. Decorate that function, or make "
                f"the module with {self.name}.sharded(...)",
                AutoshardWarning,
                stacklevel=users_stacklevel(),
            )
        function = self.function(arguments)
        result = function(*arguments.args, **arguments.kwargs)
        return function.plan_of(function.planned()), result

    def entry(self, first: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedSignature:
        """Plan a call without running it."""
        arguments = split_arguments((first, *args), kwargs, self.name)
        return self.function(arguments).entry(arguments.args, arguments.kwargs)


class ForwardFunction(AutoSharded):
    """A module's forward pass with one set of static arguments."""

    arguments: Arguments

    def __init__(self, calls: ModuleCalls):
        self.calls = calls

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.arguments.merge(args, kwargs)
            return calls.forward(*args, **kwargs)

        forward.__name__ = calls.name
        super().__init__(forward, calls.options)

    def _make(self, fn: Callable[..., Any]) -> PureFunction:
        return ForwardPure(fn, self)


class ForwardPure(PureFunction):
    """The pure part of a forward pass. Each signature is planned with the training plan's parameter shardings."""

    def __init__(self, fn: Callable[..., Any], forward: ForwardFunction):
        super().__init__(fn, forward.options, ())
        self.forward = forward

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedSignature:
        """Trace and plan a new signature."""
        leaves = self._module_leaves(args, kwargs)
        training = self._training(leaves, args, kwargs)
        parameters = {x.path: x.spec for x in _of_module(training) if leaves.get(x.path) == _type_of(x)}
        original = self.options
        strategy = training.chosen if original["plan"] is None else original["plan"]
        fixed = {**(original["fixed"] or {}), **{glob.escape(path): spec for path, spec in parameters.items()}}
        options = {**original, "memory_limit_bytes": float("inf"), "plan": strategy, "fixed": fixed}
        mesh = training.bound.executable.mesh if training.bound is not None else None
        sizes = dict(zip(training.mesh.axis_names, training.mesh.axis_sizes, strict=True))
        try:
            self.options = {**options, "mesh": sizes} if isinstance(strategy, Mapping) and mesh is None else options
            first_error = None
            try:
                entry = super().make(args, kwargs)
                here = {x.path: x.spec for x in entry.plan.inputs}
                same_mesh = entry.plan.mesh == training.mesh and mesh in (None, entry.bound.executable.mesh)
                if same_mesh and all(here[path] == spec for path, spec in parameters.items()):
                    return entry
            except AutoshardError as error:  # the strategy does not apply to this call
                first_error = error
            self.options = {**options, "plan": None, "mesh": sizes if mesh is None else mesh}
            try:
                return super().make(args, kwargs)
            except AutoshardError as error:
                raise first_error or error from error
        finally:
            self.options = original

    def _training(self, leaves: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Return the training plan for a call's parameters. Makes one if there is none."""
        trainings = self.forward.calls.trainings
        for plan in trainings:
            inputs = _of_module(plan)
            required = [x for x in inputs if x.role == "parameter"] or inputs
            if all(leaves.get(x.path) == _type_of(x) for x in required):
                return plan
        plan = self.options["plan"]
        if not isinstance(plan, Plan):
            args, kwargs = self.graph_arguments or (args, kwargs)
            plan = AutoSharded(_with_gradient(self.forward.fn), self.options).plan(*args, **kwargs)
        trainings.append(plan)
        return plan

    def _module_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Map the path of every array of the module to its shape and dtype."""
        flat = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        paths = (
            _compat.nnx_paths(*self.graph_arguments)
            if self.graph_arguments
            else [path_of(keys[1:]) for keys, _ in flat]
        )
        return {
            path: (tuple(np.shape(x)), str(getattr(x, "dtype", type(x))))
            for path, (_, x) in zip(paths, flat, strict=True)
            if path.partition("/")[0] == "0"
        }


def _of_module(plan: Plan) -> list[Leaf]:
    return [leaf for leaf in plan.inputs if leaf.path.partition("/")[0] == "0"]


def _type_of(leaf: Leaf) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), leaf.dtype


def _with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same arguments that also computes the gradients of all floating-point leaves."""

    def training(*args: Any, **kwargs: Any) -> Any:
        graphdef, state = nnx.split((args, kwargs))
        leaves, tree = jax.tree.flatten(state)
        real = [i for i, x in enumerate(leaves) if _has_gradient(x)]

        def forward(floats: list[Any]) -> list[Any]:
            merged = list(leaves)
            for i, x in zip(real, floats, strict=True):
                merged[i] = x
            args, kwargs = nnx.merge(graphdef, jax.tree.unflatten(tree, merged))
            return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if _has_gradient(x)]

        out, back = jax.vjp(forward, [leaves[i] for i in real])
        return out, back(out)

    training.__name__ = getattr(fn, "__name__", "training")
    return training


def _has_gradient(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


# --- nnx --------------------------------------------------------------------------------------------------------------


def _shard_nnx(cls: Any, options: Mapping[str, Any], default_example: tuple[Any, ...] | None) -> type:
    original = cls.__call__
    trainings: list[Plan] = []
    by_class: dict[type, ModuleCalls] = {}

    def calls(klass: Any, forward: Callable[..., Any]) -> ModuleCalls:
        if klass not in by_class:
            by_class[klass] = ModuleCalls(forward, options, klass.__name__, trainings)
        return by_class[klass]

    planned = calls(cls, original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get():
            return original(self, *args, **kwargs)
        type(self).autoshard_plan, result = planned(self, args, kwargs)
        return result

    def sharded(klass: Any, *args: Any, example: tuple[Any, ...] | None = default_example, **kwargs: Any) -> Any:
        """Construct the module with its parameters sharded from the start.

        Args:
            klass: the class, or one derived from it.
            *args: for the constructor.
            example: arguments of a call (arrays or shapes) to plan from; default: the decorator's `example`.
            **kwargs: for the constructor.

        Raises:
            PlanError: there is no example.
        """
        if example is None:
            raise PlanError(f"{klass.__name__}.sharded: there is no example to plan from: pass example=(...), the "
                            "arguments of a call or their shapes")  # fmt: skip
        graphdef, state = nnx.split((args, kwargs))

        def create(inputs: Any) -> Any:
            a, k = nnx.merge(graphdef, inputs)
            return klass(*a, **k), (a, k)

        abstract = nnx.eval_shape(lambda s: create(s)[0], state)
        own = planned if klass.__call__ is call else calls(klass, klass.__call__)
        entry = own.entry(abstract, tuple(example), {})
        klass.autoshard_plan = Plan.of(entry.bound)
        model = create_sharded(entry, lambda s: create(s)[0], (state,), klass.__name__)
        advanced = nnx.split(jax.jit(lambda s: nnx.split(create(s)[1])[1])(state))[1]
        nnx.update((args, kwargs), advanced)
        return model

    cls.__call__, cls.sharded, cls.autoshard_plan = call, classmethod(sharded), None
    cls.__wrapped__ = original
    return cls


# --- linen ------------------------------------------------------------------------------------------------------------


def _shard_linen(cls: Any, options: Mapping[str, Any]) -> type:
    original_apply, original_init = cls.apply, cls.init
    by_module: dict[Any, ModuleCalls] = {}

    def calls(module: Any) -> ModuleCalls:
        key = frozen(module, "")
        if key not in by_module:
            forward = functools.partial(original_apply, module)
            by_module[key] = ModuleCalls(forward, options, type(module).__name__, [])
        return by_module[key]

    @functools.wraps(original_apply)
    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get():
            return original_apply(self, variables, *args, **kwargs)
        type(self).autoshard_plan, result = calls(self)(variables, args, kwargs)
        return result

    @functools.wraps(original_init)
    def init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get() or _compat.under_trace():
            return original_init(self, rngs, *args, **kwargs)
        name = type(self).__name__
        arguments = split_arguments((rngs, *args), kwargs, name)

        def create(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = arguments.merge(args, kwargs)
            return original_init(self, *args, **kwargs)

        variables = jax.eval_shape(create, arguments.args, arguments.kwargs)
        try:
            entry = _entry_for_init(calls(self), variables, rngs, args, kwargs)
        except (AutoshardError, AutoshardWarning):
            raise
        except Exception as error:  # the user's forward may raise anything; the warning names it
            warnings.warn(
                f"auto_shard({name}): init made the variables on one device, because the forward pass that determines "
                f"their shardings cannot be traced ({type(error).__name__}: {error}). The first apply moves them",
                AutoshardWarning,
                stacklevel=users_stacklevel(),
            )
            return original_init(self, rngs, *args, **kwargs)
        type(self).autoshard_plan = Plan.of(entry.bound)
        return create_sharded(entry, create, (arguments.args, arguments.kwargs), name)

    cls.apply, cls.init, cls.autoshard_plan = apply, init, None
    cls.__wrapped__ = original_apply
    return cls


def _entry_for_init(
    calls: ModuleCalls, variables: Any, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PlannedSignature:
    """Plan the forward pass that `init` runs as a call of `apply`.

    First tries a call without random streams and with immutable variables. A forward pass that needs more gets the
    streams of `init` and may change all variables.
    """
    kwargs = {k: v for k, v in kwargs.items() if k not in ("mutable", "capture_intermediates")}
    streams = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    others = {k: v for k, v in streams.items() if k != "params"}
    attempts = [{}, {"mutable": True, **({"rngs": others} if others else {})}, {"mutable": True, "rngs": streams}]
    for extra in attempts[:-1]:
        try:
            return calls.entry(variables, args, {**kwargs, **extra})
        except (AutoshardError, AutoshardWarning):
            raise
        except FlaxError:  # the call needs another stream or collection; the last attempt raises the error
            continue
    return calls.entry(variables, args, {**kwargs, **attempts[-1]})
