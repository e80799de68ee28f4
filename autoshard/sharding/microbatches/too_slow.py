"""The outcome of a search that found no plan within the time that is needed."""

from __future__ import annotations


class TooSlow(Exception):  # noqa: N818 - an outcome, which the search handles itself
    """No plan of a program takes less time than is needed.

    Attributes:
        least_us: a lower bound of the microseconds of a step.
        is_final: whether more microbatches do not help either.
    """

    def __init__(self, least_us: float, is_final: bool):
        super().__init__(f"a step takes at least {least_us:.0f} us")
        self.least_us, self.is_final = least_us, is_final
