"""The settings of a function under `jax.jit`, and what JAX reports about compilations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

# JAX has lowered a program and is about to compile it, in the thread that lowered it.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


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


def call_when_lowered(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever JAX has lowered a program and is about to compile it, in the same thread."""

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _LOWERED:
            callback()

    jax.monitoring.register_event_duration_secs_listener(listen)
