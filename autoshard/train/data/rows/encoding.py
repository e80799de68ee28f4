"""Encodes rows of data as tokens, with a mask of the tokens that the loss counts.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}    the assistant's answers count
    {"prompt": ..., "completion": ...}                                               the completion counts
    {"text": ...}                                                                    everything counts
    {"prompt": ..., "chosen": ..., "rejected": ...}                                  a pair of answers

Prompts, completions and answers are texts, or lists of messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from autoshard._shown import shown
from autoshard.models.pretrained.chat_template import TOKENIZER_CONFIG, ChatTemplate
from autoshard.models.pretrained.folder import CONFIG, read_table
from autoshard.models.pretrained.tokenizer_file import open_tokenizer
from autoshard.train.data.rows.answers import render_answers
from autoshard.train.data.rows.constants import TEMPLATE_DAY


@shown
@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that are read together.

    Attributes:
        tokens: int32 `[n]`.
        counts: whether the loss counts each token as a target, bool `[n]`.
    """

    tokens: np.ndarray
    counts: np.ndarray


@shown
@dataclasses.dataclass(frozen=True)
class RowEncoder:
    """Encodes rows with the tokenizer and the chat template of a folder.

    Attributes:
        tokenizer: encodes text.
        chat: the chat template, if there is one.
        end: the token at the end of completions and texts, if there is one.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    end: int | None = None

    @classmethod
    def of(cls, folder: Path, tokenizer_file: Path) -> RowEncoder:
        """Read the tokenizer, and the chat template and the end token of a pretrained folder.

        Raises:
            AutoshardError: a file is missing or damaged.
        """
        tokenizer = open_tokenizer(tokenizer_file)
        chat = ChatTemplate.of(folder)
        chat = None if chat is None else dataclasses.replace(chat, day=TEMPLATE_DAY)
        return cls(tokenizer, chat, _end_token(folder, tokenizer))

    def documents(self, row: Mapping[str, Any]) -> list[Document]:
        """Encode a row for training on its answers: mostly one document; several where the chat template asks for it.

        Raises:
            ValueError: the row is no such row; the message says why.
        """
        _refuse_tools(row)
        if "messages" in row:
            return self._conversation(_messages(row, "messages"))
        if "completion" in row:
            return self._answer(row.get("prompt"), row["completion"], "completion")
        if "text" in row:
            return [self._document("", _text(row["text"], "text"))]
        raise ValueError(f"it has {', '.join(row) or 'nothing'}; it needs messages, prompt and completion, or text")

    def pair(self, row: Mapping[str, Any]) -> tuple[Document, Document]:
        """Encode the chosen and the rejected answer of a row, each after the prompt.

        Without a prompt, both are conversations that differ in their last message.

        Raises:
            ValueError: the row is no such row; the message says why.
        """
        _refuse_tools(row)
        if missing := [name for name in ("chosen", "rejected") if row.get(name) is None]:
            raise ValueError(f"it has no {' and no '.join(missing)}; it needs prompt, chosen and rejected")
        prompt, both = row.get("prompt"), [row["chosen"], row["rejected"]]
        if prompt is None:
            whole = [_messages(row, name) for name in ("chosen", "rejected")]
            prompt, both = whole[0][:-1], [one[-1:] for one in whole]
            if whole[1][:-1] != prompt:
                raise ValueError("it has no prompt, and chosen and rejected differ before their last message")
        chosen, rejected = (
            self._answer(prompt, one, name) for one, name in zip(both, ("chosen", "rejected"), strict=True)
        )
        return chosen[-1], rejected[-1]  # of several documents, the last one has the last answer

    def _answer(self, prompt: Any, answer: Any, name: str) -> list[Document]:
        if isinstance(prompt, str) and isinstance(answer, str):
            return [self._document(prompt, _text(answer, name))]
        if not isinstance(prompt, list) or not isinstance(answer, list):
            raise ValueError(f"its prompt and its {name} must both be texts, or both lists of messages")
        before, after = _messages({"prompt": prompt}, "prompt"), _messages({name: answer}, name)
        return self._conversation([*before, *after], first=len(before))

    def _document(self, prompt: str, answer: str) -> Document:
        encoded = self.tokenizer.encode(prompt + answer)
        tokens, counts = list(encoded.ids), [start >= len(prompt) for start, _ in _ranges(encoded.offsets)]
        # Special tokens that the tokenizer adds in front have no characters.
        counts = [one and not special for one, special in zip(counts, encoded.special_tokens_mask, strict=True)]
        if self.end is not None and tokens[-1:] != [self.end]:
            tokens, counts = [*tokens, self.end], [*counts, True]
        elif self.end is not None:
            counts[-1] = True
        return Document(np.array(tokens, np.int32), np.array(counts, bool))

    def _conversation(self, messages: Sequence[Mapping[str, Any]], first: int = 0) -> list[Document]:
        """Encode a conversation. Only answers from message `first` on count."""
        if self.chat is None:
            raise ValueError("it has messages, but the pretrained folder has no chat template")
        special = [one.content for one in self.tokenizer.get_added_tokens_decoder().values() if one.special]
        earlier = sum(message.get("role") == "assistant" for message in messages[:first])
        found = render_answers(self.chat, messages, special)
        if len(found) > 1:
            return [self._masked(*one) for one in found[earlier:]]
        return [self._masked(found[0][0], found[0][1][earlier:])]

    def _masked(self, text: str, spans: Sequence[range]) -> Document:
        """Encode a text. A token counts if it starts in one of the ranges of characters."""
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        ranges = _ranges(encoded.offsets)
        counts = [end > start and any(start in span for span in spans) for start, end in ranges]
        return Document(np.array(encoded.ids, np.int32), np.array(counts, bool))


def _refuse_tools(row: Mapping[str, Any]) -> None:
    """Refuse a row with descriptions of tools: the chat template would not get them."""
    if row.get("tools"):
        raise ValueError("it has tools, which are not built: leave them out")


def _ranges(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first character and the end of each token, from the offsets that a tokenizer gives.

    Some tokenizers trim whitespace off the offsets, so that a token of whitespace alone has no characters. It then has
    those behind the token before it.

    >>> _ranges([(0, 2), (4, 4), (4, 7)])
    [(0, 2), (2, 4), (4, 7)]
    """
    behind, found = 0, []
    for start, end in offsets:
        found.append((start if end > start else min(behind, start), end))
        behind = max(behind, end)
    return found


def _end_token(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the `eos_token` of the tokenizer's config, or else the first `eos_token_id` of the model's."""
    file = folder / TOKENIZER_CONFIG
    named = read_table(file).get("eos_token") if file.exists() else None
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str) and (found := tokenizer.token_to_id(named)) is not None:
        return found
    ids = read_table(folder / CONFIG).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return next((one for one in ids if type(one) is int), None)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"its {name} is {value!r}; it must be a text")
    return value


def _messages(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return messages without the empty fields that columns of Parquet and Arrow give them."""
    found = row[name]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) and "role" in one for one in found):
        raise ValueError(f"its {name} must be a list of messages with role and content")
    return [{key: value for key, value in one.items() if value is not None} for one in found]
