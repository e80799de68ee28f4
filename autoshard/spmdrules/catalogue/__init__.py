"""Operators by the names that people know them by, family by family. Coverage and the tests walk this list."""

from autoshard.spmdrules.catalogue.entry import Operator, f32

__all__ = ["Operator", "f32"]
