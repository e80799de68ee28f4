"""Source lines name the user's code, not the layers of a library.

Without this, each product of a Flax model would have the same line, that of `flax.nnx.Linear`. JAX leaves excluded
files out of its source lines, and out of the locations in the programs that it compiles, so a plan and the compiled
program name the same line.
"""

from __future__ import annotations

import os
import sys

from autoshard import _compat

# Libraries of layers and optimizers whose frames lie between the user's code and JAX.
LIBRARIES = ("equinox", "flax", "haiku", "optax")

_excluded: set[str] = set()


def exclude_libraries() -> None:
    """Excludes the files of `LIBRARIES` from source lines, as far as these are imported."""
    for name in LIBRARIES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            if folder not in _excluded:
                _excluded.add(folder)
                _compat.exclude_from_user_code(os.path.join(folder, ""))  # the separator: not flax_extra
