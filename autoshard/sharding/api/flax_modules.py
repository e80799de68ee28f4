"""`auto_shard` on a Flax module class: its parameters are born sharded and its calls constrained.

The class itself is changed and keeps its name. A module is planned for training: the plan is made for its forward pass
and its gradient, and says where the parameters lie. Every call of the module is then planned with the parameters left
there: by the same words where they fit it (a call without a batch has no axis for some of them), else by a search.
Inside a step that is itself under `auto_shard`, and while its class is being planned, a module does nothing: the outer
plan rules.

Arrays and floats are the data of a call. All else (flags, numbers of taps, `None`, lists of them) is static: a call
with other static arguments is planned anew, so pass what changes at every call as an array.

A class derived from a decorated nnx class inherits its planned `__call__`, and `.sharded` plans the derived class's
own. If it overrides `__call__`, only the `super().__call__` in it is planned; decorate the derived class too, and its
plan is its own. Of a linen class `apply` and `init` are planned, so a derived class is always planned whole. The last
plan of each class is at its own `.autoshard_plan`. Other methods are left alone.
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
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.sharding.api.auto_sharded import AutoSharded
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.program.tracing import OUTER_PLAN, path_of
from autoshard.sharding.runtime.dispatch import Entry, PureFunction
from autoshard.sharding.runtime.sharded_init import born_sharded
from autoshard.sharding.runtime.static_arguments import Arguments, frozen, split_arguments


def shard_class(
    cls: type, options: Mapping[str, Any], example: tuple[Any, ...] | None = None, others: Sequence[str] = ()
) -> type:
    """See `auto_shard`; `others` are the names of options that only a function can use.

    Raises:
        PlanError: the class is no Flax module, has nothing to call, or was given what means nothing on it.
    """
    if others:
        raise PlanError(f"auto_shard({cls.__name__}): {', '.join(others)} means nothing on a class, whose calls donate "
                        "nothing and take what is no array as static: give it to the step that uses it")  # fmt: skip
    if example is not None and issubclass(cls, linen.Module):
        raise PlanError(f"auto_shard({cls.__name__}): example means nothing on a linen class: its init plans from the "
                        "arguments that it is given")  # fmt: skip
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
        self.trainings = trainings  # what was planned for training: it says where parameters lie
        self.functions: dict[Any, ForwardFunction] = {}
        self.told = False

    def function(self, given: Arguments) -> ForwardFunction:
        """The planned function for these static arguments."""
        found = self.functions.get(given.key)
        if found is None:
            found = self.functions[given.key] = ForwardFunction(self)
        found.given = given  # equal by key, but a list may have been changed since: trace with those of this call
        return found

    def __call__(self, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Any]:
        """The plan and the result of a call on `first`: the module, or a linen module's variables."""
        given = split_arguments((first, *args), kwargs, self.name)
        if _compat.under_trace() and not self.told and not self.trainings:
            self.told = True
            warnings.warn(
                f"auto_shard({self.name}): first called under somebody's trace (jit, grad, ...): its calls are "
                "constrained, its parameters stay where they are. Decorate that function, or make the module with "
                f"{self.name}.sharded(...)",
                AutoshardWarning,
                stacklevel=3,
            )
        function = self.function(given)
        result = function(*given.args, **given.kwargs)
        return function.plan_of(function.planned()), result

    def entry(self, first: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The planned call, not run."""
        given = split_arguments((first, *args), kwargs, self.name)
        return self.function(given).entry(given.args, given.kwargs)


class ForwardFunction(AutoSharded):
    """A module's forward pass with one set of static arguments."""

    given: Arguments

    def __init__(self, calls: ModuleCalls):
        self.calls = calls

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.given.merge(args, kwargs)
            return calls.forward(*args, **kwargs)

        forward.__name__ = calls.name
        super().__init__(forward, calls.options)

    def _make(self, fn: Callable[..., Any]) -> PureFunction:
        return ForwardPure(fn, self)


class ForwardPure(PureFunction):
    """The pure part of a forward pass: each signature is planned around the layout of the parameters for training."""

    def __init__(self, fn: Callable[..., Any], forward: ForwardFunction):
        super().__init__(fn, forward.options, ())
        self.forward = forward

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Traces and plans."""
        leaves = self._module_leaves(args, kwargs)
        training = self._training(leaves, args, kwargs)
        stays = {x.path: x.spec for x in _of_module(training) if leaves.get(x.path) == _type_of(x)}
        original = self.options
        words = training.chosen if original["plan"] is None else original["plan"]
        pins = {**(original["fixed"] or {}), **{glob.escape(path): spec for path, spec in stays.items()}}
        options = {**original, "memory_limit_bytes": float("inf"), "plan": words, "fixed": pins}
        mesh = training.bound.executable.mesh if training.bound is not None else None
        sizes = dict(zip(training.mesh.axis_names, training.mesh.axis_sizes, strict=True))
        try:
            self.options = {**options, "mesh": sizes} if isinstance(words, Mapping) and mesh is None else options
            refusal = None
            try:
                entry = super().make(args, kwargs)
                here = {x.path: x.spec for x in entry.plan.inputs}
                same_mesh = entry.plan.mesh == training.mesh and mesh in (None, entry.bound.executable.mesh)
                if same_mesh and all(here[path] == spec for path, spec in stays.items()):
                    return entry
            except AutoshardError as error:  # the words do not fit this call
                refusal = error
            self.options = {**options, "plan": None, "mesh": sizes if mesh is None else mesh}
            try:
                return super().make(args, kwargs)
            except AutoshardError as error:
                raise refusal or error from error
        finally:
            self.options = original

    def _training(self, leaves: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan for training that this call's parameters are laid out by, made if there is none."""
        trainings = self.forward.calls.trainings
        for plan in trainings:
            inputs = _of_module(plan)
            asked = [x for x in inputs if x.role == "parameter"] or inputs
            if all(leaves.get(x.path) == _type_of(x) for x in asked):
                return plan
        made = self.options["plan"]
        if not isinstance(made, Plan):
            args, kwargs = self.originals or (args, kwargs)
            made = AutoSharded(_with_gradient(self.forward.fn), self.options).plan(*args, **kwargs)
        trainings.append(made)
        return made

    def _module_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Path -> shape and dtype of every array of the module."""
        flat = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        paths = _compat.nnx_paths(*self.originals) if self.originals else [path_of(keys[1:]) for keys, _ in flat]
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
    """A function of the same arguments that also computes the gradients with respect to all that can have one."""

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


def _shard_nnx(cls: Any, options: Mapping[str, Any], usual: tuple[Any, ...] | None) -> type:
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

    def sharded(klass: Any, *args: Any, example: tuple[Any, ...] | None = usual, **kwargs: Any) -> Any:
        """Makes the module with its parameters born sharded.

        Args:
            klass: the class, or one derived from it.
            *args: for the constructor.
            example: arguments of a call (arrays or shapes), to plan from; default: those that the class was decorated
                with.
            **kwargs: for the constructor.

        Raises:
            PlanError: there is no example.
        """
        if example is None:
            raise PlanError(f"{klass.__name__}.sharded: there is nothing to plan from: give example=(...), the "
                            "arguments of a call or their shapes")  # fmt: skip
        graphdef, state = nnx.split((args, kwargs))

        def create(inputs: Any) -> Any:
            a, k = nnx.merge(graphdef, inputs)
            return klass(*a, **k), (a, k)

        abstract = nnx.eval_shape(lambda s: create(s)[0], state)
        own = planned if klass.__call__ is call else calls(klass, klass.__call__)
        entry = own.entry(abstract, tuple(example), {})
        klass.autoshard_plan = Plan.of(entry.bound)
        model = born_sharded(entry, lambda s: create(s)[0], (state,), klass.__name__)
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
        given = split_arguments((rngs, *args), kwargs, name)

        def create(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = given.merge(args, kwargs)
            return original_init(self, *args, **kwargs)

        variables = jax.eval_shape(create, given.args, given.kwargs)
        try:
            entry = _entry_for_init(calls(self), variables, rngs, args, kwargs)
        except (AutoshardError, AutoshardWarning):
            raise
        except Exception as error:  # the user's forward may raise anything; the warning names it
            warnings.warn(
                f"auto_shard({name}): init made the variables on one device, because the forward pass that says where "
                f"they lie could not be traced ({type(error).__name__}: {error}). They are moved at the first apply",
                AutoshardWarning,
                stacklevel=2,
            )
            return original_init(self, rngs, *args, **kwargs)
        type(self).autoshard_plan = Plan.of(entry.bound)
        return born_sharded(entry, create, (given.args, given.kwargs), name)

    cls.apply, cls.init, cls.autoshard_plan = apply, init, None
    cls.__wrapped__ = original_apply
    return cls


def _entry_for_init(
    calls: ModuleCalls, variables: Any, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Entry:
    """The plan of the forward pass that `init` runs, as `apply` would run it.

    Most likely is a call without random streams that changes no variables. A forward pass that needs more gets the
    streams of `init`, and may change what it wants.
    """
    kwargs = {k: v for k, v in kwargs.items() if k not in ("mutable", "capture_intermediates")}
    streams = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    others = {k: v for k, v in streams.items() if k != "params"}
    ways = [{}, {"mutable": True, **({"rngs": others} if others else {})}, {"mutable": True, "rngs": streams}]
    for way in ways[:-1]:
        try:
            return calls.entry(variables, args, {**kwargs, **way})
        except (AutoshardError, AutoshardWarning):
            raise
        except FlaxError:  # a stream or a collection that this way does not give; the last way raises it
            continue
    return calls.entry(variables, args, {**kwargs, **ways[-1]})
