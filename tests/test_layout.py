"""Where things are, how large they may get, and where JAX-private names may stand.

Which way imports point is for import-linter (`[tool.importlinter]` in pyproject.toml); here its contracts are broken
on purpose.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoshard"
LINKS = ("spmdrules", "sharding", "models", "ckpt")

PRIVATE = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib", "flax._src", "orbax.checkpoint._src")
# Allowed outside `_compat`: what JAX documents for writing a primitive, and the public name of the primitives' type.
ALLOWED = (
    "jax.extend.core.Primitive",
    "jax.interpreters.ad",
    "jax.interpreters.batching",
    "jax.interpreters.mlir",
)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Each (line, dotted name) that a module imports, relative ones resolved against its package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def modules() -> Iterator[tuple[Path, str, ast.AST]]:
    """Each source file of the package with its dotted name and syntax tree."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file, ".".join(file.relative_to(ROOT).with_suffix("").parts), ast.parse(file.read_text())


@pytest.mark.parametrize("name", LINKS)
def test_link_leads_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"autoshard/{name}"
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKS)
def test_importing_a_link_by_its_bare_name_names_the_right_import(name, run_python):
    module = next(file.stem for file in sorted((PACKAGE / name).iterdir()) if file.stem[0] != "_")
    for statement in (f"import {name}", f"import {name}.{module}", f"from {name} import {module}"):
        ran = run_python(statement)
        assert ran.returncode != 0, statement
        said = ran.stderr.strip().splitlines()[-1]
        assert said.startswith("ImportError: "), ran.stderr
        assert f"import autoshard.{name}" in said


def test_no_folder_and_no_file_is_too_large():
    folders = [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    modules_of = {folder: [file for file in folder.glob("*.py") if file.stem != "__init__"] for folder in folders}
    limits = {PACKAGE / "spmdrules" / "catalogue": 17}  # one file a family
    full = [str(f.relative_to(ROOT)) for f, files in modules_of.items() if len(files) > limits.get(f, 16)]
    long = [str(file.relative_to(ROOT)) for file, _, _ in modules() if len(file.read_text().splitlines()) > 400]
    assert (full, long) == ([], [])


BROKEN = {
    "upwards": ("spmdrules/core/rule.py", "from autoshard.sharding.cost import step_time", "parts"),
    "to the front page": ("spmdrules/core/rule.py", "from autoshard import plan", "front-page"),
    "upwards between rooms": ("sharding/program/tracing.py", "from autoshard.sharding.axes import roles", "sharding"),
    "in a function": ("sharding/cost/fusion.py", "def f():\n    from autoshard.models.gpt import GPT", "parts"),
    "in a cycle": ("sharding/cost/fusion.py", "from autoshard.sharding.cost import step_time", "no-cycles"),
    "for a type": (
        "sharding/cost/fusion.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from autoshard.sharding.cost import step_time",
        "no-cycles",
    ),
}


@pytest.mark.parametrize("name", [*BROKEN])
def test_an_import_that_points_the_wrong_way_is_found(name, tmp_path):
    file, source, contract = BROKEN[name]
    shutil.copytree(PACKAGE, tmp_path / "autoshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    check = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--contract", contract]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    with (tmp_path / "autoshard" / file).open("a") as module:
        module.write(f"\n{source}\n")
    ran = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1 and "BROKEN" in ran.stdout, ran.stdout + ran.stderr


def test_jax_private_names_stand_in_compat_only():
    found = [
        f"{file.relative_to(ROOT)}:{line} {target}"
        for file, name, tree in modules()
        if PACKAGE / "_compat" not in file.parents
        for line, target in imports(tree, name.rpartition(".")[0])
        if f"{target}.".startswith(tuple(f"{private}." for private in PRIVATE)) and target not in ALLOWED
    ]
    assert found == []


def test_jax_version_is_asked_for_in_compat_only():
    found = [
        str(file.relative_to(ROOT))
        for file, _, tree in modules()
        if PACKAGE / "_compat" not in file.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("__version_info__", "__version__")
        if isinstance(node.value, ast.Name) and node.value.id in ("jax", "jaxlib", "flax")
    ]
    assert found == []
