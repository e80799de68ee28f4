"""The API reference: a directive that documents names of a package, and a check that no public name is missing.

    .. public:: autoshard.ckpt

       Checkpointer
       RetentionPolicy

writes a table of these names and an entry for each. At the end of a build, each public name without an entry is a
warning, which `make docs` makes an error.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_origin

from docstrings import readable
from docutils import nodes
from docutils.parsers.rst.directives import flag
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

LOGGER = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


class Public(SphinxDirective):
    """Documents names of a package."""

    required_arguments = 1
    has_content = True
    option_spec = {"made-for-users": flag}  # classes whose objects users get from functions: no constructor is shown

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = [line.strip() for line in self.content if line.strip()]
        lines = [f".. py:currentmodule:: {module}", ""]
        if len(names) > 1:
            lines += [".. list-table::", "   :class: names", ""]
            for name in names:
                lines += [f"   * - :py:obj:`~{module}.{name}`", f"     - {summary(module, name)}"]
            lines += [""]
        for name in names:
            lines += [*entry(module, name, "made-for-users" in self.options), ""]
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=self.get_source_info()[0]), section)
        return section.children


def summary(module: str, name: str) -> str:
    """The first sentence of a name's documentation, in one line."""
    value = getattr(importlib.import_module(module), name)
    described = inspect.isclass(value) or inspect.isroutine(value)
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0] if described else "\n".join(data_text(module, name))
    return " ".join(readable(re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0].split("\n")))


def entry(module: str, name: str, made_for_users: bool = False) -> list[str]:
    """The directive that documents a name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        foreign = [base.__name__ for base in value.__mro__ if not is_ours(base)]
        described = described_attributes(value)
        return [
            f".. {kind}:: {name}{'()' if made_for_users else ''}",
            f"   :inherited-members: {', '.join(foreign)}",
            f"   :exclude-members: {', '.join(described)}",
        ]
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}"]
    text = data_text(module, name)
    is_type = isinstance(value, UnionType) or get_origin(value) is not None
    return [f".. py:{'type' if is_type else 'data'}:: {name}", "", *(f"   {line}" for line in readable(text))]


def data_text(module: str, name: str) -> list[str]:
    """The docstring below an assignment.

    Raises:
        ValueError: there is none.
    """
    home = defining_module(module, name)
    text = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name))
    if text is None:
        raise ValueError(f"{home}.{name} has no docstring: write one below the assignment")
    return text


SECTION = re.compile(r"^(?:Attributes|Args):\n((?:\n|    .*(?:\n|$))+)", re.MULTILINE)


def is_ours(cls: type) -> bool:
    """Whether the package defines a class."""
    return cls.__module__.partition(".")[0] == "autoshard"


def attribute_lines(cls: type) -> list[str]:
    """The lines under `Attributes:`, or `Args:`, in the docstring of a class."""
    section = SECTION.search(inspect.cleandoc(cls.__doc__ or ""))
    return section[1].rstrip().splitlines() if section else []


def described_attributes(cls: type) -> list[str]:
    """The attributes that the docstrings of a class and of its bases describe. Their values get no entries."""
    lines = [line for base in cls.__mro__ if is_ours(base) for line in attribute_lines(base)]
    return [found[1] for line in lines if (found := re.match(r"    (\w+):", line))]


def add_inherited_attributes(app: Sphinx, what: str, name: str, cls: Any, options: Any, lines: list[str]) -> None:
    """Adds to the docstring of a class the attributes that its bases describe. Runs before napoleon reads it."""
    if what not in ("class", "exception") or not inspect.isclass(cls):
        return
    inherited = [line for base in cls.__mro__[1:] if is_ours(base) for line in attribute_lines(base)]
    if inherited:
        own = SECTION.search("\n".join(lines))
        end = len(lines) if own is None else "\n".join(lines)[: own.end()].rstrip().count("\n") + 1
        lines[end:end] = inherited if own else ["", "Attributes:", *inherited]


def defining_module(module: str, name: str) -> str:
    """The module in which a name is assigned, found along the imports of packages; a stub has those on first use."""
    source = Path(inspect.getfile(importlib.import_module(module)))
    stub = source.with_suffix(".pyi")
    for node in ast.parse((stub if stub.exists() else source).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return defining_module(node.module, name)
    return module


def public_packages() -> list[str]:
    """`autoshard`, and its packages that list public names in `__all__`."""
    return ["autoshard", "autoshard.errors", "autoshard.models.pretrained"] + [
        f"autoshard.{file.parent.name}"
        for file in sorted((ROOT / "autoshard").glob("*/__init__.py"))
        if not file.parent.name.startswith("_") and "__all__" in file.read_text()
    ]


def public_names() -> Iterator[tuple[str, Any]]:
    """Each public name with its package, `autoshard.ckpt.Restored`, and its object."""
    for package in public_packages():
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or own_classes(module)
        for name in names:
            if not name.startswith("__"):
                yield f"{package}.{name}", getattr(module, name)


def own_classes(module: ModuleType) -> list[str]:
    """The public classes that a module without `__all__` defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def public_members(name: str, cls: type) -> Iterator[str]:
    """The public methods, properties and fields of a class, without those of other libraries."""
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    methods = [
        member
        for base in cls.__mro__
        if is_ours(base)
        for member, value in vars(base).items()
        if inspect.isroutine(value) or isinstance(value, property | functools.cached_property)
    ]
    for member in dict.fromkeys([*fields, *methods]):
        if not member.startswith("_"):
            yield f"{name}.{member}"


def missing_names(documented: set[str]) -> list[str]:
    """The public names, and members of public classes, that have no entry. One entry of an object is enough."""
    objects = list(public_names())
    seen = {id(value): name for name, value in objects if name in documented}
    missing = []
    for name, value in objects:
        if name not in documented and id(value) not in seen:
            missing.append(name)
        elif name in documented and inspect.isclass(value):
            described = {f"{name}.{attribute}" for attribute in described_attributes(value)}
            missing += [member for member in public_members(name, value) if member not in documented | described]
    return missing


def without_constructor(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str, None] | None:
    """Leaves out the empty parentheses that `entry` writes for classes that users do not construct."""
    return ("", None) if what == "class" and signature == "()" else None


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of each public name without an entry."""
    documented = set(env.domains.python_domain.objects)
    for name in missing_names(documented):
        LOGGER.warning(
            "%s is public and has no entry in the API reference: add it to a page of docs/api", name, type="api"
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive and the check."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", add_inherited_attributes, priority=400)
    app.connect("autodoc-process-signature", without_constructor, priority=400)  # before `parsable`
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
