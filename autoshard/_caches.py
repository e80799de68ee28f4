"""Keeps caches small."""

from __future__ import annotations

import itertools
from typing import Any


def drop_older_half(cache: dict[Any, Any]) -> None:
    """Delete the older half of the entries of a cache, rounded up.

    Example:
        >>> cache = {"a": 1, "b": 2, "c": 3}
        >>> drop_older_half(cache)
        >>> cache
        {'c': 3}
    """
    for key in list(itertools.islice(cache, (len(cache) + 1) // 2)):
        del cache[key]
