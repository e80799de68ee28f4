"""Legends of a plan's page: what the colours of its bars mean."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def bar_legend(entries: Sequence[tuple[str, str]], start: str = "") -> str:
    """A line of coloured squares with their meanings.

    Args:
        entries: For each colour its CSS classes and what it means.
        start: Words before the first square.
    """
    words = f"<span>{escape(start)}</span>" if start else ""
    keys = "".join(f'<span><i class="key {classes}"></i>{escape(meaning)}</span>' for classes, meaning in entries)
    return f'<p class="legend">{words}{keys}</p>'
