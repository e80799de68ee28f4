"""The site of docs/: public names without an entry and broken links fail the build, and the first page runs.

`make docs` builds the whole site. These tests build small ones with the same extensions.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
from sphinx.cmd.build import main as sphinx_build

from tests.pages import blocks, differences, run_blocks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_extensions"))

import docstrings  # noqa: E402
import public_names  # noqa: E402

FIRST_PAGE = DOCS / "first-ten-minutes.md"


def listed_names() -> set[str]:
    """The names on the pages of the API reference."""
    names = set()
    for page in (DOCS / "api").glob("*.rst"):
        for package, body in re.findall(r"^\.\. public:: (\S+)\n((?:\n|   .*\n)*)", page.read_text(), re.MULTILINE):
            names |= {f"{package}.{name}" for name in re.findall(r"^   (\w+)$", body, re.MULTILINE)}
    return names


def missing_entries(names: set[str]) -> list[str]:
    """The public names without an entry, members of classes left out: the build finds those."""
    found = public_names.missing_names(names)
    known = {name for name, _ in public_names.public_names()}
    return [name for name in found if name in known]


def test_every_public_name_is_on_a_page_of_the_reference():
    assert missing_entries(listed_names()) == []


def test_the_module_of_a_name_that_is_imported_on_first_use_is_found():
    assert public_names.defining_module("autoshard.models", "WORKLOADS") == "autoshard.models.workloads"


def test_the_public_packages_are_those_of_the_contract():
    contract = (DOCS / "design.md").read_text().split("## 7. The public contract")[1].split("\n## ")[0]
    named = set(re.findall(r"^`(autoshard\.\w+)`", contract, re.MULTILINE))
    assert named and named <= set(public_names.public_packages())
    assert not {name for name in public_names.public_packages() if "._" in name}


@pytest.mark.parametrize("name", ["autoshard.plan", "autoshard.ckpt.Restored", "autoshard.errors.DataError"])
def test_a_name_that_no_page_has_is_found(name):
    assert missing_entries(listed_names() - {name}) == [name]


def build(folder: Path, pages: dict[str, str]) -> int:
    """Builds a small site with the configuration of the real one, and returns the exit status."""
    source = folder / "docs"
    source.mkdir()
    shutil.copytree(DOCS / "_extensions", source / "_extensions")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(DOCS / "conf.py", source)
    (folder / "autoshard").symlink_to(ROOT / "autoshard")
    for name, text in pages.items():
        (source / name).write_text(text)
    options = ["-qW", "--keep-going", "-E", "-b", "dummy", "-D", "html_static_path=", "-d", str(folder / "trees")]
    return sphinx_build([*options, str(source), str(folder / "site")])


def test_a_public_name_without_an_entry_fails_the_build(tmp_path, capsys):
    assert build(tmp_path, {"index.rst": "Title\n=====\n\n.. public:: autoshard.ckpt\n\n   RetentionPolicy\n"}) == 1
    errors = capsys.readouterr().err
    assert "autoshard.ckpt.Restored is public and has no entry in the API reference" in errors
    assert "autoshard.ckpt.RetentionPolicy" not in errors


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("[there](other.md)", "cross-reference"),
        ("[there](#nowhere)", "nowhere"),
        ("{py:func}`autoshard.no_such`", "autoshard.no_such"),
    ],
)
def test_a_broken_link_fails_the_build(fault, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(public_names, "missing_names", lambda documented: [])
    assert build(tmp_path, {"index.md": f"# Title\n\n{fault}\n"}) == 1
    assert message in capsys.readouterr().err


def test_a_sound_page_is_built(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(public_names, "missing_names", lambda documented: [])
    assert build(tmp_path, {"index.md": "# Title\n\n## Part\n\n[there](#part)\n"}) == 0


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["pytrees of `Leaf`s"], ["pytrees of `Leaf`\\ s"]),
        (['such as "*/wq" or `*/wq`.'], ['such as "\\*/wq" or `*/wq`.']),
        (["Text.", "", "    code()", "", "More."], ["Text.", "", "::", "", "    code()", "", "More."]),
        (["Args:", "    x: a number."], ["Args:", "    x: a number."]),
    ],
)
def test_docstrings_become_restructured_text(written, read):
    assert docstrings.readable(written) == read


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])  # slow: with the installation
def test_the_first_page_runs_and_prints_what_it_shows(slow, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD", str(ROOT))
    (folder := tmp_path / "first").mkdir()  # plans shorten longer names of folders
    compared = 0
    for block, printed in run_blocks(FIRST_PAGE, folder, slow=slow):
        assert not differences(block, printed), differences(block, printed)
        compared += block.output is not None
    assert compared == sum(block.output is not None and (slow or not block.marks) for block in blocks(FIRST_PAGE)) > 3
    assert (folder / ".venv" / "bin" / "autoshard").exists() == slow


def test_pictures_are_small():
    pictures = list((DOCS / "pictures").glob("*.svg"))
    assert pictures and all(picture.stat().st_size < 200_000 for picture in pictures)
