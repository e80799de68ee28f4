"""Text of a row: decoded token by token, and searched for strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes the tokens of a row as they come.

    A piece of text is held back while it ends in an incomplete character, or may be the start of a stop string.

    Args:
        decode: from token ids to text.
        stop: strings that end the text; the text ends before them.

    >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), ["bc"])
    >>> [stream.push(ord(letter)) for letter in "aabc"]
    ['a', 'a', '', '']
    >>> stream.stopped
    True
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self.decode, self.stop, self.stopped = decode, tuple(stop), False
        self._tokens: list[int] = []
        # Text depends on a few tokens before: tokens from `_start` are decoded, those before `_read` are in the text.
        self._start = self._read = 0
        self._pending = ""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is certain since the last call."""
        self._tokens.append(token)
        return self._released(self._decoded(final=False), final=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        return "" if self.stopped else self._released(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool) -> str:
        before = self.decode(self._tokens[self._start : self._read])
        text = self.decode(self._tokens[self._start :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _released(self, new: str, *, final: bool) -> str:
        self._pending += new
        places = [place for stop in self.stop if (place := self._pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            text, self._pending = self._pending[: min(places)], ""
            return text
        held = 0 if final else max((_overlap(self._pending, stop) for stop in self.stop), default=0)
        text, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
