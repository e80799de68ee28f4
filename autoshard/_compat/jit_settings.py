"""The settings of a function under `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class JitSettings:
    """What a `jax.jit(...)` donates, and what is static in it. JAX adds the numbers of named parameters, and names."""

    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def jit_settings(fn: Any) -> JitSettings:
    """Returns the settings of a `jax.jit(...)`, or of a method or partial of one; empty ones for other functions.

    Numbers do not count the arguments that the method or the partial binds.
    """
    bound, named = 0, set[str]()
    while isinstance(fn, (functools.partial, types.MethodType)):
        if isinstance(fn, functools.partial):
            bound, named, fn = bound + len(fn.args), named | fn.keywords.keys(), fn.func
        else:
            bound, fn = bound + 1, fn.__func__
    info = getattr(fn, "_jit_info", None)
    if info is None:
        return JitSettings()
    return JitSettings(
        _unbound(info.donate_argnums, fn, bound),
        tuple(name for name in info.donate_argnames if name not in named),
        _unbound(info.static_argnums, fn, bound),
        tuple(name for name in info.static_argnames if name not in named),
    )


def _unbound(numbers: tuple[int, ...], fn: Any, bound: int) -> tuple[int, ...]:
    """The numbers without the first `bound` arguments. Negative ones count from the end of the named ones."""
    if any(n < 0 for n in numbers):
        named = [p for p in inspect.signature(fn).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
        numbers = tuple(n % len(named) for n in numbers)
    return tuple(n - bound for n in numbers if n >= bound)
