"""The words of `gather=`: when, and in which order, stored parameters are gathered."""

from __future__ import annotations

from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError

AUTO = "auto"
PREFETCH = "prefetch"
SEQUENTIAL = "sequential"
ONCE = "once"
REPEAT = "repeat"
WORDS = {
    AUTO: "the compiler chooses the order, and may gather many parameters early",
    PREFETCH: "the parameters that a layer needs first are gathered while the layer before it computes",
    SEQUENTIAL: "one after another: the next is gathered while one is in use, and each is freed after its use",
    ONCE: "each stage of a pipeline gathers its layers once a step, and holds them until all microbatches have ended",
    REPEAT: "each layer is gathered again in each microbatch that uses it",
}


def read_gather(gather: Any) -> str:
    """Return the word that a plan keeps: empty for `auto`.

    Raises:
        PlanError: it is none of the words.
    """
    if gather is not None and (not isinstance(gather, str) or gather not in WORDS):
        raise PlanError(
            f"gather is {short_repr(gather)}; it must be {', '.join(map(repr, [*WORDS][:-1]))} or {[*WORDS][-1]!r}"
        )
    return "" if gather in (None, AUTO) else gather
