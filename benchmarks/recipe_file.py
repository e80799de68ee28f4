"""Read a file of measured recipes: `[[recipe]]` tables, as in `data/recipes.toml`.

A row that cannot be read is kept with its problems, so that the other rows of a file can be used.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import common  # noqa: F401  sets up the path first

from autoshard._typed import convert, fields_of

OWN = Path(__file__).resolve().parent / "data" / "recipes.toml"
Options = Mapping[str, str | bool | int | float]


class RecipeFileError(Exception):
    """A file that is not a file of recipes."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a published run, and its measured step time.

    Attributes:
        id: its name, unique in its file.
        model: the model, by the name of a workload.
        target: one slice of the machine, such as `v6e:16x16`.
        batch: rows a step, over all devices.
        seq: tokens of a row.
        precision: of the products: `bf16` or `fp8`.
        seconds: measured seconds of a step.
        sharding: in words, see `recipe_words.parse_sharding`.
        remat: in words, see `recipe_words.parse_remat`.
        slices: the number of slices.
        note: what else there is to say. `recipe_words.parse_note` finds settings in it.
        source: the folder of the recipe in its repository.
        config: where else its settings are.
        options: the names of its sets of XLA options.
        more_options: further XLA options.
        param_dtype: the dtype of the parameters, as stored.
        moment_dtype: the dtype of the optimizer's first moment.
        dispatch: of experts: `capacity` or `dropless`.
        capacity_factor: of experts with a capacity.
        attention: the attention kernel.
        attention_blocks: its block sizes, by MaxText's names without `sa_block_`.
        fused_backward: whether one backward kernel computes all gradients.
        one_hot_embedding: whether tokens are looked up by a product with one-hot rows.
        vocab_tiles: the number of parts in which the loss is computed.
        xla_options: all XLA options; None if they are not known.
    """

    id: str
    model: str
    target: str
    batch: int
    seq: int
    precision: str
    seconds: float
    sharding: str
    remat: str
    slices: int = 1
    note: str = ""
    source: str = ""
    config: str = ""
    options: tuple[str, ...] | None = None
    more_options: Mapping[str, str | bool | int | float] | None = None
    param_dtype: str | None = None
    moment_dtype: str | None = None
    dispatch: str | None = None
    capacity_factor: float | None = None
    attention: str | None = None
    attention_blocks: Mapping[str, int] | None = None
    fused_backward: bool | None = None
    one_hot_embedding: bool | None = None
    vocab_tiles: int | None = None
    xla_options: Mapping[str, str | bool | int | float] | None = field(default=None, kw_only=True)

    @property
    def machine(self) -> str:
        """The target with its number of slices."""
        return f"{self.target}*{self.slices}" if self.slices > 1 else self.target


@dataclass(frozen=True)
class Entry:
    """A row of a file: its id, its recipe if it can be read, what is wrong with it, and fields that were ignored."""

    id: str
    recipe: Recipe | None = None
    problems: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def read_recipes(path: Path) -> list[Entry]:
    """Read all rows of a file.

    Raises:
        RecipeFileError: the file cannot be read, is not TOML, or has no `[[recipe]]` tables.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecipeFileError(f"{path} is not TOML: {error}") from error
    rows, sets = data.pop("recipe", None), data.pop("options", {})
    if not isinstance(rows, list) or not rows:
        raise RecipeFileError(f"{path} has no [[recipe]] tables")
    if data:
        raise RecipeFileError(f"{path}: there is no table '{next(iter(data))}'; there are 'recipe' and 'options'")
    problems: list[str] = []
    known: Mapping[str, Options] = convert(
        sets, Mapping[str, Mapping[str, str | bool | int | float]], "options", problems
    )
    if problems:
        raise RecipeFileError(f"{path}: {'; '.join(problems)}")
    entries: list[Entry] = []
    for number, row in enumerate(rows):
        entry = _entry(row, f"recipe[{number}]", known)
        if entry.id in {other.id for other in entries}:
            entry = Entry(f"{entry.id} ({number})", None, (f"id {entry.id!r} occurs twice", *entry.problems))
        entries.append(entry)
    return entries


def _entry(row: Any, where: str, sets: Mapping[str, Options]) -> Entry:
    if not isinstance(row, dict):
        return Entry(where, None, (f"{where} is not a table",))
    name = row["id"] if isinstance(row.get("id"), str) and row["id"] else where
    declared = {key: kind for key, (kind, _) in fields_of(Recipe).items() if key != "xla_options"}
    required = [each.name for each in fields(Recipe) if each.default is MISSING]
    problems = [f"{key} is missing" for key in required if key not in row]
    given = {key: convert(value, declared[key], key, problems) for key, value in row.items() if key in declared}
    ignored = tuple(key for key in row if key not in declared)
    if not problems:
        problems = _wrong_values(given, sets)
    if problems:
        return Entry(name, None, tuple(problems), ignored)
    return Entry(name, Recipe(**given, xla_options=_options(given, sets)), (), ignored)


def _wrong_values(given: Mapping[str, Any], sets: Mapping[str, Options]) -> list[str]:
    positive = ("batch", "seq", "seconds", "slices", "capacity_factor", "vocab_tiles")
    found = [f"{key} is {given[key]}; it must be above 0" for key in positive if (given.get(key, 1) or 0) <= 0]
    choices = {
        "precision": ("bf16", "fp8"),
        "dispatch": ("capacity", "dropless", None),
        "moment_dtype": ("float32", "bfloat16", None),
    }
    for key, allowed in choices.items():
        if given.get(key) not in allowed:
            found.append(f"{key} is {given[key]!r}; it must be {' or '.join(repr(each) for each in allowed if each)}")
    found += [
        f"there is no option set {name!r}; there are {', '.join(sets) or 'none'}"
        for name in given.get("options") or ()
        if name not in sets
    ]
    return found


def _options(given: Mapping[str, Any], sets: Mapping[str, Options]) -> Options | None:
    if given.get("options") is None and given.get("more_options") is None:
        return None
    found: dict[str, str | bool | int | float] = {}
    for name in given.get("options") or ():
        found |= sets[name]
    return found | (given.get("more_options") or {})
