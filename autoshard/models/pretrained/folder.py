"""A folder as it comes from the Hub: `config.json`, and tensors in safetensors files.

Nothing from the folder is executed: no code of its own, and no pickled files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.exchange import safetensors
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError
from autoshard.models.pretrained.constants import PIECE_BYTES
from autoshard.models.pretrained.families import text_config
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.quantized import Scheme, scheme_of

CONFIG = "config.json"
FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes of tensors that are not quantized."""
HEAD = "lm_head.weight"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@shown
@dataclass(frozen=True)
class Folder:
    """A folder of a pretrained model.

    Attributes:
        path: the folder.
        config: the content of its `config.json`; for a model with towers, the config of its text model.
        text_of: the architecture of the model with towers of which only the text model is read; else empty.
    """

    path: Path
    config: Mapping[str, Any]
    text_of: str = ""

    @classmethod
    def open(cls, path: Any) -> Folder:
        """Read the config of a folder.

        Raises:
            AutoshardError: there is no folder or no config, or it is damaged.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise AutoshardError(
                f"{str(folder)!r} is not a folder: give the folder of a model, with its {CONFIG}{hub_hint(path)}"
            )
        file = folder / CONFIG
        if not file.exists():
            raise AutoshardError(f"{str(folder)!r} has no {CONFIG}, which says what model it is")
        config = read_table(file)
        text = text_config(config, str(file))
        return cls(folder, config) if text is None else cls(folder, text, config["architectures"][0])

    @property
    def values(self) -> Config:
        """The config, with checks."""
        return Config(self.config, str(self.path / CONFIG))

    @property
    def scheme(self) -> Scheme | None:
        """The scheme in which tensors are quantized."""
        return scheme_of(self.values)

    @property
    def has_tensors(self) -> bool:
        """Whether the folder has safetensors files, or an index of some."""
        return any(self.path.glob("*.safetensors")) or (self.path / safetensors.INDEX).exists()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name. Their values are read on demand; those of quantized ones are float32.

        Raises:
            AutoshardError: a file is missing, damaged or truncated, there are pickled files only, scales are missing or
                have wrong shapes, or the scheme of quantization is not built.
        """
        scheme, stored = self.scheme, self.stored_tensors()
        return stored if scheme is None else scheme.plain(stored)

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors as they are stored, by name: of quantized ones, codes and scales."""
        if not self.has_tensors:
            if pickled := sorted(file.name for pattern in _PICKLED for file in self.path.glob(pattern)):
                raise AutoshardError(
                    f"{str(self.path)!r} has no safetensors files, only {pickled[0]}: such files can execute code when "
                    "they are read, so they are refused. Convert them once, where you trust them: "
                    "transformers' from_pretrained(FOLDER), then save_pretrained(NEW_FOLDER)"
                )
            raise AutoshardError(f"{str(self.path)!r} has no safetensors files, so it has no weights")
        if not any((self.path / name).exists() for name in (safetensors.SINGLE, safetensors.INDEX)):
            raise AutoshardError(
                f"{str(self.path)!r} has safetensors files, but neither {safetensors.SINGLE} nor {safetensors.INDEX}, "
                "which says what is in each file: download it again"
            )
        with self.reading():
            return {one.name: one for one in safetensors.read(self.path)}

    @contextmanager
    def reading(self, tensor: str | None = None) -> Iterator[None]:
        """Turn errors while the files are read into errors that name the folder, and the tensor if there is one.

        An `AutoshardError` says what happened itself, so it passes unchanged.
        """
        what = (
            f"{str(self.path)!r} cannot be read" if tensor is None else f"{tensor} in {str(self.path)!r} cannot be read"
        )
        try:
            yield
        except AutoshardError:
            raise
        except FileNotFoundError as error:
            raise AutoshardError(f"{what}: {error.filename} is missing; download it again") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise AutoshardError(f"{what}: {error}; a file is damaged or truncated: download it again") from error


def read_table(file: Path) -> dict[str, Any]:
    """Read a JSON file whose content is a table.

    Raises:
        AutoshardError: the file cannot be read, or has other content.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise AutoshardError(f"{file} cannot be read: {error}; download it again") from error
    if not isinstance(found, dict):
        raise AutoshardError(f"{file} is damaged: it must be a table, not {type(found).__name__}; download it again")
    return found


def hub_hint(path: Any) -> str:
    """Return the end of a message about a missing folder if its path looks like the name of a model of the Hub.

    >>> hub_hint("google/gemma-3-4b-it"), hub_hint("runs/mine/last")
    ('. For a model of the Hub, run `hf download google/gemma-3-4b-it --local-dir FOLDER` first', '')
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is None or Path(path).exists():
        return ""
    return f". For a model of the Hub, run `hf download {path} --local-dir FOLDER` first"


def float_dtype(dtype: Any, function: str) -> str | None:
    """Return the name of a requested dtype of parameters, which may be a NumPy or JAX dtype; None if none is.

    Raises:
        AutoshardError: models do not have parameters of this dtype. The message begins with the function's name.
    """
    if dtype is None:
        return None
    with suppress(TypeError):
        if (name := np.dtype(dtype).name) in FLOATS:
            return name
    raise AutoshardError(f"{function}: dtype is {dtype!r}; choose one of {', '.join(FLOATS)}")


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the tensors that a config names; float32 by default."""
    found = config.get("dtype", config.get("torch_dtype"))
    return found if found in FLOATS else "float32"


def check_tensors(
    have: Mapping[str, Tensor],
    wanted: Mapping[str, tuple[int, ...]],
    ignored: Collection[str],
    coded: Collection[str],
    where: str,
) -> None:
    """Compare the tensors of a folder with those of its model.

    Args:
        have: the folder's tensors.
        wanted: names and shapes of the model's tensors.
        ignored: names that the folder may have besides.
        coded: names of codes and scales, which may have any dtype.
        where: the folder, for messages.

    Raises:
        AutoshardError: tensors are missing or unexpected, have other shapes, or are neither floating-point nor coded.
    """
    wrong = [f"{name}: the folder has no such tensor" for name in wanted if name not in have]
    wrong += [
        f"{name}: the folder has {list(have[name].shape)}, the model {list(shape)}"
        for name, shape in wanted.items()
        if name in have and have[name].shape != shape
    ]
    wrong += [
        f"{name}: the folder has {have[name].dtype}, which a model does not compute with"
        for name in wanted
        if name in have and name not in coded and have[name].dtype not in (*FLOATS, "float64")
    ]
    wrong += [f"{name}: the model has no such tensor" for name in have if name not in wanted and name not in ignored]
    if wrong:
        raise AutoshardError(f"the tensors in {where} are not those of the model in its {CONFIG}:\n{listing(wrong)}")


def check_tied_head(folder: Folder, have: Mapping[str, Tensor], embedding: str) -> None:
    """Compare a head that the folder has with the embedding that the model uses in its place.

    Args:
        folder: the folder.
        have: its tensors, with a head.
        embedding: the name of the embedding `[vocabulary, width]`.

    Raises:
        AutoshardError: their values differ, so the model is not the one that was trained; or a file is damaged.
    """
    pair = have[HEAD], have[embedding]
    rows = max(PIECE_BYTES // max(pair[1].nbytes // max(pair[1].shape[0], 1), 1), 1)

    def same(first: int) -> bool:
        head, own = (one.read_part((slice(first, first + rows), slice(None))).astype(np.float32) for one in pair)
        return np.array_equal(head, own, equal_nan=True)

    with folder.reading(HEAD):
        tied = pair[0].shape == pair[1].shape and all(map(same, range(0, pair[1].shape[0], rows)))
    if not tied:
        raise AutoshardError(
            f"{HEAD} in {str(folder.path)!r} is not {embedding}, although its {CONFIG} says that they are the same: "
            "set tie_word_embeddings to false there"
        )
