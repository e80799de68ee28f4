"""Check, build and tag a release. Nothing is pushed or uploaded.

    make release VERSION=x.y.z

RELEASING.md describes the stages. Each reason for a refusal is one line, and the exit status is then 1.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
PRINT_VERSIONS = "import autoshard, importlib.metadata as m; print(autoshard.__version__, m.version('autoshard'))"
VERSION_FORM = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


class Refusal(Exception):
    """The release cannot be made. Each argument is one reason, in one line."""


def command_output(*command: str | Path, cwd: Path) -> str:
    """Run a command without our PYTHONPATH and return its standard output.

    Raises:
        Refusal: The command failed. The reason ends with the last line that it printed.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    ran = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    if ran.returncode:
        last_line = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1]
        raise Refusal(f"`{' '.join(words)}` exited with {ran.returncode}: {last_line}")
    return ran.stdout


def check_state(root: Path, version: str) -> None:
    """Check the repository before anything is built.

    Raises:
        Refusal: With all reasons.
    """
    if not VERSION_FORM.fullmatch(version):
        raise Refusal(f"VERSION is {version!r}: give x.y.z, as in make release VERSION=0.2.0")
    reasons = []
    branch = command_output("git", "branch", "--show-current", cwd=root).strip()
    if branch != BRANCH:
        reasons.append(f"the branch is {branch or 'none (detached HEAD)'}: check out {BRANCH}")
    changed = command_output("git", "status", "--porcelain", cwd=root).splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        reasons.append(f"the tree is not clean ({changed[0][3:]}{more}): commit or remove that")
    if command_output("git", "tag", "--list", tag_of(version), cwd=root).strip():
        reasons.append(f"the tag {tag_of(version)} exists already: choose the next version")
    raise_if_any(reasons + version_mismatches(root, version))


def version_mismatches(root: Path, version: str) -> list[str]:
    """The files whose version is another one, a line each."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = {
        "pyproject.toml": project["version"],
        "autoshard/__init__.py": _first(r'^__version__ = "(.*)"$', root / "autoshard" / "__init__.py"),
        "CITATION.cff": _first(r"^version: (.*)$", root / "CITATION.cff"),
    }
    mismatches = [f"{file} has version {had}: set it to {version}" for file, had in found.items() if had != version]
    heading = _first(r"^## (.*)$", root / "CHANGELOG.md")
    if not re.fullmatch(re.escape(version) + r" - \d{4}-\d\d-\d\d", heading):
        mismatches.append(f"CHANGELOG.md begins with '## {heading}': make it '## {version} - YYYY-MM-DD'")
    return mismatches


def _first(pattern: str, file: Path) -> str:
    """The first match of a pattern's group in a file, or `none`."""
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    return match[1].strip("\"'") if match else "none"


def tag_of(version: str) -> str:
    """The name of a version's tag."""
    return f"v{version}"


def raise_if_any(reasons: list[str]) -> None:
    """Raise a `Refusal` if there are reasons for one."""
    if reasons:
        raise Refusal(*reasons)


def run_tests(root: Path) -> None:
    """Run `make test`, with its output shown.

    Raises:
        Refusal: A check or a test failed, or the checkout is no longer what was tested.
    """
    head = command_output("git", "rev-parse", "HEAD", cwd=root)
    ran = subprocess.run(["make", "test"], cwd=root)
    if ran.returncode:
        raise Refusal(f"`make test` exited with {ran.returncode}: mend what it reports")
    if command_output("git", "rev-parse", "HEAD", cwd=root) != head:
        raise Refusal("HEAD moved while the tests ran: start again")
    changed = command_output("git", "status", "--porcelain", cwd=root).splitlines()
    raise_if_any([f"the tests changed {line[3:]}: commit or remove it" for line in changed])


def build(root: Path, version: str) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the unpacked sdist, into `dist/`, which is emptied first.

    Returns:
        The sdist and the wheel.

    Raises:
        Refusal: A build failed or gave a file of another name.
    """
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", dist, "-t")
    command_output(*hatchling, "sdist", cwd=root)
    sdist, wheel = dist / f"autoshard-{version}.tar.gz", dist / f"autoshard-{version}-py3-none-any.whl"
    _check_built(sdist)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        command_output(*hatchling, "wheel", cwd=Path(folder) / f"autoshard-{version}")
    _check_built(wheel)
    return sdist, wheel


def _check_built(file: Path) -> None:
    if not file.exists():
        built = ", ".join(sorted(other.name for other in file.parent.glob("*"))) or "nothing"
        raise Refusal(f"the build gave {built} in {file.parent}, not {file.name}")


def check_wheel(wheel: Path, version: str, lock: Path) -> None:
    """Install a wheel in a new virtual environment, with locked dependencies, and run it there.

    Raises:
        Refusal: It cannot be installed or run, or has another version.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
        command_output(*pip, "-c", lock, wheel, cwd=folder)
        command_output(python.with_name("autoshard"), "--help", cwd=folder)
        versions = command_output(python, "-c", PRINT_VERSIONS, cwd=folder).split()
        if versions != [version, version]:
            raise Refusal(f"the wheel's versions are {' and '.join(versions)}, not {version}")


def release(root: Path, version: str) -> None:
    """Run every stage; the tag is made last.

    Raises:
        Refusal: A stage failed. No tag is made then.
    """
    check_state(root, version)
    run_tests(root)
    sdist, wheel = build(root, version)
    check_wheel(wheel, version, root / "requirements.lock")
    command_output("git", "tag", "-a", tag_of(version), "-m", f"autoshard {version}", cwd=root)
    print(f"built {sdist.relative_to(root)} and {wheel.relative_to(root)}, tagged {tag_of(version)}")
    print(f"not pushed: git push origin {tag_of(version)}, then upload both files")


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Make the release and return the exit status."""
    try:
        release(root, arguments[0] if arguments else "")
    except Refusal as refusal:
        for reason in refusal.args:
            print(f"release.py: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
