"""The words of `offload=`: which values of a step wait in host memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError

NONE, AUTO = "none", "auto"
RESIDUAL = "residual"  # the carry of a scanned stack of layers: the input of each layer
OPTIMIZER = "optimizer"  # the optimizer's state

Words = tuple[str, ...]


class NotMovable(PlanError):
    """A plan cannot move the values of a word to the host."""


def read_words(value: str | Sequence[str] | None) -> Words:
    """Read `offload=`.

    Args:
        value: text, with words joined by `+` or `,`; or a sequence of words, which are not split.

    Returns:
        The words, each once; `(AUTO,)` for "auto", and nothing for "none" and None.

    Raises:
        PlanError: the value has another type, or "none" or "auto" stands beside other words.
    """
    given: Any = value
    if given is None:
        return ()
    words = re.split(r"[+,]", given) if isinstance(given, str) else given
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word.strip() for word in words):
        raise PlanError(
            f"offload is {short_repr(given)}; it must be 'none', 'auto', or words such as 'residual', 'optimizer' and "
            "the names that your code gives to values with checkpoint_name, joined by '+' or in a list"
        )
    found = tuple(dict.fromkeys(word.strip() for word in words))
    alone = [word for word in (NONE, AUTO) if word in found]
    if alone and len(found) > 1:
        raise PlanError(
            f"offload is {short_repr(given)}; '{alone[0]}' must stand alone. Leave it out, or leave out the other words"
        )
    return () if found == (NONE,) else found
