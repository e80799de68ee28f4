"""Reads the rows of JSON lines, Parquet, ArrayRecord, and folders that the library `datasets` saved.

A row is a table. A record of an ArrayRecord file is a table in JSON.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning, DataError

SAVED = ("dataset_info.json", "dataset_dict.json")  # one of these files is in a folder that `datasets` saved
_TEXT = ".txt"
TRAIN, HELD_OUT = "train", ("validation", "test")  # names of splits


@shown
@dataclass(frozen=True)
class Record:
    """A row, and where it is, for messages.

    Attributes:
        where: the file and the line, or the number of the row.
        value: its content.
    """

    where: str
    value: Any


def has_rows(path: str | Path) -> bool:
    """Return whether a path is a file of rows, or a folder of them.

    >>> has_rows("chats.jsonl"), has_rows("notes.txt")
    (True, False)
    """
    path = Path(path)
    if not path.is_dir():
        return path.suffix in _READERS
    return is_saved_dataset(path) or bool(row_files(path)[TRAIN])


def row_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of rows in a folder, in the order of their names, by split.

    Files such as `test-00000-of-00001.parquet` or `validation.jsonl` are held out if there are others.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix in _READERS and file.is_file())
    held_out = {split: [file for file in files if _is_of(file, split)] for split in HELD_OUT}
    train = [file for file in files if not any(file in named for named in held_out.values())]
    return {TRAIN: train, **held_out} if train else {TRAIN: files}


def _is_of(file: Path, split: str) -> bool:
    """Return whether a file's name begins with the name of a split."""
    return file.name.startswith(split) and not file.name[len(split)].isalpha()


def is_saved_dataset(folder: Path) -> bool:
    """Return whether the library `datasets` saved a folder."""
    return any((folder / name).is_file() for name in SAVED)


def read_records(path: str | Path, split: str = TRAIN) -> Iterator[Record]:
    """Yield the rows of a file, or of all files of a folder.

    Args:
        path: the file or folder.
        split: the split of a folder.

    Raises:
        DataError: a file cannot be read, or lines of it are no tables.

    Warns:
        AutoshardWarning: the folder has text files, too, which are not read.
    """
    path = Path(path)
    if path.is_dir() and is_saved_dataset(path):
        yield from _saved_records(path, split)
        return
    if not path.exists():
        raise DataError(f"data {str(path)!r} does not exist: give a file of rows, or a folder of them")
    if path.is_dir() and split == TRAIN and (texts := sorted(path.rglob(f"*{_TEXT}"))):
        warnings.warn(
            f"data {str(path)!r} has rows and {len(texts)} {_TEXT} files, such as {texts[0].name}. Only the rows are "
            "read. Put the texts into rows, or train on them from a folder of their own",
            AutoshardWarning,
            stacklevel=2,
        )
    for file in row_files(path)[split] if path.is_dir() else [path]:
        if file.suffix not in _READERS:
            raise DataError(f"{file} is no file of rows: its name must end in {' or '.join(_READERS)}")
        try:
            yield from _READERS[file.suffix](file)
        except DataError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # pyarrow and array_record raise these
            raise DataError(f"{file} cannot be read: {error}") from error


def has_held_out_split(path: str | Path) -> str | None:
    """Return the name of the split for evaluation in a folder; None if there is none, or for a file."""
    path = Path(path)
    if not path.is_dir():
        return None
    if is_saved_dataset(path):
        return next((name for name in HELD_OUT if (path / SAVED[1]).is_file() and (path / name).is_dir()), None)
    files = row_files(path)
    return next((name for name in HELD_OUT if files.get(name)), None)


def _json_lines(file: Path) -> Iterator[Record]:
    problems = []
    with file.open("rb") as lines:
        for n, line in enumerate(lines, 1):
            if line.strip():
                try:
                    value = json.loads(line.decode("utf-8-sig"))
                except ValueError as error:
                    problems.append(f"line {n}: {error}")
                    continue
                if isinstance(value, dict):
                    yield Record(f"{file} line {n}", value)
                else:
                    problems.append(f"line {n}: it is {type(value).__name__}; a row must be a table")
    if problems:
        raise DataError(f"{file} has lines that are not rows:\n{listing(problems)}")


def _parquet(file: Path) -> Iterator[Record]:
    parquet = _package("pyarrow.parquet", file)
    n = 0
    for batch in parquet.ParquetFile(file).iter_batches():
        for value in batch.to_pylist():
            yield _table(f"{file} row {n}", value)
            n += 1


def _array_record(file: Path) -> Iterator[Record]:
    source: Any = grain.sources.ArrayRecordDataSource([str(file)])
    for n in range(len(source)):
        yield _table(f"{file} record {n}", json.loads(source[n]))


def _saved_records(folder: Path, split: str) -> Iterator[Record]:
    datasets = _package("datasets", folder)
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"{folder} has no split {split!r}, only {', '.join(found)}: give the folder of one split")
        found = found[split]
    for n, value in enumerate(found):
        yield _table(f"{folder} row {n}", value)


def _package(module: str, path: Path) -> Any:
    """Import a package that only some data need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(f"{path} needs the package {name}: pip install {name}") from error


def _table(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {type(value).__name__}; a row must be a table")
    return Record(where, value)


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".array_record": _array_record,
    ".arrayrecord": _array_record,
}
