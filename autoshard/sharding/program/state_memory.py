"""Warns of donated state that a step takes from host memory and returns in device memory."""

from __future__ import annotations

import warnings

from autoshard import _compat
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.program.path_patterns import first_few
from autoshard.sharding.program.tracing import Traced


def warn_of_state_left_on_device(traced: Traced) -> None:
    """Warn if donated state enters a step in host memory and is returned in device memory.

    The next call has its state in another memory, so it is another signature. And no result can reuse the old buffers.
    """
    on_host = [i in traced.donated and _compat.is_on_host(aval) for i, aval in enumerate(traced.in_avals)]
    moved = [
        f"'{traced.in_names[i]}'" for i, o in traced.state if on_host[i] and not _compat.is_on_host(traced.out_avals[o])
    ]
    if moved:
        warnings.warn(
            f"auto_shard({traced.name}): donated state {first_few(moved)} enters in host memory and is returned in "
            "device memory: it stays there, and a call with the returned state is planned and compiled again. To keep "
            "it on the host, return it with jax.device_put(x, jax.memory.Space.Host)",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )
