"""The files for contributors, citations and reports are valid and agree with the project; file formats stay data."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.release import version_mismatches

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = ("bug_report", "feature_request")
INPUTS = {"checkboxes", "dropdown", "input", "textarea"}
UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
}


def parsed(path: str):
    return yaml.safe_load((ROOT / path).read_text())


@pytest.mark.parametrize("form", FORMS)
def test_report_form_is_valid(form):
    content = parsed(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert content["name"] and content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert fields and {field["type"] for field in fields} <= INPUTS
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_report_forms_are_all_tested():
    files = {file.stem for file in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
    assert files == {*FORMS, "config"}
    assert isinstance(parsed(".github/ISSUE_TEMPLATE/config.yml")["blank_issues_enabled"], bool)


def test_pre_commit_runs_make_lint_with_no_versions_of_its_own():
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["entry"], hook["language"]) == ("local", "make lint", "system")
    assert hook["pass_filenames"] is False
    for file in ("autoshard/cli.py", "pyproject.toml", "benchmarks/importlinter.toml"):
        assert re.search(hook["files"], file)


def test_citation_agrees_with_the_project():
    citation = parsed("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    for key, project_key in {"title": "name", "abstract": "description"}.items():
        assert citation[key] == PROJECT[project_key]
    for key in ("version", "license", "authors", "keywords"):
        assert citation[key] == PROJECT[key]


def test_version_is_the_same_everywhere():
    mismatches = version_mismatches(ROOT, PROJECT["version"])
    assert [line for line in mismatches if f"'## {PROJECT['version']} - unreleased'" not in line] == []


def test_no_module_can_unpickle_or_evaluate_a_file():
    """What SECURITY.md promises of checkpoints and plans."""
    unsafe = []
    for file in sorted((ROOT / "autoshard").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names} & UNPICKLERS
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]} & UNPICKLERS
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec"}
            elif isinstance(node, ast.keyword):
                names = {node.arg} & {"allow_pickle"}
            else:
                continue
            unsafe += [f"{file.relative_to(ROOT)}:{node.lineno} {name}" for name in names]
    assert unsafe == []
