"""Named operators, family by family. The coverage table and the tests iterate over them."""

from __future__ import annotations

import importlib
import pkgutil

from autoshard.spmdrules.catalogue.entry import Operator, f32

__all__ = ["Operator", "catalogue", "f32"]


def catalogue() -> list[tuple[str, Operator]]:
    """Returns every named operator with its family, sorted by family, in the order in which a family lists them.

    A family is a module of this package that defines `OPERATORS`.

    Raises:
        ValueError: two operators have the same name, or a name is also that of another operator's gradient.
    """
    found: list[tuple[str, Operator]] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        family = importlib.import_module(f"{__name__}.{module.name}")
        found += [(module.name, op) for op in getattr(family, "OPERATORS", ())]
    names = [name for _, op in found for name in (op.name, *([f"{op.name}_grad"] if op.wrt else []))]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the catalogue has {', '.join(duplicates)} twice. Give each operator a unique name.")
    return found
