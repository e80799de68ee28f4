"""Text as windows of tokens: which files are read, which are held out, and the batch of each step.

A batch is a pure function of (seed, step) without iterator state. A run therefore resumes with the same stream on any
number of devices and hosts, and each host makes only the rows that its own devices hold.
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
"""About one in this many files of a folder is held out. Chosen, not measured."""

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_SKIPPED_STDLIB_FOLDERS = {"test", "tests", "idle_test"}


@runtime_checkable
class Source(Protocol):
    """The interface of training data; `--data package.module:function` may return one.

    A batch is `{"inputs", "targets": int32, "mask": float32}`, each `[rows, context]`. The mask is 0 where a target is
    padding. Methods take a range of rows of the global batch, so that each host makes only its own rows.

    A source may also have an attribute `digest`, a string that identifies the data. A run resumes only with data of the
    same digest.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def held_out_batches(self) -> int:
        """Number of batches that cover the held-out set once."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes per token of the held-out text, to compute bits per byte; None if unknown."""
        ...

    def batch(self, step: int, rows: range) -> Batch:
        """Return rows of a step's training batch."""
        ...

    def held_out_batch(self, index: int, rows: range) -> Batch:
        """Return rows of a held-out batch; rows beyond the end of the set are padding with mask 0."""
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
        seed: Random seed; a training batch depends on it and the step.
        bytes_per_token: Bytes per token of the held-out text, to compute bits per byte; None if unknown.
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
        """Refuse token arrays that are too short for one window."""
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
        """SHA-256 of all tokens."""
        digest = hashlib.sha256()
        for tokens in (self.train, self.held_out):
            digest.update(f"{tokens.dtype} {tokens.shape}".encode())
            digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()

    @property
    def held_out_batches(self) -> int:
        """Number of batches that cover the held-out tokens once."""
        windows = math.ceil((len(self.held_out) - 1) / self.context)
        return math.ceil(windows / self.eval_batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """Return rows of a step's training batch: windows at pseudo-random starts."""
        generator = np.random.Philox(key=self.seed, counter=[0, 0, step, 0])
        # NumPy guarantees the stream of raw words across versions, not that of its distributions.
        words = generator.random_raw(self.batch_size)[rows.start : rows.stop]
        starts = (words % np.uint64(len(self.train) - self.context)).astype(np.int64)
        windows = self.train[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)
        return {
            "inputs": windows[:, :-1],
            "targets": windows[:, 1:],
            "mask": np.ones((len(rows), self.context), np.float32),
        }

    def held_out_batch(self, index: int, rows: range) -> Batch:
        """Return rows of a batch of consecutive held-out windows; each token except the first is a target once."""
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
    """Return the folder of the running Python's standard library."""
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
    """Make a source from a UTF-8 file, from a folder of them, or from the source code of the standard library.

    Args:
        path: File or folder; None for the Python standard library.
        context: Tokens per window.
        batch_size: Rows of a training batch.
        eval_batch_size: Rows of an evaluation batch.
        seed: Random seed; a training batch depends on it and the step.
        tokenizer: A `tokenizers` JSON file; None for bytes.

    Raises:
        DataError: The path does not exist, is empty, or has no text.
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
    """Read the training text and the held-out text: of a file, the last tenth is held out; of a folder, some files."""
    if path is None:
        return _read_folder(standard_library(), suffix=".py", skipped=_SKIPPED_STDLIB_FOLDERS)
    root = Path(path)
    if root.is_dir():
        return _read_folder(root)
    if not root.exists():
        raise DataError(f"data {str(root)!r} does not exist: give a UTF-8 text file or a folder of them")
    return _split_text(_read_file(root))


def is_held_out(name: str) -> bool:
    """Whether a file of a folder is held out. This depends only on its relative path, so that it never changes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _split_text(text: str) -> tuple[str, str]:
    end = len(text) - len(text) // 10
    return text[:end], text[end:]


def _read_file(path: Path) -> str:
    try:
        text = _decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"data {str(path)!r} cannot be read: {error.strerror}") from error
    if text is None:
        raise DataError(f"data {str(path)!r} is not UTF-8 text: give a text file, or a folder of text files")
    if not text.strip():
        raise DataError(f"data {str(path)!r} is empty: give a file with text in it")
    return text


def _decode(content: bytes) -> str | None:
    """Decode a file as UTF-8; None if it is binary or not UTF-8."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _read_folder(root: Path, suffix: str = "", skipped: frozenset[str] | set[str] = frozenset()) -> tuple[str, str]:
    texts = dict(_folder_texts(root, suffix, skipped))
    if not texts:
        raise DataError(f"data folder {str(root)!r} has no UTF-8 text file: give a folder of text files")
    if len(texts) == 1:
        return _split_text(next(iter(texts.values())))
    held_out = [name for name in texts if is_held_out(name)]
    # In a small folder none of the files or all of them may be held out. Then one fixed file is held out instead.
    if len(held_out) in (0, len(texts)):
        held_out = [min(texts, key=lambda name: hashlib.sha256(name.encode()).digest())]
    train = [text for name, text in texts.items() if name not in set(held_out)]
    return "\n".join(train), "\n".join(texts[name] for name in held_out)


def _folder_texts(root: Path, suffix: str, skipped: frozenset[str] | set[str]) -> Iterator[tuple[str, str]]:
    """Yield the relative name and the text of each text file, without hidden files and installed packages."""
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
