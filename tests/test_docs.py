"""The examples in the README and in docstrings run, and links between documents are valid."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES_WITH_PROGRAMS = ("README.md", "docs/your-code.md")
EXAMPLES = [
    (page, example)
    for page in PAGES_WITH_PROGRAMS
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
DOCUMENTED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "autoshard").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize(("page", "example"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_the_programs_of_a_page_run(page, example, run_python, tmp_path):
    completed = run_python(example, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr


def test_pages_have_programs():
    assert {page for page, _ in EXAMPLES} == set(PAGES_WITH_PROGRAMS)


def test_the_readme_is_read_in_three_minutes():
    """Adults read about 240 words of English per minute (Brysbaert 2019). Tables and code count as words too."""
    assert len((ROOT / "README.md").read_text().split()) <= 3 * 240


@pytest.mark.parametrize("module", DOCUMENTED)
def test_docstring_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_links_between_documents_are_valid():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
