"""Encode text as token ids and decode them: as bytes, or with a `tokenizers` JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from autoshard.errors import ConfigError, DataError
from autoshard.models.pretrained.tokenizer_file import open_tokenizer


class Codec(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as token ids, `[n]`."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Decode token ids, `[n]`, to text."""
        ...


class ByteCodec:
    """A tokenizer whose tokens are the bytes of the UTF-8 text."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as its bytes, uint8 `[n]`."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Decode bytes to text. A model may generate invalid UTF-8, which becomes replacement characters."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class TokenizerCodec:
    """A tokenizer from a `tokenizers` JSON file."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Load the file.

        Raises:
            DataError: The file does not exist or is not a tokenizer.
        """
        if not Path(path).is_file():
            raise DataError(f"tokenizer {str(path)!r} does not exist: give a `tokenizers` JSON file")
        try:
            self._tokenizer = open_tokenizer(Path(path))
        except ConfigError as error:
            raise DataError(f"{error}. Give a `tokenizers` JSON file") from error
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as token ids, uint32 `[n]`."""
        encoded = self._tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
        return np.concatenate([np.zeros(0, np.uint32), *(np.asarray(piece.ids, np.uint32) for piece in encoded)])

    def decode(self, tokens: np.ndarray) -> str:
        """Decode token ids to text."""
        return self._tokenizer.decode([int(token) for token in tokens])


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Split a text at line ends into pieces of about `size` characters, which the tokenizer encodes in parallel.

    The default size is chosen, not measured.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def load_codec(path: str | os.PathLike | None) -> Codec:
    """Load the tokenizer of a file; None for bytes."""
    return ByteCodec() if path is None else TokenizerCodec(path)
