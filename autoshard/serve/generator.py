"""Text in, text out: a pretrained folder with its tokenizer, stop tokens and chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.pretrained.chat_template import ChatTemplate
from autoshard.models.pretrained.folder import Folder, read_table
from autoshard.models.pretrained.load import Described, load_pretrained
from autoshard.serve.constants import MAX_TOKENS, ROWS
from autoshard.serve.engine import Engine, Request
from autoshard.serve.sampling import GREEDY, Sampling
from autoshard.serve.steps import Steps
from autoshard.serve.text import TextStream
from autoshard.sharding.api.plan import Plan

Prompt = str | Sequence[Mapping[str, Any]]
OnText = Callable[[int, str], None]
TOKENIZER, GENERATION_CONFIG = "tokenizer.json", "generation_config.json"


@shown
@dataclasses.dataclass(frozen=True)
class Reply:
    """The continuation of a prompt.

    Attributes:
        text: the new text.
        tokens: its tokens.
        reason: why it ended: `stop` (a stop token), `text` (a stop string), `tokens` or `length`.
    """

    text: str
    tokens: tuple[int, ...]
    reason: str


@shown
@dataclasses.dataclass(frozen=True)
class Generator:
    """Continues texts with a pretrained model.

    Attributes:
        engine: the model in rows of a batch.
        tokenizer: encodes and decodes text.
        stop_tokens: tokens that end a text.
        chat: the chat template, if there is one.
    """

    engine: Engine
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    chat: ChatTemplate | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        numbers: Sequence[int] | None = None,
        on_text: OnText | None = None,
        on_reply: Callable[[int, Reply], None] | None = None,
    ) -> list[Reply]:
        """Continue prompts.

        Args:
            prompts: texts, or lists of messages with `role` and `content`, which the chat template turns into text.
            max_tokens: number of tokens to add to each at most.
            sampling: how they are chosen.
            stop: strings that end a text; it ends before them.
            numbers: number of each prompt. Prompts with other numbers draw other tokens. Default: the place.
            on_text: called with the place of a prompt and each new piece of its text.
            on_reply: called with the place of a prompt and its reply, when it ends.

        Returns:
            The replies, in the order of the prompts.

        Raises:
            ConfigError: a prompt is empty or too long, or the folder has no chat template.
        """
        if any(not text for text in stop):
            raise ConfigError("a stop string is empty: give at least one character")
        streams = [TextStream(self._decode, stop) for _ in prompts]
        texts = [""] * len(prompts)
        requests = [
            Request(self.encode(prompt), max_tokens, sampling, self.stop_tokens, numbers[n] if numbers else n)
            for n, prompt in enumerate(prompts)
        ]

        def add(n: int, text: str) -> None:
            texts[n] += text
            if text and on_text is not None:
                on_text(n, text)

        def on_token(n: int, token: int) -> bool:
            add(n, streams[n].push(token))
            return streams[n].stopped

        replies: dict[int, Reply] = {}
        for n, found in self.engine.stream(requests, on_token):
            add(n, streams[n].finish())
            replies[n] = Reply(texts[n], found.tokens, found.reason)
            if on_reply is not None:
                on_reply(n, replies[n])
        return [replies[n] for n in range(len(prompts))]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds, or of messages.

        Raises:
            ConfigError: the folder has no chat template, or it refuses the messages.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt).ids
        if self.chat is None:
            raise ConfigError("the folder has no chat template: give the prompt as text")
        return self.tokenizer.encode(self.chat.render(prompt), add_special_tokens=False).ids

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_generator(
    path: Any, *, rows: int = ROWS, length: int | None = None, dtype: str | None = None, **options: Any
) -> Generator:
    """Open a pretrained folder for generation.

    The decode step is planned first, from the config alone. Then each tensor is read onto the shards of that plan.

    Args:
        path: the folder, with `config.json`, safetensors files and `tokenizer.json`.
        rows: number of prompts that are continued at a time.
        length: positions of a row, prompt and text; by default the model's context, which may need much memory.
        dtype: dtype of the parameters and of the computation; by default the stored one.
        **options: of `autoshard.auto_shard`, such as `plan` and `mesh`.

    Raises:
        AutoshardError: the folder lacks a file, or its model is not known.
    """
    folder = Folder.open(path)
    described = Described.of(folder, dtype, {})
    if not isinstance(described.cfg, DecoderConfig):
        raise ConfigError(
            f"{str(folder.path)!r} is a {described.family.name}: text is generated by models of text alone"
        )
    shapes = described.params(None if dtype else folder.tensors())

    def read(plan: Plan) -> Decoder:
        return load_pretrained(folder.path, plan=plan, dtype=dtype)

    file = folder.path / TOKENIZER
    return make_generator(
        folder, file, described.cfg, described.graph, shapes, read, rows=rows, length=length, **options
    )


def make_generator(
    folder: Folder,
    tokenizer_file: Path,
    cfg: DecoderConfig,
    graph: Any,
    shapes: Any,
    read: Callable[[Plan], Decoder],
    *,
    rows: int = ROWS,
    length: int | None = None,
    **options: Any,
) -> Generator:
    """Plan the decode step of a model, then read the model as that plan says.

    Args:
        folder: has the model's stop tokens and chat template.
        tokenizer_file: the file of its tokenizer.
        cfg: its config.
        graph: its structure.
        shapes: the shapes of its parameters.
        read: returns it with the shardings of the first argument of a plan.
        rows: as in `load_generator`.
        length: as in `load_generator`.
        **options: as in `load_generator`.

    Raises:
        AutoshardError: a file is missing or damaged.
    """
    if not tokenizer_file.exists():
        raise ConfigError(
            f"{str(tokenizer_file.parent)!r} has no {tokenizer_file.name}: download it, too, or convert the tokenizer "
            "once"
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises a plain Exception for files that it cannot parse
        raise ConfigError(f"{tokenizer_file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    stop, chat = stop_tokens(folder), ChatTemplate.of(folder.path)
    length = cfg.context if length is None else min(length, cfg.context)
    model = read(Steps(graph, shapes, rows, length, options).plan)
    return Generator(Engine(model, rows=rows, length=length, **options), tokenizer, stop, chat)


def stop_tokens(folder: Folder) -> frozenset[int]:
    """Return the tokens that end a text: `eos_token_id` of `generation_config.json`, or else of `config.json`.

    Raises:
        ConfigError: they are not token ids, or a file is damaged.
    """
    file = folder.path / GENERATION_CONFIG
    generation = read_table(file) if file.exists() else {}
    found = generation.get("eos_token_id")
    found = folder.config.get("eos_token_id") if found is None else found
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in ids):
        raise ConfigError(f"eos_token_id of {str(folder.path)!r} is {found!r}; it must be a token id or a list of them")
    return frozenset(ids)
