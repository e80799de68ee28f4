"""Text as token windows: which files are read, which are held out, and what the batch of a step is.

A batch is a pure function of (seed, step): it needs no iterator state, so a run resumes on the same stream on
any number of devices and hosts, and each host makes only the rows that its own devices hold.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from autoshard._shown import shown
from autoshard.errors import DataError
from autoshard.train.data.tokenizer import load_codec

Batch = Mapping[str, np.ndarray]

HELD_OUT_ONE_IN = 20
"""Of a folder's files, about one in this many is held out."""

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_SKIPPED_STDLIB_FOLDERS = {"test", "tests", "idle_test"}


@runtime_checkable
class Source(Protocol):
    """What the trainer asks of data; `--data package.module:function` may return one.

    A batch is `{"inputs", "targets": int32, "mask": float32}`, each `[rows, context]`; the mask is 0 where a
    target is padding. Rows are a range of the global batch, so that a host makes only its own.

    It may have a `digest` as well, a text that is another for other data: a run goes on with the same alone.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def held_out_batches(self) -> int:
        """Batches that cover the held-out set once."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Of the held-out text, to tell bits per byte; None where unknown."""
        ...

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of the training batch of a step."""
        ...

    def held_out_batch(self, index: int, rows: range) -> Batch:
        """Rows of one batch of the held-out set, padded and masked where the set has ended."""
        ...


@shown
@dataclass(frozen=True)
class TokenSource:
    """Random windows of a long token array for training, all windows of another for evaluation.

    Attributes:
        train: Training tokens, `[n]`.
        held_out: Held-out tokens, `[m]`.
        vocab_size: Number of token ids.
        context: Tokens per window.
        batch_size: Rows of a training batch.
        eval_batch_size: Rows of an evaluation batch.
        seed: With the step it decides a training batch.
        bytes_per_token: Of the held-out text, to tell bits per byte; None where unknown.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    context: int
    batch_size: int
    eval_batch_size: int
    seed: int
    bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        """Refuse token arrays too short to make one window."""
        for name, tokens, needed in (
            ("training", self.train, self.context + 1),
            ("held-out", self.held_out, 2),
        ):
            if len(tokens) < needed:
                raise DataError(
                    f"the {name} text has {len(tokens)} tokens, but context {self.context} needs at least "
                    f"{needed}: give more text or a shorter context"
                )

    @functools.cached_property
    def digest(self) -> str:
        """Of all tokens."""
        found = hashlib.sha256()
        for tokens in (self.train, self.held_out):
            found.update(f"{tokens.dtype} {tokens.shape}".encode())
            found.update(np.ascontiguousarray(tokens).data)
        return found.hexdigest()

    @property
    def held_out_batches(self) -> int:
        """Batches that cover the held-out tokens once."""
        windows = math.ceil((len(self.held_out) - 1) / self.context)
        return math.ceil(windows / self.eval_batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of the training batch of a step: windows at pseudo-random starts."""
        generator = np.random.Philox(key=self.seed, counter=[0, 0, step, 0])
        # Raw words are the part of numpy's random streams that is promised never to change.
        words = generator.random_raw(self.batch_size)[rows.start : rows.stop]
        starts = (words % np.uint64(len(self.train) - self.context)).astype(np.int64)
        windows = self.train[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)
        return {
            "inputs": windows[:, :-1],
            "targets": windows[:, 1:],
            "mask": np.ones((len(rows), self.context), np.float32),
        }

    def held_out_batch(self, index: int, rows: range) -> Batch:
        """Rows of one batch of consecutive held-out windows; each token but the first is a target once."""
        first = index * self.eval_batch_size
        starts = (first + np.arange(rows.start, rows.stop)) * self.context
        positions = starts[:, None] + np.arange(self.context + 1)
        windows = self.held_out[np.minimum(positions, len(self.held_out) - 1)].astype(np.int32)
        return {
            "inputs": windows[:, :-1],
            "targets": windows[:, 1:],
            "mask": (positions[:, 1:] < len(self.held_out)).astype(np.float32),
        }


def standard_library() -> Path:
    """The folder of the running Python's standard library source."""
    return Path(sysconfig.get_path("stdlib"))


def text_source(
    path: str | os.PathLike | None,
    *,
    context: int,
    batch_size: int,
    eval_batch_size: int,
    seed: int,
    tokenizer: str | os.PathLike | None = None,
) -> TokenSource:
    """Make a source of a UTF-8 file, of a folder of them, or of the standard library's own source.

    Args:
        path: File or folder; None for the Python standard library.
        context: Tokens per window.
        batch_size: Rows of a training batch.
        eval_batch_size: Rows of an evaluation batch.
        seed: With the step it decides a training batch.
        tokenizer: A `tokenizers` JSON file; None for bytes.

    Raises:
        DataError: The path is missing, empty, or has no text.
    """
    codec = load_codec(tokenizer)
    train_text, held_out_text = read_split(path)
    held_out = codec.encode(held_out_text)
    return TokenSource(
        train=codec.encode(train_text),
        held_out=held_out,
        vocab_size=codec.vocab_size,
        context=context,
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        seed=seed,
        bytes_per_token=len(held_out_text.encode()) / max(len(held_out), 1),
    )


def read_split(path: str | os.PathLike | None) -> tuple[str, str]:
    """Training and held-out text of a file (its last tenth) or a folder (files by a hash of their name)."""
    if path is None:
        return _read_folder(standard_library(), suffix=".py", skipped=_SKIPPED_STDLIB_FOLDERS)
    root = Path(path)
    if root.is_dir():
        return _read_folder(root)
    if not root.exists():
        raise DataError(f"data {str(root)!r} does not exist: give a UTF-8 text file or a folder of them")
    return _split_text(_read_one(root))


def is_held_out(name: str) -> bool:
    """Whether a folder's file is held out: by its relative path alone, so that it never changes sides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _split_text(text: str) -> tuple[str, str]:
    cut = len(text) - len(text) // 10
    return text[:cut], text[cut:]


def _read_one(path: Path) -> str:
    try:
        text = _decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"data {str(path)!r} cannot be read: {error.strerror}") from error
    if text is None:
        raise DataError(f"data {str(path)!r} is not UTF-8 text: give a text file, or a folder that has some")
    if not text.strip():
        raise DataError(f"data {str(path)!r} is empty: give a file with text in it")
    return text


def _decode(content: bytes) -> str | None:
    """The text of a file, or None where it is binary."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _read_folder(root: Path, suffix: str = "", skipped: frozenset[str] | set[str] = frozenset()) -> tuple[str, str]:
    texts = dict(_folder_texts(root, suffix, skipped))
    if not texts:
        raise DataError(f"data folder {str(root)!r} holds no UTF-8 text file: give a folder that has some")
    if len(texts) == 1:
        return _split_text(next(iter(texts.values())))
    held_out = [name for name in texts if is_held_out(name)]
    # A small folder may have no such file, or nothing else: then one file, always the same, is held out.
    if len(held_out) in (0, len(texts)):
        held_out = [min(texts, key=lambda name: hashlib.sha256(name.encode()).digest())]
    train = [text for name, text in texts.items() if name not in set(held_out)]
    return "\n".join(train), "\n".join(texts[name] for name in held_out)


def _folder_texts(root: Path, suffix: str, skipped: frozenset[str] | set[str]) -> Iterator[tuple[str, str]]:
    """Relative name and text of each text file, in order; hidden files and installed packages are skipped."""
    skipped = _SKIPPED_FOLDERS | skipped
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if file.startswith(".") or not file.endswith(suffix) or not os.access(path, os.R_OK) or not path.is_file():
                continue
            text = _decode(path.read_bytes())
            if text is not None and text.strip():
                yield path.relative_to(root).as_posix(), text
