"""The average in the saved state of a schedule-free optimizer, which is the model to evaluate, sample and export.

optax's `ScheduleFreeState` has z and b1. With the parameters y, at which gradients are taken, the average is
(y - (1 - b1) z) / b1 (Defazio et al., arXiv:2405.15682). It is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_SCALARS = ("b1", "weight_sum", "step_count", "max_lr")
Z, B1 = "z", "b1"


def schedule_free_path(keys: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the path of a `ScheduleFreeState` among the paths of a state's leaves; None if there is none.

    >>> fields = ["b1", "weight_sum", "step_count", "max_lr", "z"]
    >>> schedule_free_path([("opt_state", "1", name) for name in fields])
    ('opt_state', '1')
    """
    known = {*keys}
    roots = sorted({key[:-1] for key in known if key[-1:] == ("max_lr",)})
    for root in roots:
        has_z = any(key[: len(root) + 1] == (*root, Z) for key in known)
        if has_z and all((*root, name) in known for name in _SCALARS):
            return root
    return None


def average(y: np.ndarray, z: np.ndarray, b1: np.ndarray) -> np.ndarray:
    """Return the average of a parameter in its dtype, computed in float32."""
    share = np.float32(b1)
    return ((y.astype(np.float32) - (np.float32(1) - share) * z.astype(np.float32)) / share).astype(y.dtype)
