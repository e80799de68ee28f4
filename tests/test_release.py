"""`make release` refuses a wrong state of the repository in one line each, and tags what it has built and run."""

import os
import subprocess
from pathlib import Path

import pytest

from scripts import release

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "autoshard"
version = "1.2.0"
requires-python = ">=3.11"

[project.scripts]
autoshard = "autoshard:main"
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "autoshard/__init__.py": '__version__ = "1.2.0"\n\n\ndef main():\n    print("help")\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.0\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 - 2027-01-31\n\n- New.\n\n## 1.1.0 - 2026-12-01\n",
    "Makefile": "test:\n\t@true\n",
    "requirements.lock": "",
    ".gitignore": "/dist/\n",
}


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def commit(root: Path, **files: str) -> None:
    write(root, files)
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "A commit")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A repository that may be released as 1.2.0, apart from the user's git settings and any repository around it."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for key, value in {"user.name": "A. Tester", "user.email": "a@example.org"}.items():
        git(root, "config", key, value)
    write(root, FILES)
    commit(root)
    return root


def refusals(root: Path, capfd, version: str = "1.2.0") -> list[str]:
    """The error lines of a release that must be refused. No tag is made."""
    tags = git(root, "tag")
    assert release.main([version], root) == 1
    assert git(root, "tag") == tags
    return capfd.readouterr().err.splitlines()


def test_a_state_that_may_be_released(root):
    release.check_state(root, "1.2.0")


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.0", "1.2.0-final", "1.2.0; rm"])
def test_a_version_of_another_form(root, capfd, version):
    assert refusals(root, capfd, version) == [
        f"release.py: VERSION is {version!r}: give x.y.z, as in make release VERSION=0.2.0"
    ]


def test_no_version(root, capfd):
    assert release.main([], root) == 1
    assert "VERSION is ''" in capfd.readouterr().err


def test_another_branch(root, capfd):
    git(root, "checkout", "-q", "-b", "work")
    assert refusals(root, capfd) == ["release.py: the branch is work: check out main"]


def test_a_detached_head(root, capfd):
    git(root, "checkout", "-q", "--detach")
    assert refusals(root, capfd) == ["release.py: the branch is none (detached HEAD): check out main"]


@pytest.mark.parametrize("file", ["Makefile", "new.py"])
def test_a_changed_or_untracked_file(root, capfd, file):
    (root / file).write_text("test:\n")
    assert refusals(root, capfd) == [f"release.py: the tree is not clean ({file}): commit or remove that"]


def test_an_existing_tag(root, capfd):
    git(root, "tag", "v1.2.0")
    assert refusals(root, capfd) == ["release.py: the tag v1.2.0 exists already: choose the next version"]


@pytest.mark.parametrize("file", ["pyproject.toml", "autoshard/__init__.py", "CITATION.cff"])
def test_a_file_with_another_version(root, capfd, file):
    old, new = ("\nversion: 1.2.0", "\nversion: 1.1.0") if file == "CITATION.cff" else ('"1.2.0"', '"1.1.0"')
    commit(root, **{file: FILES[file].replace(old, new)})
    assert refusals(root, capfd) == [f"release.py: {file} has version 1.1.0: set it to 1.2.0"]


@pytest.mark.parametrize("heading", ["1.2.0 - unreleased", "1.1.0 - 2026-12-01", "1.2.0"])
def test_a_changelog_without_the_release(root, capfd, heading):
    commit(root, **{"CHANGELOG.md": f"# Changelog\n\n## {heading}\n"})
    assert refusals(root, capfd) == [
        f"release.py: CHANGELOG.md begins with '## {heading}': make it '## 1.2.0 - YYYY-MM-DD'"
    ]


def test_all_reasons_are_given_at_once(root, capfd):
    git(root, "checkout", "-q", "-b", "work")
    (root / "new.py").touch()
    (root / "newer.py").touch()
    assert "(new.py and 1 more)" in "".join(refusals(root, capfd))
    assert len(refusals(root, capfd, "1.3.0")) == 6


def test_failing_tests(root, capfd):
    commit(root, Makefile="test:\n\t@exit 3\n")
    assert refusals(root, capfd)[-1] == "release.py: `make test` exited with 2: mend what it reports"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("touch left.txt", "the tests changed left.txt: commit or remove it"),
        ("git commit -q --allow-empty -m more", "HEAD moved while the tests ran: start again"),
    ],
)
def test_tests_that_change_the_checkout(root, capfd, recipe, reason):
    commit(root, Makefile=f"test:\n\t@{recipe}\n")
    assert refusals(root, capfd) == [f"release.py: {reason}"]


def test_a_build_that_fails(root, capfd):
    commit(root, **{"pyproject.toml": PYPROJECT + "[tool.hatch.build.targets.sdist]\nonly-include = 3\n"})
    (line,) = refusals(root, capfd)
    assert "hatchling build" in line and "exited with 1: " in line


def test_the_wheel_is_built_from_the_sdist(root, capfd):
    """A package that the sdist leaves out fails the release."""
    commit(root, **{"pyproject.toml": PYPROJECT + '[tool.hatch.build.targets.sdist]\nonly-include = ["Makefile"]\n'})
    (line,) = refusals(root, capfd)
    assert "-t wheel` exited with 1: " in line


@pytest.mark.slow
def test_a_wheel_that_does_not_run(root, capfd):
    commit(root, **{"autoshard/__init__.py": FILES["autoshard/__init__.py"] + '\nraise SystemExit("no devices")\n'})
    (line,) = refusals(root, capfd)
    assert line.endswith("autoshard --help` exited with 1: no devices")


@pytest.mark.slow
@pytest.mark.whole
def test_a_release(root, capfd):
    (root / "dist").mkdir()
    (root / "dist" / "autoshard-1.1.0.tar.gz").touch()
    assert release.main(["1.2.0"], root) == 0
    assert git(root, "cat-file", "-t", "v1.2.0").strip() == "tag"
    assert git(root, "rev-parse", "v1.2.0^{commit}") == git(root, "rev-parse", "main")
    built = {file.name for file in (root / "dist").iterdir()}
    assert built == {"autoshard-1.2.0.tar.gz", "autoshard-1.2.0-py3-none-any.whl"}
    assert capfd.readouterr().out.splitlines()[-1].startswith("not pushed: git push origin v1.2.0")
