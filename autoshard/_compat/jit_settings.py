"""The settings of a function under `jax.jit`."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoshard._shown import shown


@shown
class JitSettings(NamedTuple):
    """What a `jax.jit(...)` donates, and what is static in it. JAX adds the numbers of named parameters."""

    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def jit_settings(fn: Any) -> JitSettings:
    """Returns the settings of a `jax.jit(...)`; empty ones for other functions."""
    info = getattr(fn, "_jit_info", None)
    return JitSettings(*(tuple(getattr(info, name, ())) for name in JitSettings._fields))
