"""Main figures at the top of a page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Card:
    """A main figure of a page.

    Attributes:
        heading: What it is.
        figure: Its value as text.
        source: Where the value comes from, such as `estimated`, `compiled` or `measured`.
        remarks: Lines below it.
        is_bad: Whether it exceeds a limit.
    """

    heading: str
    figure: str
    source: str = ""
    remarks: tuple[str, ...] = ()
    is_bad: bool = False

    @property
    def html(self) -> str:
        """The card as HTML."""
        bad = ' class="bad"' if self.is_bad else ""
        remarks = "".join(f"<small>{escape(remark)}</small>" for remark in self.remarks)
        source = f'<small class="source">{escape(self.source)}</small>' if self.source else ""
        return (f'<div class="card"><h3>{escape(self.heading)}</h3><p{bad}>{escape(self.figure)}</p>'
                f"{source}{remarks}</div>")  # fmt: skip
