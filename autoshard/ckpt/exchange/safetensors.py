"""Tensors into safetensors files and out of them, one at a time: a model may be larger than memory.

A file is 8 bytes with the header's length, the header as JSON (dtype, shape and byte range of each tensor), and the
tensors' bytes, little-endian and row-major (https://github.com/huggingface/safetensors). The library's own writer takes
all tensors at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import safe_open

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import CheckpointError

DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"


@shown
@dataclass(frozen=True)
class Tensor:
    """A tensor that is to be written.

    Attributes:
        name: what it is called in the file.
        shape: its shape.
        dtype: its dtype's name.
        read: makes its values; called once, when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write(folder: Path, tensors: Sequence[Tensor], *, shard_bytes: int, metadata: Mapping[str, str]) -> list[Path]:
    """Writes `model.safetensors`, or several files and an index where one would be larger than `shard_bytes`.

    Args:
        folder: where to; it exists.
        tensors: what, in the order in which it is written; a tensor is never cut.
        shard_bytes: of tensors in a file at most, but for a single larger one.
        metadata: texts that each file carries.

    Returns:
        The files.

    Raises:
        CheckpointError: there is no such dtype in the format, two tensors have one name, or one has that of the header.
    """
    wrong = [f"{one.name}: {one.dtype}" for one in tensors if one.dtype not in DTYPES]
    if wrong:
        raise CheckpointError(f"safetensors files have no such dtype:\n{listing(wrong)}")
    names = [one.name for one in tensors]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CheckpointError(f"two tensors have one name:\n{listing(twice)}")
    if _METADATA in names:
        raise CheckpointError(
            f"a tensor is called {_METADATA}, as what safetensors files say of themselves: rename it."
        )
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        return [_write_file(folder / "model.safetensors", shards[0], metadata)]
    files = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(_write_file(file, shard, metadata))
        places |= {one.name: file.name for one in shard}
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors)}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [*files, folder / INDEX]


def _shards(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    held = 0
    for one in tensors:
        if shards[-1] and held + one.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(one)
        held += one.nbytes
    return shards


def _write_file(file: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Path:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    # Larger elements first: every tensor is then aligned to its own element.
    ordered = sorted(tensors, key=lambda one: -np.dtype(one.dtype).itemsize)
    end = 0
    for one in ordered:
        header[one.name] = {
            "dtype": DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [end, end + one.nbytes],
        }
        end += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            values = np.ascontiguousarray(one.read())
            if values.dtype != np.dtype(one.dtype) or values.size * values.dtype.itemsize != one.nbytes:
                raise AssertionError(f"{one.name}: {values.dtype}{values.shape} is not what its header says")
            out.write(values.reshape(-1).view(np.uint8).data)
    return file


def read(folder: Path) -> list[Tensor]:
    """The tensors of `model.safetensors`, or of the files that an index names; their values are not read yet.

    Raises:
        CheckpointError: the index and the files do not fit, or there is a dtype that is not known here.
        FileNotFoundError: a file is not there.
        OSError, ValueError, SafetensorError: one is not as it was written.
    """
    places = _places(folder)
    names = ["model.safetensors"] if places is None else sorted({*places.values()})
    found = {name: _tensors(folder / name) for name in names}
    have = {name: {one.name for one in tensors} for name, tensors in found.items()}
    wrong = [f"{name} has no {tensor}" for tensor, name in (places or {}).items() if tensor not in have[name]]
    if wrong:
        raise CheckpointError(f"{folder / INDEX} names tensors that are not in their files:\n{listing(wrong)}")
    return [one for tensors in found.values() for one in tensors]


def _places(folder: Path) -> dict[str, str] | None:
    """In which file each tensor is; None where there is no index.

    Raises:
        CheckpointError: the index is not as HF writes it, or names what is not beside it.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    told = json.loads(index.read_text())
    places = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} is not as HF writes it: its weight_map says each tensor's file")
    wrong = sorted({name for name in places.values() if Path(name).name != name})
    if wrong:
        raise CheckpointError(f"{index} names files that are not beside it:\n{listing(wrong)}")
    return cast(dict[str, str], places)


def _tensors(path: Path) -> list[Tensor]:
    kinds = {code: dtype for dtype, code in DTYPES.items()}
    with opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.offset_keys()}
        wrong = [f"{name}: {part.get_dtype()}" for name, part in parts.items() if part.get_dtype() not in kinds]
        if wrong:
            raise CheckpointError(f"{path} has dtypes that are not known here:\n{listing(wrong)}")
        return [
            Tensor(name, tuple(part.get_shape()), kinds[part.get_dtype()], functools.partial(_read_one, path, name))
            for name, part in parts.items()
        ]


def _read_one(path: Path, name: str) -> np.ndarray:
    with opened(path) as file:
        return file.get_tensor(name)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of tensors.

    Raises:
        FileNotFoundError: with its name, which the library leaves out.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with safe_open(path, framework="np") as file:
        yield file
