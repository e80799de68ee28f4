"""Prints branch coverage by subpackage, and beside it that of another run.

    python scripts/coverage_by_part.py COVERAGE.json [BEFORE.json]

The files are what `make coverage` writes. Lines and branches count alike: covered / (statements + branches). Exits with
1 if a subpackage is covered less than before by more than 0.1 percentage points.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

TOLERANCE = 0.001  # tests that depend on timing cover a line more or less


def parts(file: str) -> dict[str, float]:
    """Subpackage -> covered part, for every folder directly in the package, and `total`."""
    covered: dict[str, int] = defaultdict(int)
    counted: dict[str, int] = defaultdict(int)
    for name, found in json.loads(Path(file).read_text())["files"].items():
        pieces = Path(name[name.index("autoshard/") :]).parts
        part, summary = "/".join(pieces[:2]) if len(pieces) > 2 else "autoshard", found["summary"]
        for key in (part, "total"):
            covered[key] += summary["covered_lines"] + summary["covered_branches"]
            counted[key] += summary["num_statements"] + summary["num_branches"]
    return {key: covered[key] / counted[key] for key in sorted(counted) if counted[key]}


def main(file: str, before: str | None = None) -> int:
    """Prints the table."""
    now, then = parts(file), parts(before) if before else {}
    lower = []
    for part, share in now.items():
        old = then.get(part)
        print(f"{part:24} {share:7.2%}" + (f"  before {old:7.2%}  {share - old:+.2%}" if old is not None else ""))
        if old is not None and share < old - TOLERANCE:
            lower.append(part)
    if lower:
        print(f"covered less than before: {', '.join(lower)}")
    return bool(lower)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
