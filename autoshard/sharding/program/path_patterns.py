"""Finds the paths that a user names, and suggests corrections for mistyped ones.

One rule for `fixed=`, `--fixed`, `explain` and `--explain`:

1. A complete path names that input.
2. A glob names all inputs whose paths it matches.
3. The end of a path (`wq` for `0/layers/wq`) names the one input whose path ends so. Several such inputs are an error.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.program.constants import SHOWN, SUGGESTIONS, SUGGESTIONS_EACH

Forms = str | Sequence[str]  # the forms of one path: `0/layers/wq`, or that and `state/layers/wq`


class AmbiguousPathError(PlanError):
    """The end of a path fits several paths."""


@shown
@dataclass(frozen=True)
class FoundPaths:
    """The paths that a user's text names.

    Attributes:
        group: index of the list of paths that has them.
        indices: their indices in that list.
        is_glob: whether the text is a glob. Otherwise it names one path.
    """

    group: int
    indices: tuple[int, ...]
    is_glob: bool


def find_paths(text: str, *groups: Sequence[Forms]) -> FoundPaths | None:
    """Find the paths that a text names, by the rule above; None if there are none.

    Args:
        text: a path, a glob, or the end of a path.
        *groups: lists of paths, each with its forms. If several lists match by the same rule, the first one counts.

    Raises:
        AmbiguousPathError: the text is the end of several paths of one list.
    """
    name = text.strip("/")
    ways: tuple[tuple[Callable[[str], bool], bool], ...] = (
        (lambda path: name in (path, path.strip("/"), glob.escape(path)), False),
        (lambda path: fnmatch.fnmatchcase(path, name), True),
        (lambda path: bool(name) and path.endswith(f"/{name}"), False),
    )
    for matches, is_glob in ways:
        for group, paths in enumerate(groups):
            found = tuple(i for i, forms in enumerate(paths) if any(map(matches, _as_tuple(forms))))
            if len({_as_tuple(paths[i]) for i in found}) > 1 and not is_glob:
                listed = first_few(last_form(paths[i]) for i in found)
                longer = _own_end(last_form(paths[found[-1]]), [last_form(paths[i]) for i in found])
                raise AmbiguousPathError(
                    f"'{name}' is the end of {len(found)} paths: {listed}. Give a longer path, such as '{longer}', or "
                    f"the glob '*/{name}' for all"
                )
            if found:
                return FoundPaths(group, found, is_glob)
    return None


def _own_end(path: str, paths: Sequence[str]) -> str:
    """The shortest end of a path that no other one has.

    >>> _own_end("state/params/qkv", ["state/mu/qkv", "state/params/qkv"])
    'params/qkv'
    """
    parts = path.split("/")
    ends = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next((end for end in ends if sum(f"/{p}".endswith(f"/{end}") for p in paths) == 1), path)


def last_form(forms: Forms) -> str:
    """The form of a path that reports show."""
    return _as_tuple(forms)[-1]


def _as_tuple(forms: Forms) -> tuple[str, ...]:
    return (forms,) if isinstance(forms, str) else tuple(forms)


def suggestions(path: str, paths: Iterable[str]) -> str:
    """A sentence for an error message about an unknown path: similar paths, or the first few that exist.

    >>> suggestions("state.layers['wq']", ["state/layers/wq"])
    'Similar paths: state/layers/wq'
    """
    paths = list(dict.fromkeys(paths))
    path = re.sub(r"[\[\]'\".]+", "/", path).strip("/")  # as Python and `jax.tree_util.keystr` write it
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
