"""The settings of a function under `jax.jit`."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class JitSettings:
    """What a `jax.jit(...)` donates, and what is static in it. JAX adds the numbers of named parameters."""

    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def jit_settings(fn: Any) -> JitSettings:
    """Returns the settings of a `jax.jit(...)`; empty ones for other functions."""
    info, names = getattr(fn, "_jit_info", None), [field.name for field in dataclasses.fields(JitSettings)]
    return JitSettings(*(tuple(getattr(info, name, ())) for name in names))
