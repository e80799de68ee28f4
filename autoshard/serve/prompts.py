"""From prompts to tokens: texts, messages with a chat template, and images in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.models.pretrained.chat_template import ChatTemplate
from autoshard.models.pretrained.images import PREPROCESSOR, ImageReader
from autoshard.models.vision.grids import Grid, ImageSlots

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages with `role` and `content`."""
REMOTE = ("url", "image_url")


@shown
@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt.

    Attributes:
        grid: time, height and width in patches.
        patches: reads its patches, float32 `[patches, patch_size]`. It is called when the prompt gets a row, so that
            the images of a long list of prompts are not in memory together.
    """

    grid: Grid
    patches: Callable[[], np.ndarray]


@shown
@dataclass(frozen=True)
class PromptReader:
    """Makes tokens of prompts, as a pretrained folder says.

    Attributes:
        tokenizer: encodes text.
        chat: the chat template, if there is one.
        slots: how images take their places; None if the model reads none.
        folder: the pretrained folder, whose `preprocessor_config.json` says how images are read.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    slots: ImageSlots | None = None
    folder: Path = Path()

    def read(self, prompt: Prompt, images: Sequence[Any] = ()) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, with a token for each feature of an image, and its images.

        Args:
            prompt: a text, with the special tokens that the tokenizer adds, or messages. A text without placeholders
                that has images is the message of a user. A message's content is a text, or a list of
                `{"type": "text", "text": ...}` and `{"type": "image", "image": FILE}`.
            images: files, Pillow images or arrays `[height, width, 3]` of bytes, in the order of their places. They are
                those of the messages that have no file of their own.

        Raises:
            ConfigError: the folder has no chat template, or it refuses the messages; the images are not as many as
                their placeholders; the model reads none.
            AutoshardError: an image cannot be read.
        """
        if isinstance(prompt, str) and images and self.slots is not None and self.placeholder not in prompt:
            prompt = [user_message(prompt, len(images))]
        files = list(images) if isinstance(prompt, str) else _files(prompt, images)
        if files and self.slots is None:
            raise ConfigError(f"the prompt has {_counted(len(files), 'image')}, but the model reads text alone")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt).ids
        elif self.chat is None:
            raise ConfigError("the folder has no chat template: give the prompt as text" + self._with_places(files))
        else:
            ids = self.tokenizer.encode(self.chat.render(prompt), add_special_tokens=False).ids
        if self.slots is None:
            return ids, ()
        if (places := ids.count(self.slots.token)) != len(files):
            raise ConfigError(
                f"the prompt has {_counted(places, 'placeholder')} {self.placeholder} and "
                f"{_counted(len(files), 'image')}: give one placeholder for each image"
            )
        found = tuple(PromptImage(self._reader.grid(one), functools.partial(self._patches, one)) for one in files)
        left = iter(found)
        tokens: list[int] = []
        for one in ids:
            tokens += [one] * self.slots.count(next(left).grid) if one == self.slots.token else [one]
        return tokens, found

    @functools.cached_property
    def placeholder(self) -> str:
        """The text of the token that stands for an image."""
        assert self.slots is not None
        found = self.tokenizer.id_to_token(self.slots.token)
        if found is None:
            raise ConfigError(
                f"{str(self.folder)!r}: the tokenizer has no token {self.slots.token}, which stands for an image"
            )
        return found

    @functools.cached_property
    def _reader(self) -> ImageReader:
        found = ImageReader.of(self.folder)
        if self.slots is not None and found.merge != self.slots.merge:  # the order of patches depends on it
            raise ConfigError(
                f"{PREPROCESSOR} of {str(self.folder)!r} has a merge_size of {found.merge}, but the model merges "
                f"{self.slots.merge} x {self.slots.merge} patches: use the file of the model's own folder"
            )
        return found

    def _patches(self, image: Any) -> np.ndarray:
        return self._reader(image)[0]

    def _with_places(self, files: Sequence[Any]) -> str:
        return f", with {self.placeholder} in the place of each image" if files and self.slots is not None else ""


def user_message(text: str, images: int = 0) -> Mapping[str, Any]:
    """Return the message of a user: a text, behind the places of images if there are any."""
    if not images:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}


def _files(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[Any]:
    """Return the images of messages in order: their own files, and `images` for those without one."""
    left, found = list(images), []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "image" and not {"image", *REMOTE} & part.keys():
                continue
            if remote := [name for name in REMOTE if name in part]:
                raise ConfigError(f"an image of a message has {remote[0]!r}: download it, and give its file as 'image'")
            if part.get("image") is not None:
                found.append(part["image"])
            elif left:
                found.append(left.pop(0))
            else:
                raise ConfigError(f"the messages have more images than the {len(images)} that are given")
    return found + left


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
