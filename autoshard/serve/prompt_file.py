"""Prompts from a file of JSON lines, and their replies in another one, which can be resumed.

    {"prompt": "Once upon"}  or  {"messages": [{"role": "user", "content": "Hello"}]}      a line of prompts
    {"prompt": "What is this?", "images": ["cat.png"]}                                       one with images
    {"line": 0, "text": " a time", "reason": "tokens", "tokens": [264, 892], "request": "1f..."}   a line of replies

A reply is one write of a whole line. After a kill, at most the last line is damaged; it is removed. The number of a
prompt is its line, so that a resumed run draws the same tokens. The request is a digest of the prompt, the options and
the place of the model. A run with other ones refuses the file. The paths of images are relative to the
folder of the file of prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.serve.generator import Generator, Reply
from autoshard.serve.prompts import Prompt, user_message


@shown
@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file: the number of its line, counted from 0, its content, and its images."""

    line: int
    prompt: Prompt
    images: tuple[Path, ...] = ()


def read_prompts(file: Path, *, chat: bool = False) -> list[FilePrompt]:
    """Read the prompts of a file. Empty lines are skipped.

    Args:
        file: JSON lines with `prompt` or `messages`, and perhaps `images`, a list of files.
        chat: whether a `prompt` is the message of a user.

    Raises:
        ConfigError: the file cannot be read, or lines are invalid.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    found, problems = [], []
    for n, line in enumerate(lines):
        if line.strip():
            try:
                record = json.loads(line)
                images = _image_files(record, file.parent)
                found.append(FilePrompt(n, _prompt(record, chat, len(images), file.parent), images))
            except ValueError as error:
                problems.append(f"line {n + 1}: {error}")
    if problems:
        raise ConfigError(f"{file} has lines that are not prompts:\n{listing(problems)}")
    return found


def _prompt(record: Any, chat: bool, images: int, folder: Path) -> Prompt:
    if isinstance(record, dict) and {"prompt", "messages"} <= record.keys():
        raise ValueError('it has both "prompt" and "messages": leave one of them out')
    if isinstance(record, dict) and record.get("tools"):
        raise ValueError('it has "tools", which are not built: leave them out')
    if isinstance(record, dict) and isinstance(text := record.get("prompt"), str):
        return [user_message(text, images)] if chat else text
    messages = record.get("messages") if isinstance(record, dict) else None
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return [_with_files_from(one, folder) for one in messages]
    raise ValueError('it must have "prompt", a text, or "messages", a list of tables')


def _with_files_from(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a message whose image files are relative to a folder."""
    if not isinstance(parts := message.get("content"), list):
        return message
    return message | {
        "content": [
            part | {"image": folder / part["image"]}
            if isinstance(part, dict) and isinstance(part.get("image"), str)
            else part
            for part in parts
        ]
    }


def _image_files(record: Any, folder: Path) -> tuple[Path, ...]:
    images = record.get("images", []) if isinstance(record, dict) else []
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise ValueError(f'"images" is {images!r}; it must be a list of files')
    return tuple(folder / one for one in images)


def replies_in(file: Path) -> dict[int, str]:
    """Return the lines of prompts that have a reply in a file, with their requests. A damaged last line is removed.

    Raises:
        ConfigError: another line is damaged, so the file is not one of replies.
    """
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        records = [json.loads(line) for line in whole.splitlines() if line.strip()]
        done = {record["line"]: record["request"] for record in records}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of replies: {error}. Give another file") from error
    if len(whole) < len(content):
        os.truncate(file, len(whole))
    return done


def reply_to_file(generator: Generator, prompts: Sequence[FilePrompt], out: Path, **options: Any) -> int:
    """Write the replies to prompts that have none in the file yet, each as soon as it is known.

    Args:
        generator: the model.
        prompts: the prompts.
        out: the file of replies; new ones are added at its end, in the order in which they end.
        **options: of `Generator.generate`.

    Returns:
        The number of replies that were written.

    Raises:
        ConfigError: the file cannot be written, is not one of replies, or has a reply to another prompt, of another
            model or with other options.
    """
    done = replies_in(out)
    model = (generator.source, generator.engine.length)
    requests = {one.line: _request(one, (model, sorted(options.items()))) for one in prompts}
    if wrong := [line for line, request in done.items() if requests.get(line) != request]:
        raise ConfigError(
            f"{out} has replies to other prompts, of another model, or with other options, for line "
            f"{', '.join(map(str, wrong[:5]))}, counted from 0: give another file"
        )
    left = [one for one in prompts if one.line not in done]

    def write(n: int, reply: Reply) -> None:
        line = left[n].line
        record = {"line": line, "text": reply.text, "reason": reply.reason, "tokens": [*reply.tokens]}
        _append(out, json.dumps(record | {"request": requests[line]}, ensure_ascii=False) + "\n")

    _append(out, "")  # a file that cannot be written is known before the first reply
    numbers = [one.line for one in left]
    texts, images = [one.prompt for one in left], [one.images for one in left]
    generator.generate(texts, images=images, numbers=numbers, on_reply=write, **options)
    return len(left)


def _request(one: FilePrompt, others: Any) -> str:
    """Return a digest of a prompt, its images' names, and what else the reply depends on."""
    asked = repr((one.prompt, one.images, others))
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def _append(file: Path, text: str) -> None:
    """Write a text at the end of a file, at once."""
    try:
        with file.open("ab", buffering=0) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error
