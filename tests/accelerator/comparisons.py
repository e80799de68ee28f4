"""References on the CPU, and how results of an accelerator are compared with them.

Errors are norms of differences over norms of the reference. In 16 bits, a result may have at most twice the error that
plain attention in JAX has in the same dtype on the same device; flash-attention's own tests use that factor
(https://github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py). In float32, both sides compute products in
full precision (`highest`), and only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autoshard.kernels.planned_platform import planned_for

KERNEL_OVER_PLAIN = 2.0
# Sums of a few thousand float32 terms in another order: 2^-24 (the unit roundoff) times a few thousand.
FLOAT32_TOLERANCE = 2e-4


def on_cpu(fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(*args)` on the CPU, with products in full precision and without kernels of other platforms."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), jax.default_matmul_precision("highest"), planned_for("cpu"):
        return jax.device_get(jax.jit(fn)(*jax.device_put(args, cpu)))


def relative_error(found: Any, expected: Any) -> float:
    """Return the norm of the difference over that of the reference; infinite if a value is not finite.

    If the reference is zero, it is the norm of the difference.
    """
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return np.inf
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))


def assert_no_worse(kernel: Any, plain: Any, expected: Any) -> None:
    """Check leaf by leaf that the kernel's error is at most `KERNEL_OVER_PLAIN` times that of the plain program."""
    leaves = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, reference), mine, theirs in zip(leaves, jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
        error, allowed = relative_error(mine, reference), KERNEL_OVER_PLAIN * relative_error(theirs, reference)
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: error {error:.2e}, allowed are {allowed:.2e}"
