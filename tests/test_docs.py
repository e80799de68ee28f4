"""The examples in the README and in docstrings run, and links between documents are valid."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
DOCUMENTED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "autoshard").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("number", range(len(README_EXAMPLES)))
def test_readme_example_runs(number, run_python, tmp_path):
    completed = run_python(README_EXAMPLES[number], cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr


def test_readme_has_examples():
    assert len(README_EXAMPLES) == 2


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
