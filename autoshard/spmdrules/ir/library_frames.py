"""Makes source lines name the user's code, not a library's layers.

Otherwise, all products of a Flax model would have the same source line, which is in `flax.nnx.Linear`. JAX skips
excluded files both in an equation's source line and in the locations of compiled programs. So a plan and its compiled
program name the same line.
"""

from __future__ import annotations

import os
import sys

from autoshard import _compat

# Libraries of layers and optimizers. Their frames are between the user's code and JAX.
LIBRARIES = ("equinox", "flax", "haiku", "optax")

_excluded: set[str] = set()


def exclude_libraries() -> None:
    """Makes source lines skip the files of those `LIBRARIES` that are imported by now."""
    for name in LIBRARIES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            if folder not in _excluded:
                _excluded.add(folder)
                _compat.exclude_from_user_code(os.path.join(folder, ""))  # the separator: not flax_extra
