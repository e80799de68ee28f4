"""Section 7 of the design lists the public names of the subpackages, and nothing else."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import autoshard.ckpt
import autoshard.models
import autoshard.train
from autoshard import Plan
from autoshard._first_use import on_first_use
from autoshard.sharding.audit import Audit


@pytest.mark.parametrize("package", [autoshard.ckpt, autoshard.train], ids=lambda package: package.__name__)
def test_the_contract_lists_the_public_names(package, root: Path) -> None:
    contract = (root / "docs/design.md").read_text().split("## 7. The public contract")[1].split("\n## ")[0]
    table = contract.split(f"`{package.__name__}`:\n\n")[1].split("\n\n")[0]
    first_column = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    names = {name for cell in first_column for name in re.findall(r"`(\w+)", cell)}
    names |= set(re.findall(r"-> (\w+)`", "".join(first_column)))
    assert names == set(package.__all__)
    assert all(getattr(package, name).__name__ == name for name in names)


def test_methods_of_the_contract_exist(root: Path) -> None:
    row = next(
        line for line in (root / "docs/design.md").read_text().splitlines() if line.startswith("| `Checkpointer(")
    )
    methods = set(re.findall(r"`\.(\w+)", row))
    public = {name for name in vars(autoshard.ckpt.Checkpointer) if not name.startswith("_")} | {"restored"}
    assert methods == public


@pytest.mark.parametrize("kind", [Plan, Audit], ids=lambda kind: kind.__name__)
def test_attributes_of_the_contract_exist(kind: type, root: Path) -> None:
    rows = [row.split(" | ")[0] for row in (root / "docs/design.md").read_text().splitlines()]
    listed = {name for row in rows if row.startswith(f"| `{kind.__name__}.") for name in re.findall(r"\.(\w+)", row)}
    assert len(listed) > 8 and all(name in dir(kind) or name in kind.__dataclass_fields__ for name in listed), listed


@pytest.mark.parametrize("package", [autoshard.models, autoshard.train], ids=lambda package: package.__name__)
def test_a_stub_declares_the_names_that_are_imported_on_first_use(package, root: Path) -> None:
    stub = ast.parse((root / f"{package.__name__.replace('.', '/')}/__init__.pyi").read_text())
    declared = {
        alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    listed = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(declared) == sorted(package.__all__) == sorted(listed)
    for name, module in declared.items():
        assert getattr(package, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no_such'"):
        getattr(package, "no_such")  # noqa: B009
    assert dir(package) == sorted(package.__all__)


def test_a_library_that_lacks_a_name_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_example").mkdir()
    (tmp_path / "lazy_example" / "__init__.py").write_text("")
    (tmp_path / "lazy_example" / "steps.py").write_text("import json\njson.HiPrimitive\n")
    get, _ = on_first_use("lazy_example", {"plan": "steps"})
    with pytest.raises(ImportError, match=r"lazy_example\.steps cannot be imported: module 'json' has no attribute"):
        get("plan")
