"""Short names of groups of tensors in reports. Two groups never have the same name.

A group of one tensor is called by the end of its path, with the numbers in it: `layers/0/wq`. A group of several is
called by what their paths share, without numbers: `attention/{wk,wq}`. Where two groups would be called alike, more of
their paths is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from autoshard._columns import shorten_middle

LABEL_WIDTH = 32  # characters; chosen
COMPONENTS = 2  # of a path that a label shows, apart from numbers; chosen


def labels(groups: Sequence[Sequence[str]]) -> list[str]:
    """A label for each group of paths. Groups that differ have labels that differ."""
    longest = max((len(path.split("/")) for paths in groups for path in paths), default=0)
    levels: list[Callable[[Sequence[str]], str]] = [label]
    for count in range(COMPONENTS, longest + 1):
        levels.append(lambda paths, count=count: _text([_end(path, count, True) for path in paths]))
    levels.append(lambda paths: _several(paths))
    return _distinct(groups, levels)


def shortened(long: Sequence[str]) -> list[str]:
    """Labels that are shortened in the middle to `LABEL_WIDTH` characters where they stay distinct."""
    short = [shorten_middle(text, LABEL_WIDTH) for text in long]
    count = Counter(short)
    return [one if count[one] == 1 else other for one, other in zip(short, long, strict=True)]


def label(paths: Sequence[str]) -> str:
    """A short name for several paths: their last two components. Numbers are left out if there are several paths."""
    return _text([_end(path, COMPONENTS, len(paths) == 1) for path in paths])


def _distinct(groups: Sequence[Sequence[str]], levels: Sequence[Callable[[Sequence[str]], str]]) -> list[str]:
    """The text of each group at the first level at which no other group has it."""
    found = [levels[0](paths) for paths in groups]
    for level in levels[1:]:
        count = Counter(found)
        if max(count.values(), default=1) == 1:
            break
        found = [level(paths) if count[text] > 1 else text for paths, text in zip(groups, found, strict=True)]
    return found


def _end(path: str, count: int, numbers: bool) -> str:
    """The last `count` components of a path that are not numbers, with or without the numbers among them."""
    parts = path.split("/")
    names = [i for i, part in enumerate(parts) if not part.isdecimal()]
    if not names:
        return path
    first = names[-count:][0]
    return "/".join(parts[i] for i in range(first, len(parts)) if numbers or i in names)


def _text(ends: Sequence[str]) -> str:
    """One text for several ends of paths: `attention/{wk,wq}`, or the first of them and the number of the others."""
    short = list(dict.fromkeys(ends))
    if len(short) == 1:
        return short[0] or "(the argument)"
    parts = [text.split("/") for text in short]
    differing = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(set(map(len, parts))) == 1 and len(differing) == 1:
        at = differing[0]
        words = "{" + ",".join(p[at] for p in parts) + "}"
        together = "/".join([*parts[0][:at], words, *parts[0][at + 1 :]])
        if len(together) <= LABEL_WIDTH:
            return together
    return _several(short)


def _several(paths: Sequence[str]) -> str:
    return paths[0] + (f" +{len(paths) - 1}" if len(paths) > 1 else "")
