"""What JAX reports about its compilations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# JAX has lowered a program and is about to compile it, in the thread that lowered it.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def call_when_lowered(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever JAX has lowered a program and is about to compile it, in the same thread."""

    def listen(event: str, duration_s: float, **_: Any) -> None:
        if event == _LOWERED:
            callback()

    jax.monitoring.register_event_duration_secs_listener(listen)
