"""Copies a model's config with other values, also of fields of the configs of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def config_fields(cfg: Any) -> set[str]:
    """Return the names of the fields of a model's config, and of the configs that are its fields."""
    found = {field.name for field in dataclasses.fields(cfg)}
    return found.union(*(config_fields(inner) for inner in inner_configs(cfg).values()))


def with_changes(cfg: Any, changes: Mapping[str, Any]) -> Any:
    """Return a config with other values. A value that is not the config's own goes to all its inner configs.

    Raises:
        TypeError: there is no such field.
        ValueError: a config rejects a value.
    """
    if unknown := sorted(set(changes) - config_fields(cfg)):
        raise TypeError(f"{type(cfg).__name__} has no field {', '.join(unknown)}")
    own = {field.name for field in dataclasses.fields(cfg)}
    rest = {name: value for name, value in changes.items() if name not in own}
    inner = {
        field: with_changes(each, {name: rest[name] for name in rest.keys() & config_fields(each)})
        for field, each in inner_configs(cfg).items()
    }
    return dataclasses.replace(cfg, **inner, **{name: value for name, value in changes.items() if name in own})


def inner_configs(cfg: Any) -> dict[str, Any]:
    """Return the fields of a config that are configs of models of their own."""
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    return {name: value for name, value in values.items() if hasattr(value, "param_dtype")}
