"""Operators by the names that people know them by, family by family. Coverage and the tests walk this list."""

from __future__ import annotations

import importlib
import pkgutil

from autoshard.spmdrules.catalogue.entry import Operator, f32

__all__ = ["Operator", "catalogue", "f32"]


def catalogue() -> list[tuple[str, Operator]]:
    """Every named operator with its family, by family and in the order in which the family lists them.

    A family is a module of this package that has `OPERATORS`.

    Raises:
        ValueError: a name stands there twice, or is that of another operator's gradient.
    """
    found: list[tuple[str, Operator]] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        family = importlib.import_module(f"{__name__}.{module.name}")
        found += [(module.name, op) for op in getattr(family, "OPERATORS", ())]
    names = [name for _, op in found for name in (op.name, *([f"{op.name}_grad"] if op.wrt else []))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the catalogue has {', '.join(twice)} twice: give each operator a name of its own")
    return found
