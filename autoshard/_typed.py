"""Converts values from JSON, TOML or a command line to the types that dataclasses declare."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Readers = Mapping[type, Callable[[Any, str, list[str]], Any]]

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "text",
    bool: "true or false",
    types.NoneType: "nothing",
}


# Python's spellings -> those of JSON. Without them, all three would be texts, which count as true.
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def read_value(text: str) -> Any:
    """Reads a value of a command line: JSON, Python's `True`, `False` or `None`, or else text.

    >>> read_value("4"), read_value("False"), read_value("auto")
    (4, False, 'auto')
    """
    try:
        return json.loads(_LITERALS.get(text, text))
    except json.JSONDecodeError:
        return text


def convert(
    value: Any, kind: Any, where: str, problems: list[str], readers: Readers = types.MappingProxyType({})
) -> Any:
    """Converts a value to a type: lists to tuples, tables and rows to dataclasses, whole numbers to floats.

    Args:
        value: a value of the types that JSON and TOML have.
        kind: the type, written as in an annotation.
        where: the name of the value in messages.
        problems: receives a message for each value of a wrong type.
        readers: functions that convert other types, `(value, where, problems) -> value`.

    Returns:
        The converted value; meaningless if a problem was added.

    >>> wrong = []
    >>> convert([1, 2.5], tuple[float, ...], "rates", wrong), wrong
    ((1.0, 2.5), [])
    >>> convert({"size": "8"}, Mapping[str, int], "mesh", wrong) and wrong
    ["mesh 'size' is '8'; it must be a whole number"]
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in readers:
        return readers[origin](value, where, problems)
    if origin in (Union, types.UnionType):
        return _fit_one_of(value, arguments, where, problems, readers)
    if origin is Literal:
        return value if _is_choice(value, arguments) else _report(value, kind, where, problems)
    if origin is Any:
        return value
    if origin is tuple:
        return _fit_tuple(value, kind, where, problems, readers)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return _report(value, kind, where, problems)
        named = [(convert(k, arguments[0], f"a key of {where}", problems), k) for k in value]
        return {k: convert(value[old], arguments[1], f"{where} {k!r}", problems, readers) for k, old in named}
    if dataclasses.is_dataclass(origin):
        return _fit_dataclass(value, origin, where, problems, readers)
    return _fit_plain(value, origin, where, problems)


def finite(value: Any, where: str, problems: list[str]) -> Any:
    """A reader for `fit` that accepts any finite int or float."""
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if number and abs(value) <= sys.float_info.max:
        return value
    problems.append(f"{where} is {short_repr(value)}; it must be a finite number")
    return value


def _fit_plain(value: Any, kind: Any, where: str, problems: list[str]) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    # In Python a bool is an int, but a bool in place of a number is a mistake.
    if kind is float and isinstance(value, int) and abs(value) < sys.float_info.max and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
        return value
    return _report(value, kind, where, problems)


def _fit_one_of(value: Any, kinds: Sequence[Any], where: str, problems: list[str], readers: Readers) -> Any:
    for kind in kinds:
        found = convert(value, kind, where, wrong := [], readers)
        if not wrong:
            return found
    inner = [kind for kind in kinds if kind is not types.NoneType]
    if len(inner) == 1:  # a problem within the value is more specific than a problem of the whole value
        return convert(value, inner[0], where, problems, readers)
    return _report(value, Union[tuple(kinds)], where, problems)  # noqa: UP007  from a tuple


def _fit_tuple(value: Any, kind: Any, where: str, problems: list[str], readers: Readers) -> Any:
    kinds = get_args(kind)
    if not isinstance(value, list | tuple):
        return _report(value, kind, where, problems)
    if kinds[-1:] == (...,):
        kinds = (kinds[0],) * len(value)
    elif len(kinds) != len(value):
        return _report(value, kind, where, problems)
    pairs = enumerate(zip(value, kinds, strict=True))
    return tuple(convert(each, one, f"{where}[{n}]", problems, readers) for n, (each, one) in pairs)


def _fit_dataclass(value: Any, kind: Any, where: str, problems: list[str], readers: Readers) -> Any:
    if isinstance(value, kind):
        return value
    declared = fields_of(kind)
    if isinstance(value, list | tuple) and len(value) == len(declared):
        value = dict(zip(declared, value, strict=True))
    if not isinstance(value, Mapping):
        return _report(value, kind, where, problems)
    before = len(problems)
    problems += [f"{where}: there is no '{name}'; there are {', '.join(declared)}" for name in value
                 if name not in declared]  # fmt: skip
    problems += [f"{where}: '{name}' is missing" for name, (_, needed) in declared.items()
                 if needed and name not in value]  # fmt: skip
    found = {name: convert(value[name], declared[name][0], f"{where}.{name}", problems, readers) for name in value
             if name in declared}  # fmt: skip
    return kind(**found) if len(problems) == before else value


@functools.cache
def fields_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Maps each field of a dataclass to its type and whether it is required."""
    types_of, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        field.name: (types_of[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def _is_choice(value: Any, choices: Sequence[Any]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _report(value: Any, kind: Any, where: str, problems: list[str]) -> Any:
    problems.append(f"{where} is {short_repr(value)}; it must be {type_text(kind)}")
    return value


def short_repr(value: Any) -> str:
    """Returns a value's `repr` for a message on one line, shortened to 60 characters (chosen).

    Arrays in a container are not printed, because their numbers say nothing.

    >>> short_repr([1, "a"]), short_repr("x" * 100)[-5:]
    ("[1, 'a']", 'xx...')
    """
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception:  # the `repr` of a user's value may raise anything; the message must not fail
        return f"a {type(value).__name__} that cannot be shown"
    if isinstance(value, (Mapping, list, tuple)) and re.search(r"\b([Aa]rray|ShapeDtypeStruct)\(", text):
        return _contents_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _contents_text(value: Mapping[Any, Any] | Sequence[Any]) -> str:
    """Describes a container of arrays: `a dict with the keys 'up', 'down'`, `a tuple of 2 items`."""
    kind, items = type(value).__name__, list(value)
    if not isinstance(value, Mapping):
        return f"a {kind} of {len(items)} item{'s' * (len(items) != 1)}"
    more = f" and {len(items) - 3} more" * (len(items) > 3)
    return f"a {kind} with the key{'s' * (len(items) != 1)} {', '.join(map(repr, items[:3]))}{more}"


def type_text(kind: Any) -> str:
    """Describes a type in messages.

    >>> type_text(int | None), type_text(tuple[str, ...]), type_text(Literal["ring", "switch"])
    ('a whole number or nothing', 'a list', "'ring' or 'switch'")
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_text, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return "a list" if arguments[-1:] == (...,) else f"a list of {len(arguments)}"
    return _WORDS.get(origin, "a table")
