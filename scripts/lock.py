"""Writes the lock of exact versions that requirements.lock holds, from two virtual environments.

    python scripts/lock.py OLD/bin/python NEW/bin/python > requirements.lock

OLD runs the oldest supported Python, NEW a later one. What both have in the same version is one line; the
rest gets a marker. The lock holds names and versions only, so it works with any package index. `make lock`
does all of it.
"""

import argparse
import subprocess

HEADER = """\
# Exact versions of everything that a run, the tests and the site need, on Python 3.11 and on 3.12 and later.
# pip takes it as constraints: pip install -c requirements.lock -e '.[dev]'
# Written by scripts/lock.py (make lock); not by hand.
"""


def frozen(python: str) -> dict[str, str]:
    """The installed packages of an interpreter's environment, `{name: version}`."""
    command = [python, "-m", "pip", "freeze", "--exclude-editable", "--disable-pip-version-check"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    pairs = [line.split("==") for line in lines]
    odd = ["==".join(pair) for pair in pairs if len(pair) != 2]
    if odd:
        raise SystemExit(f"lock.py: {python} has packages that are not name==version: {' '.join(odd)}")
    return {name: version for name, version in pairs}


def python_version(python: str) -> tuple[int, int]:
    """The version of an interpreter, (3, 11) for 3.11.7."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    major, minor = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(major), int(minor)


def merged(old: dict[str, str], new: dict[str, str], boundary: str) -> list[str]:
    """The lock's lines: one for each version, with a marker where the two environments differ."""
    lines = []
    for name in sorted({**old, **new}, key=str.lower):
        before, after = old.get(name), new.get(name)
        if before == after:
            lines.append(f"{name}=={before}")
            continue
        if before:
            lines.append(f'{name}=={before} ; python_version < "{boundary}"')
        if after:
            lines.append(f'{name}=={after} ; python_version >= "{boundary}"')
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a lock that two Python versions share.")
    parser.add_argument("old", help="the interpreter of an environment on the oldest supported Python")
    parser.add_argument("new", help="the interpreter of an environment on a later one")
    args = parser.parse_args()
    older, newer = python_version(args.old), python_version(args.new)
    if older >= newer:
        raise SystemExit(f"lock.py: OLD runs Python {older}, NEW {newer}: the older one comes first")
    boundary = f"{newer[0]}.{newer[1]}"
    print(HEADER + "\n".join(merged(frozen(args.old), frozen(args.new), boundary)))


if __name__ == "__main__":
    main()
