"""Matches path patterns against paths, and suggests corrections for mistyped ones."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from autoshard.sharding.program.constants import SHOWN, SUGGESTIONS, SUGGESTIONS_EACH


def matches_any(pattern: str, paths: Iterable[str]) -> bool:
    """Whether a pattern matches one of `paths`: it is the path, its last components, or a glob."""
    text = pattern.strip("/")
    return any(p == text or (text and p.endswith(f"/{text}")) or fnmatch.fnmatchcase(p, text) for p in paths)


def suggestions(path: str, paths: Iterable[str]) -> str:
    """A sentence for an error message about an unknown path: similar paths, or the first few that exist."""
    paths = list(dict.fromkeys(paths))
    last = path.rpartition("/")[2].lower()
    by_last = {p.rpartition("/")[2].lower(): p for p in reversed(paths)}
    found = [p for p in paths if last and last in p.lower()][:SUGGESTIONS_EACH]
    found += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=SUGGESTIONS_EACH)]
    depth = path.count("/") + 1
    tails = {"/".join(p.split("/")[-depth:]): p for p in reversed(paths)}
    found += [tails[name] for name in difflib.get_close_matches(path, tails, n=SUGGESTIONS_EACH)]
    found = list(dict.fromkeys(found))[:SUGGESTIONS]
    return f"Similar paths: {', '.join(found)}" if found else f"There are {first_few(paths)}"


def first_few(words: Iterable[str], between: str = ", ") -> str:
    """Joins the first few words and says how many more there are."""
    words = list(words)
    return between.join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
