"""The layout of the package: sizes of files and folders, places of imports, and uses of JAX-private names.

import-linter checks the direction of imports (`[tool.importlinter]` in pyproject.toml). The tests here break its
contracts on purpose.
"""

import ast
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard

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
    """Yield the line and the dotted name of each import of a module; relative ones are resolved against its package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


@functools.cache
def modules() -> list[tuple[Path, str, ast.AST]]:
    """List each source file of the package with its dotted name and syntax tree."""
    return [
        (file, ".".join(file.relative_to(ROOT).with_suffix("").parts), ast.parse(file.read_text()))
        for file in sorted(PACKAGE.rglob("*.py"))
    ]


@pytest.mark.parametrize("name", LINKS)
def test_link_leads_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"autoshard/{name}"
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKS)
def test_the_error_of_importing_a_link_names_the_right_import(name, run_python):
    module = next(file.stem for file in sorted((PACKAGE / name).iterdir()) if file.stem[0] != "_")
    for statement in (f"import {name}", f"import {name}.{module}", f"from {name} import {module}"):
        completed = run_python(statement)
        assert completed.returncode != 0, statement
        message = completed.stderr.strip().splitlines()[-1]
        assert message.startswith("ImportError: "), completed.stderr
        assert f"import autoshard.{name}" in message


def test_no_folder_and_no_file_is_too_large():
    folders = [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    modules_of = {folder: [file for file in folder.glob("*.py") if file.stem != "__init__"] for folder in folders}
    limits = {PACKAGE / "spmdrules" / "catalogue": 17}  # one file per family
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*BROKEN])
def test_an_import_in_the_wrong_direction_is_found(name, tmp_path):
    file, source, contract = BROKEN[name]
    shutil.copytree(PACKAGE, tmp_path / "autoshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    check = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--contract", contract]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    with (tmp_path / "autoshard" / file).open("a") as module:
        module.write(f"\n{source}\n")
    completed = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 1 and "BROKEN" in completed.stdout, completed.stdout + completed.stderr


# Files whose functions may import anything: commands, so that help is fast; the compiler's process, which sets
# environment variables before it imports JAX; and the end of a run, so that no first step waits for Matplotlib.
LATE_IMPORTS = (
    PACKAGE / "commands",
    PACKAGE / "sharding" / "audit" / "compiler_process.py",
    PACKAGE / "train" / "run" / "announcements.py",
)

IMPORTED_AS = {"pillow": "PIL"}  # packages whose modules have another name


@functools.cache
def extras() -> dict[str, set[str]]:
    """Map each optional dependency to the extras that have it. Packages that autoshard always needs are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def package(requirement: str) -> str:
        name = re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower()
        return IMPORTED_AS.get(name, name)

    always = {package(requirement) for requirement in project["dependencies"]}
    extras_of: dict[str, set[str]] = {}
    for extra, requirements in project["optional-dependencies"].items():
        for name in {package(requirement) for requirement in requirements} - always:
            extras_of.setdefault(name, set()).add(extra)
    return extras_of


def test_imports_in_functions_are_of_optional_dependencies():
    violations = [
        f"{file.relative_to(ROOT)}:{line} {target}"
        for file, name, tree in modules()
        if not any(file == place or place in file.parents for place in LATE_IMPORTS)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, target in imports(function, name.rpartition(".")[0])
        if not any(extra in file.read_text() for extra in extras().get(target.partition(".")[0], ()))
    ]
    assert violations == []


def test_no_import_is_for_type_checkers_only():
    guarded = [
        f"{file.relative_to(ROOT)}:{line}"
        for file, name, tree in modules()
        for line, target in imports(tree, name.rpartition(".")[0])
        if target == "typing.TYPE_CHECKING"
    ]
    assert guarded == []


def test_the_stub_of_the_front_page_declares_the_public_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    declared = [target.rpartition(".") for _, target in imports(stub, "autoshard")]
    listed = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(listed) == sorted(["__version__", *(name for _, _, name in declared)]) == sorted(autoshard.__all__)
    for module, _, name in declared:
        assert getattr(autoshard, name) is getattr(importlib.import_module(module), name)


def test_jax_private_names_are_used_in_compat_only():
    uses = [
        f"{file.relative_to(ROOT)}:{line} {target}"
        for file, name, tree in modules()
        if PACKAGE / "_compat" not in file.parents
        for line, target in imports(tree, name.rpartition(".")[0])
        if f"{target}.".startswith(tuple(f"{private}." for private in PRIVATE)) and target not in ALLOWED
    ]
    assert uses == []


def test_jax_version_is_read_in_compat_only():
    uses = [
        str(file.relative_to(ROOT))
        for file, _, tree in modules()
        if PACKAGE / "_compat" not in file.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("__version_info__", "__version__")
        if isinstance(node.value, ast.Name) and node.value.id in ("jax", "jaxlib", "flax")
    ]
    assert uses == []
