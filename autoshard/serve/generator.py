"""Text in, text out: a pretrained folder with its tokenizer, stop tokens and chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models.pretrained.chat_template import ChatTemplate
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.folder import Folder, read_table
from autoshard.models.pretrained.load import Described
from autoshard.models.pretrained.parameter_paths import as_tree
from autoshard.models.pretrained.tokenizer_file import open_tokenizer
from autoshard.serve.constants import MAX_TOKENS, ROWS
from autoshard.serve.engine import Engine, Request, check_sizes, group_size
from autoshard.serve.model import GenerativeModel
from autoshard.serve.prompts import Prompt, PromptReader
from autoshard.serve.sampling import GREEDY, Sampling
from autoshard.serve.steps import Steps
from autoshard.serve.text import TextStream

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
        prompts: makes tokens of prompts: the tokenizer, the chat template, and how images are read.
        stop_tokens: tokens that end a text.
        source: where the model is: its folder, and the step of a run.
    """

    engine: Engine
    prompts: PromptReader
    stop_tokens: frozenset[int]
    source: str = ""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        images: Sequence[Sequence[Any]] | None = None,
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
            images: the images of each prompt: files, Pillow images, or arrays `[height, width, 3]` of bytes. See
                `PromptReader.read` for their places.
            max_tokens: number of tokens to add to each at most.
            sampling: how they are chosen.
            stop: strings that end a text; it ends before them.
            numbers: number of each prompt. Prompts with other numbers draw other tokens. Default: the place.
            on_text: called with the place of a prompt and each new piece of its text.
            on_reply: called with the place of a prompt and its reply, when it ends.

        Returns:
            The replies, in the order of the prompts.

        Raises:
            ConfigError: prompts are empty or too long, or their images do not fit or cannot be read; or the folder has
                no chat template.
        """
        if any(not text for text in stop):
            raise ConfigError("a stop string is empty: give at least one character")
        if images is not None and len(images) != len(prompts):
            raise ConfigError(
                f"images has {len(images)} lists for {len(prompts)} prompts: give one list for each prompt"
            )
        options = {"max_tokens": max_tokens, "sampling": sampling, "stop": self.stop_tokens}
        requests = self._requests(prompts, images or [()] * len(prompts), numbers or range(len(prompts)), **options)
        streams = [TextStream(self._decode, stop) for _ in prompts]
        texts = [""] * len(prompts)

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

    def encode(self, prompt: Prompt, images: Sequence[Any] = ()) -> list[int]:
        """Return the tokens of a prompt, as `PromptReader.read` does."""
        return self.prompts.read(prompt, images)[0]

    def _requests(
        self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]], numbers: Sequence[int], **options: Any
    ) -> list[Request]:
        """Read prompts. All that cannot be read are named in one error."""
        found, problems = [], []
        for number, prompt, own in zip(numbers, prompts, images, strict=True):
            try:
                tokens, read = self.prompts.read(prompt, own)
                found.append(Request(tokens, number=number, images=read, **options))
            except AutoshardError as error:
                problems.append(f"prompt {number}: {error}" if len(prompts) > 1 else str(error))
        if problems:
            raise ConfigError("the prompts cannot be read:\n" + listing(problems) if len(prompts) > 1 else problems[0])
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.prompts.tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_generator(
    path: Any,
    *,
    rows: int = ROWS,
    length: int | None = None,
    dtype: str | None = None,
    keep_codes: bool = False,
    check: Callable[[PromptReader], Any] | None = None,
    **options: Any,
) -> Generator:
    """Open a pretrained folder for generation.

    The decode step is planned first, from the config alone. Then each tensor is read onto the shards of that plan. The
    parameters of a vision tower are read onto the shards of the prefill step's plan.

    Args:
        path: the folder, with `config.json`, safetensors files and `tokenizer.json`.
        rows: number of prompts that are continued at a time.
        length: positions of a row, prompt and text; by default the model's context, which may need much memory.
        dtype: dtype of the parameters and of the computation; by default the stored one.
        keep_codes: whether the weights of a quantized folder stay codes and scales; see `load_pretrained`.
        check: is called with the reader of prompts before the weights are read. It can raise errors of prompts early.
        **options: of `autoshard.auto_shard`, such as `plan` and `mesh`.

    Raises:
        AutoshardError: the folder lacks a file, or its model is not known or generates no text.
    """
    folder = Folder.open(path)
    tensors, described = folder.tensors(), Described.of(folder, dtype, {})

    def opened() -> Opened:
        found, own = described.fitted(folder, tensors), tensors
        if keep_codes:
            found, own = found.keeping_codes(folder, tensors)
        shapes = as_tree(found.abstract(own))
        return Opened(found.graph, shapes, lambda shardings: found.read(folder, own, shardings))

    model, file = described.model(described.shapes), folder.path / TOKENIZER
    return make_generator(folder, file, model, opened, rows=rows, length=length, check=check, **options)


@shown
@dataclasses.dataclass(frozen=True)
class Opened:
    """A model whose values can be read.

    Attributes:
        graph: its structure.
        shapes: the shapes of its parameters, nested dictionaries.
        read: returns it with the given sharding of each parameter, by path.
    """

    graph: Any
    shapes: Any
    read: Callable[[dict[str, Any]], Any]


def make_generator(
    folder: Folder,
    tokenizer_file: Path,
    model: Any,
    opened: Callable[[], Opened],
    *,
    rows: int = ROWS,
    length: int | None = None,
    check: Callable[[PromptReader], Any] | None = None,
    source: str | None = None,
    **options: Any,
) -> Generator:
    """Plan the decode step of a model, then read the model as that plan says.

    Args:
        folder: has the model's stop tokens, chat template and image settings.
        tokenizer_file: the file of its tokenizer.
        model: the model, with shapes in place of values.
        opened: opens the files of its values.
        rows: as in `load_generator`.
        length: as in `load_generator`.
        check: as in `load_generator`.
        source: where the values are; by default the folder.
        **options: as in `load_generator`.

    Raises:
        AutoshardError: a file is missing or damaged, or the model generates no text.
    """
    if not tokenizer_file.exists():
        where, name = str(tokenizer_file.parent), tokenizer_file.name
        raise ConfigError(f"{where!r} has no {name}: download it, too, or convert the tokenizer once")
    tokenizer = open_tokenizer(tokenizer_file)
    if not isinstance(model, GenerativeModel):
        raise ConfigError(f"{str(folder.path)!r} is a {family_of(folder.config, '').name}, which generates no text")
    positions: int = model.cfg.context if length is None else min(length, model.cfg.context)
    check_sizes(rows, positions, model.cfg.context)
    stop = stop_tokens(folder)
    prompts = PromptReader(tokenizer, ChatTemplate.of(folder.path), model.image_slots, folder.path)
    if check is not None:
        check(prompts)
    found = opened()
    steps = Steps(found.graph, found.shapes, rows, positions, options)
    read = found.read(steps.shardings(group_size(rows, steps.plan)))
    engine = Engine(read, rows=rows, length=positions, **options)
    return Generator(engine, prompts, stop, str(folder.path.resolve()) if source is None else source)


def stop_tokens(folder: Folder) -> frozenset[int]:
    """Return the tokens that end a text: `eos_token_id` of `generation_config.json`, or else of `config.json`.

    In the config of a model that reads images, it may be among the values of the text model.

    Raises:
        ConfigError: they are not token ids, or a file is damaged.
    """
    file = folder.path / GENERATION_CONFIG
    generation = read_table(file) if file.exists() else {}
    text = folder.config.get("text_config")
    tables = (generation, folder.config, text if isinstance(text, Mapping) else {})
    found = next((ids for one in tables if (ids := one.get("eos_token_id")) is not None), None)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in ids):
        raise ConfigError(f"eos_token_id of {str(folder.path)!r} is {found!r}; it must be a token id or a list of them")
    return frozenset(ids)
