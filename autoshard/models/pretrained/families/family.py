"""What a family of pretrained models consists of, and readers of values in a `config.json`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.pretrained.families.constants import MOST_PARTS
from autoshard.models.pretrained.tables import Stacks, Stored, Table

ROTARY_BUFFERS = (r".*rotary_emb\.inv_freq",)
"""Names of tensors, as regular expressions, that folders of old releases contain and no model needs."""
LARGEST = sys.float_info.max
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


Spelling = Mapping[str, str]


def decoder_stacks(cfg: Any) -> Stacks:
    """Return the only stack of layers of a `Decoder`."""
    return {"": cfg.kinds}


def decoder_unneeded(cfg: Any) -> tuple[str, ...]:
    """Return the names that a folder may have besides: the head, if it shares the embedding's parameter."""
    return ("lm_head.weight",) if cfg.tie_head else ()


def nothing_copied(config: Config) -> dict[str, str]:
    """Return the tensors that are copied: none."""
    return {}


def decoder_batch(cfg: Any, batch: tuple[int, int] | None) -> dict[str, Any]:
    """Return the shapes of a batch of rows and positions, by default 8 rows a device, of at most 4096 positions."""
    tokens = jax.ShapeDtypeStruct(batch or (8 * len(jax.devices()), min(cfg.context, 4096)), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


@shown
@dataclass(frozen=True)
class Family:
    """A family of pretrained models.

    Attributes:
        name: its name.
        architectures: the values of `architectures` in a `config.json` that belong to it.
        config: reads a `config.json` into the model's config, a dataclass with the fields `dtype` and `param_dtype`, or
            one whose fields are such dataclasses. It raises `AutoshardError` for a feature that is not built.
        table: the tensors of a model with this config.
        ignored: names of tensors that a folder may have and the model does not need, as regular expressions.
        model: makes the model from its config and `rngs`. Its `loss` takes a batch.
        stacks: the stacks of layers of a model with this config.
        unneeded: further names that a folder may have with this config, as regular expressions.
        copied: names of tensors that other programs use and the model does not, as regular expressions -> what they
            are, for messages. Saving the model copies them from its folder. The argument is the folder's `config.json`.
        batch: the shapes of a batch to plan for, from the config and the rows and positions, or None.
        values: undoes `config`: returns the content of a `config.json`, without the architecture. A model that was made
            here is written with it if `config` then reads the same config. None: no such model is written.
        text_of: architectures of models with towers, for images or sound, whose text model belongs to this family. Only
            the text model of their folders is read.
        spellings: other spellings of the tensors' names: start of a name in the table -> what folders have in its
            place. A folder is read, and written back, in the spelling that fits it best.
    """

    name: str
    architectures: tuple[str, ...]
    config: Callable[[Config], Any]
    table: Callable[[Any], Table]
    ignored: tuple[str, ...] = ROTARY_BUFFERS
    model: Callable[..., nnx.Module] = Decoder
    stacks: Callable[[Any], Stacks] = decoder_stacks
    unneeded: Callable[[Any], tuple[str, ...]] = decoder_unneeded
    copied: Callable[[Config], dict[str, str]] = nothing_copied
    batch: Callable[[Any, tuple[int, int] | None], dict[str, Any]] = decoder_batch
    spellings: tuple[Spelling, ...] = ()
    text_of: tuple[str, ...] = ()
    values: Callable[[Any], Mapping[str, Any]] | None = None

    def spelled(self, cfg: Any, spelling: int) -> Table:
        """Return the table in a spelling: 0 is the table's own, n the n-th other one."""
        table = self.table(cfg)
        if not spelling:
            return table
        starts = self.spellings[spelling - 1]
        return {path: Stored(_respelled(row.name, starts), row.layout) for path, row in table.items()}


def _respelled(name: str, starts: Spelling) -> str:
    for start, other in starts.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name


class Config:
    """The values of a `config.json`. Values of the wrong type and missing ones are errors that name the file.

    Args:
        values: the file's content.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def with_defaults(self, **values: Any) -> Config:
        """Return the same with values for keys that the file does not have. A key whose value is null stays null."""
        return Config({**values, **self.values}, self.where)

    def refuse(self, message: str) -> AutoshardError:
        """Return an error about the file."""
        return AutoshardError(f"{self.where}: {message}")

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn errors of a model's config into errors that name the file. An `AutoshardError` names it itself."""
        try:
            yield
        except AutoshardError:
            raise
        except (TypeError, ValueError) as error:
            raise AutoshardError(f"{self.where}: {error}") from error

    def number(self, name: str, default: Any = ...) -> Any:
        """Return a finite number; `default` if it is missing or null."""
        value = self.values.get(name)
        if value is None and default is not ...:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self.refuse(f"{name} is {value!r:.40}; it must be a finite number")
        return value

    def positive(self, name: str, default: Any = ...) -> Any:
        """Return a number above 0 as a float; `default` if it is missing or null."""
        value = self.number(name, default)
        if value is not None and value <= 0:
            raise self.refuse(f"{name} is {value!r}; it must be above 0")
        return None if value is None else float(value)

    def table(self, name: str) -> dict[str, Any]:
        """Return a table; an empty one if it is missing or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(f"{name} is {value!r}; it must be a table")
        return dict(value or {})

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`."""
        value = self.number(name, ... if default is None else default)
        if not isinstance(value, int) or value < least:
            raise self.refuse(f"{name} is {value!r}; it must be a whole number of at least {least}")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a number of layers or of experts: a whole number from `least` to `MOST_PARTS`."""
        value = self.size(name, default, least=least)
        if value > MOST_PARTS:
            raise self.refuse(
                f"{name} is {value}; it must be at most {MOST_PARTS}. The file is damaged, or not that of a model"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean. Null counts as false, as in transformers. If the default is true, null is refused."""
        value = self.values.get(name, default)
        value = False if value is None and not default else value
        if not isinstance(value, bool):
            raise self.refuse(f"{name} is {value!r}; it must be true or false")
        return value

    def activation(self, *names: str) -> Any:
        """Return the activation that the config gives under the first of these names that it contains."""
        name = next((name for name in names if self.values.get(name) is not None), names[-1])
        value = self.values.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refuse(f"{name} is {value!r}; the activations that are built are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def refuse_values(self, **allowed: Any) -> None:
        """Refuse features that are not built: values other than these, where they are there at all."""
        for name, value in allowed.items():
            if self.values.get(name) not in (None, value):
                raise self.refuse(f"{name} is {self.values[name]!r}; only {value!r} is built")

    def windows(self, default: Sequence[bool]) -> list[int | None]:
        """Return the window of each layer.

        Args:
            default: whether each layer has a window, if there are no `layer_types`.
        """
        types = self.values.get("layer_types")
        if types is not None:
            known = ("sliding_attention", "full_attention")
            if not isinstance(types, list) or len(types) != len(default) or any(t not in known for t in types):
                raise self.refuse(f"layer_types must be one of {', '.join(known)} for each of {len(default)} layers")
            default = [t == "sliding_attention" for t in types]
        return [self.size("sliding_window") if windowed else None for windowed in default]

    def rotary(self, base: float = 10_000.0, scope: str | None = None) -> Rotary:
        """Return the rotary positions.

        They are in `rope_parameters`, there perhaps for each type of layer, or in `rope_theta` and `rope_scaling`.

        Args:
            base: the base if none is given.
            scope: the type of layer.
        """
        given, where = self.rotary_table(), f"{self.where}, rotary positions"
        if scope is not None and scope in given:
            given = Config(given, where).table(scope)
            if given.get("truncate") is False:
                raise self.refuse(
                    f"rope_parameters of {scope} have truncate: false, which transformers ignores there, and other "
                    "programs apply: remove it"
                )
        elif (original := self.values.get("original_max_position_embeddings")) is not None:
            given["original_max_position_embeddings"] = original
        given = {"partial_rotary_factor": self.values.get("partial_rotary_factor"), **given}
        found = self if given.get("rope_theta") is None else Config(given, where)
        return self.scaled(found.number("rope_theta", base), given)

    def rotary_table(self) -> dict[str, Any]:
        """Return the table of rotary positions. If the file has two that differ, readers disagree on which one counts.

        Raises:
            AutoshardError: the file has two tables that differ.
        """
        new, old = self.table("rope_parameters"), self.table("rope_scaling")
        renamed = {"rope_type" if key == "type" and "rope_type" not in old else key: old[key] for key in old}
        if differing := [key for key, value in renamed.items() if new and new.get(key) != value]:
            raise self.refuse(
                f"rope_parameters and rope_scaling differ in {', '.join(differing)}: keep one of the two tables"
            )
        return new or old

    def scaled(self, base: float, given: Mapping[str, Any]) -> Rotary:
        """Return rotary positions with this base, scaled as a table of the file says."""
        kind = given.get("rope_type", given.get("type", "default"))
        own = Config(given, f"{self.where}, rotary positions")
        part = float(own.number("partial_rotary_factor", 1.0))
        if kind == "proportional":
            factor = float(own.number("factor", 1.0))
            return Rotary(base, "none" if factor == 1.0 else "linear", factor, fraction=part)
        if part != 1.0:
            raise self.refuse(f"partial_rotary_factor is {part}; it is built for the rope_type 'proportional' only")
        if kind in ("default", None):
            return Rotary(base)
        if kind not in ("linear", "llama3", "yarn"):
            built = "default, linear, llama3, yarn, proportional"
            raise self.refuse(f"rotary positions of type {kind!r} are not built; built are {built}")
        if "factor" not in given:
            raise self.refuse(f"rotary positions of type {kind!r} have no factor")
        if kind == "linear":
            return Rotary(base, "linear", float(own.number("factor")))
        context = self.size("max_position_embeddings")
        original = int(own.positive("original_max_position_embeddings", context))
        if kind == "llama3":
            low, high = float(own.number("low_freq_factor")), float(own.number("high_freq_factor"))
            return Rotary(base, "llama3", float(own.number("factor")), original, low, high)
        factor = float(own.number("factor", context / original))
        return Rotary(
            base, "yarn", factor, original, beta_fast=float(own.number("beta_fast", 32.0) or 32.0),
            beta_slow=float(own.number("beta_slow", 1.0) or 1.0), truncate=own.flag("truncate", True),
            attention_factor=attention_factor(own, factor),
        )  # fmt: skip


def attention_factor(given: Config, factor: float) -> float | None:
    """Return the factor of cosine and sine under `yarn`, from a table of rotary positions; None for the default."""
    of_one, of_all = given.number("mscale", None), given.number("mscale_all_dim", None)
    if (found := given.number("attention_factor", None)) is not None or not of_one or not of_all:
        return found
    return magnitude(factor, of_one) / magnitude(factor, of_all)


def magnitude(factor: float, weight: float) -> float:
    """Return by how much `yarn` scales queries or keys in a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def same_layers(count: int, **kind: Any) -> tuple[LayerKind, ...]:
    """Return `count` layers of one kind."""
    return (LayerKind(**kind),) * count
