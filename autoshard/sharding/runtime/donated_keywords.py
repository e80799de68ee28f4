"""Donated arguments that are passed by keyword: only positional arguments are donated."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning


def warn_of_donated_keywords(name: str, donated: Collection[str], keywords: Mapping[str, Any]) -> None:
    """Warn if a call passes an argument by keyword that it was to donate.

    Args:
        name: the function's name.
        donated: the names of the arguments that it donates.
        keywords: the keyword arguments.
    """
    if found := [f"'{keyword}'" for keyword in keywords if keyword in donated]:
        warnings.warn(
            f"auto_shard({name}): {', '.join(found)} is not donated, because it is passed by keyword: the old and the "
            "new arrays are in memory at the same time. Pass it by position",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )
