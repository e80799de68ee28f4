"""Errors for calls of `auto_shard` and `plan` that are written as for `jax.jit`. They say what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax.sharding import AbstractMesh, Mesh

from autoshard._typed import short_repr
from autoshard.errors import PlanError

F = TypeVar("F", bound=Callable[..., Any])

_SHARDINGS = (
    "the plan chooses the shardings. To request a strategy give plan='fsdp:8', and to set the sharding of an input "
    "give fixed={path: PartitionSpec}"
)
_INSTEAD = {
    "static_argnames": "give static_argnums with the positions of these arguments. Text and functions among the "
    "arguments are static anyway",
    "donate_argnames": "give donate_argnums with the positions of these arguments",
    "in_shardings": _SHARDINGS,
    "out_shardings": f"{_SHARDINGS}; state that a step returns keeps its sharding",
    "in_specs": _SHARDINGS,
    "out_specs": _SHARDINGS,
}


def explains_jit_options(fn: F) -> F:
    """Decorator of `auto_shard`: options of `jax.jit`, and further positional arguments, are explained."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_jit_options(fn.__name__, kwargs)
        if len(args) > 1:
            raise PlanError(
                f"auto_shard takes one positional argument, the function, but got {_positional_text(args[1])}"
            )
        return fn(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def check_jit_options(name: str, keywords: Mapping[str, Any], fn: Any = None) -> None:
    """Check that no option of `jax.jit` is among the keywords of a call of `name`.

    Args:
        name: the name of our function, for the message.
        keywords: the keywords.
        fn: the user's function, if the keywords are passed on to it. It may have parameters of these names.

    Raises:
        PlanError: there is one; the message says what to give instead.
    """
    found = [option for option in keywords if option in _INSTEAD]
    if found and not (fn is not None and _takes(fn, found[0])):
        raise PlanError(f"{name} has no option {found[0]}: {_INSTEAD[found[0]]}")


def _takes(fn: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _positional_text(second: Any) -> str:
    if isinstance(second, str):
        return f"{short_repr(second)} too: give a strategy as plan={short_repr(second)}, or a machine as target="
    sizes = isinstance(second, Mapping) and all(isinstance(n, int) for n in second.values())
    if sizes or isinstance(second, Mesh | AbstractMesh):
        return "a mesh too: give it as mesh="
    return f"a {type(second).__name__} too: pass the arguments to its result, auto_shard(step)(state, batch)"
