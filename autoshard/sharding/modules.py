"""`auto_shard` on a Flax module class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shard_class(cls: type, options: Mapping[str, Any]) -> type:
    """See `auto_shard`."""
    raise NotImplementedError
