"""`auto_shard` on a Flax module class: its parameters are born sharded and its calls constrained.

The class itself is changed and keeps its name. A module is planned for training: the plan is made for its forward pass
and its gradient, and the forward pass is laid out by the same words. Inside a step that is itself under `auto_shard`,
and while its class is being planned, a module does nothing: the outer plan rules.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from autoshard import _compat
from autoshard.errors import AutoshardWarning
from autoshard.sharding.api import AutoSharded, born_sharded
from autoshard.sharding.plan import Plan, PlanError
from autoshard.sharding.tracing import OUTER_PLAN


def shard_class(cls: type, options: Mapping[str, Any]) -> type:
    """See `auto_shard`.

    Raises:
        PlanError: the class is no Flax module.
    """
    if issubclass(cls, nnx.Module):
        return _shard_nnx(cls, options)
    if issubclass(cls, linen.Module):
        return _shard_linen(cls, options)
    raise PlanError(f"auto_shard takes a function or a Flax module class, got class {cls.__name__}: decorate the step "
                    "that uses it, or derive it from nnx.Module or linen.Module")  # fmt: skip


class ModuleCalls:
    """The planned forward passes of a module class, one for each set of non-array arguments."""

    def __init__(self, forward: Callable[..., Any], options: Mapping[str, Any], name: str):
        self.forward, self.options, self.name = forward, options, name
        self.functions: dict[Any, AutoSharded] = {}
        self.told = False

    def function(
        self, statics: tuple[tuple[Any, Any], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AutoSharded:
        """The planned function for these non-array arguments, planned for training if it is new."""
        found = self.functions.get(statics)
        if found is None:
            fn = functools.partial(self.forward, **dict(statics)) if statics else self.forward
            functools.update_wrapper(fn, self.forward) if statics else None
            training = AutoSharded(_with_gradient(fn), self.options).plan(*args, **kwargs)
            options = {**self.options, "plan": training.chosen, "memory_limit_bytes": float("inf")}
            if self.options["plan"] is not None:
                options["plan"] = self.options["plan"]
            found = self.functions[statics] = AutoSharded(fn, options)
        return found

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Any]:
        """The plan and the result of a call."""
        arrays = {k: v for k, v in kwargs.items() if _is_data(v)}
        statics = tuple(sorted((k, v) for k, v in kwargs.items() if k not in arrays))
        if _compat.under_trace() and not self.told:
            self.told = True
            warnings.warn(
                f"auto_shard({self.name}): first called under somebody's trace (jit, grad, ...): its calls are "
                "constrained, its parameters stay where they are. Decorate that function, or make the module with "
                f"{self.name}.sharded(...)",
                AutoshardWarning,
                stacklevel=4,
            )
        function = self.function(statics, args, arrays)
        result = function(*args, **arrays)
        return function.plan(*args, **arrays), result


def _is_data(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(x, "shape") or isinstance(x, float) for x in leaves)


def _with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same arguments that also computes the gradients with respect to all that can have one."""

    @functools.wraps(fn)
    def training(*args: Any, **kwargs: Any) -> Any:
        graphdef, state = nnx.split(args)
        leaves, tree = jax.tree.flatten(state)
        real = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

        def forward(floats: list[Any]) -> list[Any]:
            merged = list(leaves)
            for i, x in zip(real, floats, strict=True):
                merged[i] = x
            out = fn(*nnx.merge(graphdef, jax.tree.unflatten(tree, merged)), **kwargs)
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]

        out, back = jax.vjp(forward, [leaves[i] for i in real])
        return out, back(out)

    return training


def _shard_nnx(cls: Any, options: Mapping[str, Any]) -> type:
    original = cls.__call__
    calls = ModuleCalls(original, options, cls.__name__)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get():
            return original(self, *args, **kwargs)
        cls.autoshard_plan, result = calls((self, *args), kwargs)
        return result

    def sharded(klass: Any, *args: Any, example: tuple[Any, ...], **kwargs: Any) -> Any:
        """Makes the module with its parameters born sharded.

        Args:
            klass: the class, or one derived from it.
            *args: for the constructor.
            example: arguments of a call (arrays or shapes), to plan from.
            **kwargs: for the constructor.
        """
        graphdef, state = nnx.split((args, kwargs))

        def create(inputs: Any) -> Any:
            a, k = nnx.merge(graphdef, inputs)
            return klass(*a, **k), (a, k)

        abstract = nnx.eval_shape(lambda s: create(s)[0], state)
        function = calls.function((), (abstract, *example), {})
        cls.autoshard_plan = function.plan(abstract, *example)
        entry = function._entry((abstract, *example), {})
        model = born_sharded(entry, lambda s: create(s)[0], (state,), cls.__name__)
        advanced = nnx.split(jax.jit(lambda s: nnx.split(create(s)[1])[1])(state))[1]
        nnx.update((args, kwargs), advanced)
        return model

    cls.__call__, cls.sharded, cls.autoshard_plan = call, classmethod(sharded), None
    cls.__wrapped__ = original
    return cls


def _shard_linen(cls: Any, options: Mapping[str, Any]) -> type:
    original_apply, original_init = cls.apply, cls.init
    by_module: dict[Any, ModuleCalls] = {}

    def calls(module: Any) -> ModuleCalls:
        if module not in by_module:
            forward = functools.partial(original_apply, module)
            by_module[module] = ModuleCalls(forward, options, cls.__name__)
        return by_module[module]

    @functools.wraps(original_apply)
    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get():
            return original_apply(self, variables, *args, **kwargs)
        cls.autoshard_plan, result = calls(self)((variables, *args), kwargs)
        return result

    @functools.wraps(original_init)
    def init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        if OUTER_PLAN.get() or _compat.under_trace():
            return original_init(self, rngs, *args, **kwargs)
        create = functools.partial(original_init, self, **kwargs)
        variables = jax.eval_shape(create, rngs, *args)
        function = calls(self).function((), (variables, *args), {})
        entry = function._entry((variables, *args), {})
        cls.autoshard_plan = entry.plan
        return born_sharded(entry, create, (rngs, *args), cls.__name__)

    cls.apply, cls.init, cls.autoshard_plan = apply, init, None
    cls.__wrapped__ = original_apply
    return cls
