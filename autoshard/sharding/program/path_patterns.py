"""The paths that a path means, and those that a mistyped one may have meant."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

SHOWN = 6  # of anything that a long list would bury


def matches_any(path: str, paths: Iterable[str]) -> bool:
    """Whether a path, the end of one, or a glob means one of `paths`."""
    wanted = path.strip("/")
    return any(p == wanted or (wanted and p.endswith(f"/{wanted}")) or fnmatch.fnmatchcase(p, wanted) for p in paths)


def suggestions(path: str, paths: Iterable[str]) -> str:
    """What to say of a path that is not among `paths`: those that are near it, else what there is."""
    paths = list(dict.fromkeys(paths))
    last = path.rpartition("/")[2].lower()
    by_last = {p.rpartition("/")[2].lower(): p for p in reversed(paths)}
    found = [p for p in paths if last and last in p.lower()][:3]
    found += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=3)]
    depth = path.count("/") + 1
    tails = {"/".join(p.split("/")[-depth:]): p for p in reversed(paths)}
    found += [tails[name] for name in difflib.get_close_matches(path, tails, n=3)]
    found = list(dict.fromkeys(found))[:4]
    return f"Near it: {', '.join(found)}" if found else f"There are {first_few(paths)}"


def first_few(words: Iterable[str], between: str = ", ") -> str:
    """The first few words, and how many there are besides."""
    words = list(words)
    return between.join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
