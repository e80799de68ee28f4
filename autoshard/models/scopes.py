"""Named scopes of the parts of a model.

XProf and the metadata of a compiled program group operators by them. A scope has the name of the part's attribute, so
that it is the end of the paths of the part's parameters. They change nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def scoped(name: str, part: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a part of a model in a named scope."""
    with jax.named_scope(name):
        return part(*args, **kwargs)
