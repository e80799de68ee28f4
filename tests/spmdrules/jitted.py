"""Runs a function as one compiled program: compiling each of its operators alone takes far longer."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn`, jitted at every call. Keyword arguments are constants."""

    @functools.wraps(fn)
    def call(*args: Any, **constants: Any) -> Any:
        return jax.jit(functools.partial(fn, **constants))(*args)

    return call
