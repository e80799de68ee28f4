"""Reading and writing safetensors files one tensor at a time, because a model may be larger than memory.

A file is 8 bytes with the header's length, the header as JSON (dtype, shape and byte range of each tensor), and the
tensors' bytes, little-endian and row-major (https://github.com/huggingface/safetensors). The library's writer needs all
tensors at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.exchange.file_tensors import FileTensor
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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = "__metadata__"
_LFS = b"version https://git-lfs"


@shown
@dataclass(frozen=True)
class Tensor:
    """A tensor whose values are read on demand.

    Attributes:
        name: the name in the file.
        shape: the shape.
        dtype: the name of the dtype.
        read: returns the values; called once, just before they are written.
        part: returns a range of the values, if the tensor is in a file. It takes the arguments of `read_part`.
        file: the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    part: Callable[[tuple[slice, ...], Callable[..., np.ndarray]], np.ndarray] | None = None
    file: Path | None = None

    def read_part(self, index: tuple[slice, ...], empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
        """Return a range of the values. Reads no more than that from a file.

        Args:
            index: a slice of each dimension.
            empty: makes an array from its shape and dtype. Values of a file may be read into such an array.
        """
        return self.read()[index] if self.part is None else self.part(index, empty)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write(folder: Path, tensors: Sequence[Tensor], *, shard_bytes: int, metadata: Mapping[str, str]) -> list[Path]:
    """Write `model.safetensors`, or several files and an index if one file would be larger than `shard_bytes`.

    Args:
        folder: an existing folder.
        tensors: the tensors, in the order in which they are distributed over files; a tensor is never split.
        shard_bytes: largest number of bytes of tensors in one file, unless a single tensor is larger.
        metadata: strings to write into the header of each file.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: the format does not support a dtype, two tensors have the same name, or one has the reserved
            name of the metadata.
    """
    wrong = [f"{one.name}: {one.dtype}" for one in tensors if one.dtype not in DTYPES]
    if wrong:
        raise CheckpointError(f"safetensors files do not support these dtypes:\n{listing(wrong)}")
    names = [one.name for one in tensors]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise CheckpointError(f"two tensors have the same name:\n{listing(repeated)}\nRename one of each pair.")
    if _METADATA in names:
        raise CheckpointError(f"a tensor has the name {_METADATA}, which is reserved in safetensors files: rename it.")
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        return [_write_file(folder / SINGLE, shards[0], metadata)]
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
    nbytes = 0
    for one in tensors:
        if shards[-1] and nbytes + one.nbytes > shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(one)
        nbytes += one.nbytes
    return shards


def _write_file(file: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Path:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    # Larger elements first, so that each tensor is aligned to its element size.
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
                raise AssertionError(f"{one.name}: {values.dtype}{values.shape} does not match its header")
            out.write(values.reshape(-1).view(np.uint8).data)
    return file


def read(folder: Path) -> list[Tensor]:
    """Return the tensors of `model.safetensors`, or of the files of an index. Their values are read on demand.

    Raises:
        CheckpointError: the index does not match the files, or a dtype is not supported.
        FileNotFoundError: a file is missing.
        OSError, ValueError, SafetensorError: a file is damaged.
    """
    places = _places(folder)
    names = [SINGLE] if places is None else sorted({*places.values()})
    by_file = {name: _tensors(folder / name) for name in names}
    have = {name: {one.name for one in tensors} for name, tensors in by_file.items()}
    wrong = [f"{name} has no {tensor}" for tensor, name in (places or {}).items() if tensor not in have[name]]
    if wrong:
        raise CheckpointError(f"{folder / INDEX} names tensors that are not in their files:\n{listing(wrong)}")
    chosen = places or {}  # if two files have a tensor, such as an old and a new one, the index says which is read
    return [one for name, tensors in by_file.items() for one in tensors if chosen.get(one.name, name) == name]


def metadata(folder: Path) -> dict[str, str]:
    """Return the metadata of the files that `read` reads; those of one file if there are several."""
    name = min((_places(folder) or {"": SINGLE}).values())
    with open_tensors(folder / name) as file:
        return file.metadata() or {}


def _places(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor; None if there is no index.

    Raises:
        CheckpointError: the index is damaged, or names files outside its folder, or the folder also has a model in
            one file.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    content = json.loads(index.read_text())
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    wrong = sorted({name for name in places.values() if Path(name).name != name})
    if wrong:
        raise CheckpointError(f"{index} names files that are not beside it:\n{listing(wrong)}")
    if places and SINGLE not in places.values() and (folder / SINGLE).exists():
        raise CheckpointError(
            f"{folder} has both {SINGLE} and {INDEX}, which does not list it. Programs disagree on which one to "
            "read: remove the one that is out of date"
        )
    return cast(dict[str, str], places)


def _tensors(path: Path) -> list[Tensor]:
    kinds = {code: dtype for dtype, code in DTYPES.items()}
    with open_tensors(path) as file:
        offsets = _offsets(path)
        parts = {name: file.get_slice(name) for name in file.offset_keys()}
        wrong = [f"{name}: {part.get_dtype()}" for name, part in parts.items() if part.get_dtype() not in kinds]
        if wrong:
            raise CheckpointError(f"{path} has dtypes that are not supported:\n{listing(wrong)}")
        stored = {
            name: FileTensor(path, offsets[name], tuple(part.get_shape()), kinds[part.get_dtype()])
            for name, part in parts.items()
        }
    return [Tensor(name, x.shape, x.dtype, x.read, x.read, path) for name, x in stored.items()]


def _offsets(path: Path) -> dict[str, int]:
    """Return the offset of the first byte of each tensor of a valid file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + one["data_offsets"][0] for name, one in header.items() if name != _METADATA}


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        FileNotFoundError, SafetensorError: with the name of the file, which the library's errors do not have.
        CheckpointError: the file was not downloaded; it is a pointer of Git LFS.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        opened = safe_open(path, framework="np")
    except SafetensorError as error:
        with path.open("rb") as raw:
            if raw.read(len(_LFS)) == _LFS:
                raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull`") from error
        raise SafetensorError(f"{path.name}: {error}") from error
    with opened as file:
        yield file
