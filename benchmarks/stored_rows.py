"""The command line of a benchmark that compiles a list of cases and stores one row for each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Case = tuple[Any, ...]  # identifies a case; its first item is the target


def stored(path: Path, row: Callable[..., Any]) -> list[Any]:
    """Read the rows of a file.

    Args:
        path: the file; it need not exist.
        row: makes a row from its fields.
    """
    return [row(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def run_cases(
    about: str | None,
    arguments: Sequence[str],
    path: Path,
    row: Callable[..., Any],
    cases: Sequence[Case],
    compiled: Callable[..., Any],
    case_of: Callable[[Any], Case],
    predicted: Callable[[Any], Any] | None = None,
) -> None:
    """Compile the cases of the requested targets, and store and print a row for each.

    Args:
        about: what the benchmark does, for `--help`.
        arguments: targets, by default all; `--show` prints the stored rows and compiles nothing.
        path: the file of the rows, written after each case.
        row: makes a row from its fields.
        cases: the cases.
        compiled: makes the row of a case.
        case_of: returns the case of a row. A new row replaces the stored row of its case.
        predicted: returns a row with a new estimate. If it is given, there is an option `--predict`, which renews the
            estimates of the stored rows and compiles nothing.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="default: all")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--show", action="store_true", help="print the stored rows and compile nothing")
    if predicted is not None:
        kept.add_argument("--predict", action="store_true", help="renew the estimates of stored rows, compile nothing")
    given = parser.parse_args(arguments)
    known = dict.fromkeys(case[0] for case in cases)
    if unknown := [target for target in given.targets if target not in known]:
        parser.error(f"no case is for target {unknown[0]!r}; choose from {', '.join(known)}")
    if given.show:
        print(*stored(path, row), sep="\n")
        return
    renews = predicted is not None and given.predict
    for case in map(case_of, stored(path, row)) if renews else cases:
        if given.targets and case[0] not in given.targets:
            continue
        rows = {case_of(each): each for each in stored(path, row)}
        new = predicted(rows[case]) if predicted is not None and renews else compiled(*case)
        rows.pop(case_of(new), None)
        path.write_text(json.dumps([asdict(each) for each in [*rows.values(), new]], indent=1) + "\n")
        print(new, flush=True)
