"""Formats numbers, source lines and specs for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any


def bytes_text(n: float) -> str:
    """Formats a number of bytes: `1.5 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    if not math.isfinite(n):
        return str(n)
    while abs(n) >= 1023.5 and len(units) > 1:
        n /= 1024
        del units[0]
    return f"{_digits(n) if units[0] != 'B' else f'{n:.0f}'} {units[0]}"


def time_text(us: float) -> str:
    """Formats a time given in microseconds: `12.5 ms`."""
    if not math.isfinite(us):
        return str(us)
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= size * 0.9995:
            return f"{_digits(us / size)} {unit}"
    return f"{_digits(us)} us"


def duration_text(seconds: float) -> str:
    """Formats a time given in seconds, with minutes from two minutes on and hours from two hours on: `2.50 min`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_digits(seconds / size)} {unit}"
    return time_text(1e6 * seconds)


def _digits(x: float) -> str:
    """Formats a number with three significant digits, without an exponent."""
    if x == 0:
        return "0"
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:.1f}" if abs(x) >= 9.995 else f"{x:.2f}"


def ratio_text(a: float, b: float) -> str:
    """Formats `a / b` as `1.25x`, or `-` if it is not a finite number."""
    if not b or not math.isfinite(a / b):
        return "-"
    ratio = a / b
    return f"{ratio:.3f}x" if 0.9 < ratio < 1.1 else f"{_digits(ratio)}x"


def percent_text(part: float, whole: float) -> str:
    """Formats `part / whole` in percent, or `-` if it is not a finite number."""
    if not whole or not math.isfinite(part / whole):
        return "-"
    share = 100 * part / whole
    return "<1 %" if 0 < share < 1 else f"{share:.0f} %"


def change_text(new: float, old: float, text: Callable[[float], str], tie: float) -> str:
    """Formats a change: `+3.10 ms (+0.3 %)`, or `the same` if it is at most the fraction `tie` of the old value."""
    change = new - old
    if not math.isfinite(change):
        return text(new)
    if abs(change) <= tie * abs(old):
        return "the same"
    sign = "+" if change > 0 else "-"
    if not old:
        return f"{sign}{text(abs(change))}"
    share = 100 * abs(change / old)
    return f"{sign}{text(abs(change))} ({sign}{share:.{0 if share >= 9.95 else 1}f} %)"


def line_text(line: str) -> str:
    """Shortens the file of a source line to its last two components: `models/gpt.py:171 (_project)`."""
    found = re.fullmatch(r"(.*?):(\d+)(?::\d+)?(?: \((.*)\))?", line)
    if not found:
        return line or "(no source line)"
    file, number, function = found.groups()
    short = "/".join(re.split(r"[/\\]", file)[-2:])
    return f"{short}:{number}" + (f" ({function})" if function else "")


def spec_text(spec: Any) -> str:
    """Formats a `PartitionSpec` as `P(None, 'tp')`, the same for every JAX version."""
    return f"P({', '.join(map(repr, spec))})"


def variant_text(variant: Mapping[str, Any]) -> str:
    """Formats a variant: `remat=dots, microbatches=2`."""
    return ", ".join(f"{name}={value}" for name, value in variant.items())
