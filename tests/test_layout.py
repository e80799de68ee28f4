"""Where things are, which way imports point, and where JAX-private names may stand."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoshard"
LINKS = ("spmdrules", "sharding", "models", "ckpt")

# A part may import from parts of a lower rank, and from its own. `autoshard` is the package's front page: it
# gathers the public names of the two parts below it.
RANKS = dict(
    _processes=1, spmdrules=1, sharding=2, autoshard=3, models=4, ckpt=4, train=5, commands=6, cli=7, __main__=8
)
PRIVATE = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib", "flax._src", "orbax.checkpoint._src")
# Allowed outside `_compat`: what JAX documents for writing a primitive, and the public name of the primitives' type.
ALLOWED = (
    "jax.extend.core.Primitive",
    "jax.interpreters.ad",
    "jax.interpreters.batching",
    "jax.interpreters.mlir",
)


def part_of(module: str) -> str:
    """The part of the package that a dotted name belongs to: `sharding` for `autoshard.sharding.cost.step_time`."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in RANKS or (PACKAGE / f"{first}.py").exists() else "autoshard"


def rank_of(part: str) -> int:
    """A part's rank; what is at the package's top and not listed (`_compat`, `errors`) is below all."""
    return RANKS.get(part, 0)


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


def wrong_directions(name: str, tree: ast.AST) -> list[str]:
    """The imports of one module that point from a lower part to a higher one, or sideways."""
    own = part_of(name.removesuffix(".__init__"))
    wrong = []
    for line, target in imports(tree, name.rpartition(".")[0]):
        if target.split(".")[0] != "autoshard" or part_of(target) == own:
            continue
        if rank_of(part_of(target)) >= rank_of(own):
            wrong.append(f"{name}:{line} imports {target}: {own} may not import from {part_of(target)}")
    return wrong


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


def test_imports_point_one_way():
    assert [problem for _, name, tree in modules() for problem in wrong_directions(name, tree)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("autoshard.spmdrules.core.rule", "from autoshard.sharding.cost import step_time"),
        ("autoshard.spmdrules.core.rule", "from autoshard import plan"),
        ("autoshard.sharding.cost.step_time", "from ...models.gpt import GPT"),
        ("autoshard.models.gpt", "import autoshard.ckpt"),
        ("autoshard._compat", "from autoshard.spmdrules.core.rule import Rule"),
        ("autoshard.train.run.loop", "def f():\n    from autoshard.cli import main"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(name, source):
    assert len(wrong_directions(name, ast.parse(source))) == 1


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
