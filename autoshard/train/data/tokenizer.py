"""Text to token ids and back: bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from autoshard.errors import DataError


class Codec(Protocol):
    """Encodes text as token ids, `[n]`, and decodes them."""

    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, `[n]`."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Text of token ids, `[n]`."""
        ...


class ByteCodec:
    """A token is a byte of the UTF-8 text."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of a text, uint8 `[n]`."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of bytes; what is not UTF-8 (a model may write anything) becomes a replacement character."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class TokenizerCodec:
    """A vocabulary from a `tokenizers` JSON file."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Load the file.

        Raises:
            DataError: It is missing or not a tokenizer.
        """
        from tokenizers import Tokenizer

        if not Path(path).is_file():
            raise DataError(f"tokenizer {str(path)!r} does not exist: give a `tokenizers` JSON file")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        # The library raises the bare class for anything that it cannot parse.
        except Exception as error:
            raise DataError(f"tokenizer {str(path)!r} is not a `tokenizers` JSON file: {error}") from error
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, uint32 `[n]`."""
        encoded = self._tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
        return np.concatenate([np.zeros(0, np.uint32), *(np.asarray(piece.ids, np.uint32) for piece in encoded)])

    def decode(self, tokens: np.ndarray) -> str:
        """Text of token ids."""
        return self._tokenizer.decode([int(token) for token in tokens])


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """A text cut after a line's end about every `size` characters: tokenizers work on pieces in parallel."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def load_codec(path: str | os.PathLike | None) -> Codec:
    """The codec of a tokenizer file, or bytes where there is none."""
    return ByteCodec() if path is None else TokenizerCodec(path)
