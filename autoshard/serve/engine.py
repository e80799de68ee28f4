"""Continuous batching: a fixed number of rows, each of which takes the next prompt when its text ends.

Prompts are padded to one of a few lengths and prefilled in groups of a fixed size, so few programs are compiled, and
none after the first prompts of each length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.models.pretrained.parameter_paths import as_tree, parameters_of
from autoshard.serve.constants import MAX_TOKENS, ROWS, SMALLEST_BUCKET
from autoshard.serve.model import GenerativeModel
from autoshard.serve.prompts import PromptImage
from autoshard.serve.sampling import GREEDY, Sampling, Settings
from autoshard.serve.steps import Prompts, State, Steps
from autoshard.sharding.api.plan import Plan

OnToken = Callable[[int, int], bool]


@shown
@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids, at least one; of a prompt with images, one for each of their features.
        max_tokens: number of tokens to add at most.
        sampling: how they are chosen.
        stop: tokens that end the text. The one that ends it is not part of it.
        number: prompts with the same seed and other numbers draw other tokens. Default: the place in the list.
        images: the images in the prompt, in order.
    """

    prompt: Sequence[int]
    max_tokens: int = MAX_TOKENS
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    number: int | None = None
    images: Sequence[PromptImage] = ()


@shown
@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        tokens: the new tokens, without the prompt and without the token that ended it.
        reason: why it ended: `stop` (a stop token), `text` (the callback asked for it), `tokens` (`max_tokens`), or
            `length` (the row is full).
    """

    tokens: tuple[int, ...]
    reason: str


@shown
@dataclasses.dataclass
class _Row:
    index: int
    request: Request
    room: int
    tokens: list[int]


class Engine:
    """Continues prompts with a model, in rows of a batch.

    Args:
        model: the model. Its parameters stay where they are, unless `plan`, `mesh` or `target` say otherwise.
        rows: number of prompts that are continued at a time.
        length: positions of a row, prompt and text; by default the model's context.
        group: number of prompts that are prefilled at a time; by default one on one device, and one for each device,
            at most `rows`, on several.
        **options: of `autoshard.auto_shard`, such as `plan`, for the prefill and the decode step.

    Raises:
        ConfigError: a number is invalid.

    >>> from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
    >>> sizes = {"vocab": 16, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "context": 32}
    >>> model = Decoder(DecoderConfig(kinds=(LayerKind(),), **sizes), rngs=nnx.Rngs(0))
    >>> [len(found.tokens) for found in Engine(model, rows=2).run([Request([1, 2, 3], 4), Request([5], 2)])]
    [4, 2]
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        rows: int = ROWS,
        length: int | None = None,
        group: int | None = None,
        **options: Any,
    ):
        positions: int = model.cfg.context if length is None else length
        check_sizes(rows, positions, model.cfg.context)
        self.rows, self.length, self.vocab, self.model = rows, positions, model.cfg.vocab, model
        self.steps = Steps(nnx.graphdef(model), as_tree(parameters_of(model)), rows, positions, options)
        self.group = group_size(rows, self.steps.plan, group)
        self.buckets = tuple(_buckets(positions))

    @property
    def plan(self) -> Plan:
        """The plan of the decode step."""
        return self.steps.plan

    def run(self, requests: Iterable[Request], on_token: OnToken | None = None) -> list[Completion]:
        """Continue prompts.

        Args:
            requests: the prompts, in any number.
            on_token: called with the place of a prompt in the list and each of its new tokens, as soon as it is known.
                If it returns True, the text ends with this token.

        Returns:
            The continuations, in the order of the prompts.

        Raises:
            ConfigError: a prompt is empty, has an unknown token, or does not fit into a row. Nothing has been computed.
        """
        asked = list(requests)
        found = dict(self.stream(asked, on_token))
        return [found[n] for n in range(len(asked))]

    def stream(self, requests: Iterable[Request], on_token: OnToken | None = None) -> Iterator[tuple[int, Completion]]:
        """Continue prompts as `run` does. Yields the place of each prompt and its continuation, as soon as it ends."""
        asked = list(requests)
        self._check(asked)
        yield from ((n, Completion((), "tokens")) for n, r in enumerate(asked) if r.max_tokens == 0)
        waiting = iter([(n, r) for n, r in enumerate(asked) if r.max_tokens > 0])
        rows: list[_Row | None] = [None] * self.rows
        state = self.steps.new_state()
        chosen, numbers = [GREEDY] * self.rows, [0] * self.rows
        while True:
            while new := self._take(rows, waiting):
                for row in new:
                    taken = rows[row]
                    assert taken is not None
                    chosen[row] = taken.request.sampling
                    numbers[row] = taken.index if taken.request.number is None else taken.request.number
                state = self.steps.prefill(state, self._prompts(rows, new, Settings.of(chosen, numbers)))
                yield from self._collect(state, rows, new, on_token)
            if not (active := [n for n, row in enumerate(rows) if row is not None]):
                return
            state = self.steps.decode(state, np.array([row is not None for row in rows]))
            yield from self._collect(state, rows, active, on_token)

    def _take(self, rows: list[_Row | None], waiting: Iterator[tuple[int, Request]]) -> list[int]:
        """Give waiting prompts to free rows, one group at most. Returns the rows."""
        new = []
        for n in [n for n, row in enumerate(rows) if row is None][: self.group]:
            if (following := next(waiting, None)) is None:
                break
            index, request = following
            rows[n] = _Row(index, request, self.length - len(request.prompt) + 1, [])
            new.append(n)
        return new

    def _prompts(self, rows: list[_Row | None], new: list[int], settings: Settings) -> Prompts:
        requests = [row.request for n in new if (row := rows[n]) is not None]
        texts = [one.prompt for one in requests]
        positions = next(size for size in self.buckets if size >= max(map(len, texts)))
        tokens, counts = np.zeros((self.group, positions), np.int32), np.zeros((self.group,), np.int32)
        seen, source = np.zeros((self.group, self.vocab), bool), np.full((self.rows,), -1, np.int32)
        for place, (row, text) in enumerate(zip(new, texts, strict=True)):
            tokens[place, : len(text)], counts[place], source[row] = text, len(text), place
            seen[place, list(text)] = True
        images = [[(image.patches(), image.grid) for image in one.images] for one in requests]
        inputs = self.model.prompt_inputs(tokens, counts, images + [[]] * (self.group - len(images)))
        return Prompts(tokens, counts, seen, source, settings, inputs)  # pyright: ignore[reportArgumentType]

    def _collect(
        self, state: State, rows: list[_Row | None], which: list[int], on_token: OnToken | None
    ) -> Iterator[tuple[int, Completion]]:
        """Add the last token of rows to their texts. Free the rows whose texts end, and yield these."""
        tokens = np.asarray(jax.device_get(state.tokens))
        for n in which:
            row, token = rows[n], int(tokens[n])
            assert row is not None
            reason = ""
            if token in row.request.stop:
                reason = "stop"
            else:
                row.tokens.append(token)
                if on_token is not None and on_token(row.index, token):
                    reason = "text"
                elif len(row.tokens) >= row.request.max_tokens:
                    reason = "tokens"
                elif len(row.tokens) >= row.room:
                    reason = "length"
            if reason:
                rows[n] = None
                yield row.index, Completion(tuple(row.tokens), reason)

    def _check(self, requests: Sequence[Request]) -> None:
        problems = []
        for place, request in enumerate(requests):
            n = place if request.number is None else request.number
            outside = [token for token in request.prompt if not 0 <= token < self.vocab]
            if not len(request.prompt):
                problems.append(f"prompt {n} is empty: give at least one token")
            elif len(request.prompt) > self.length:
                slots, images = self.model.image_slots, request.images
                of_images = f" ({request.prompt.count(slots.token)} of them for images)" if slots and images else ""
                problems.append(
                    f"prompt {n} has {len(request.prompt)} tokens{of_images}, more than the {self.length} positions of "
                    f"a row: shorten it{', give fewer or smaller images' if images else ''}, or give a larger length"
                )
            if outside:
                problems.append(f"prompt {n} has token {outside[0]}; the model's tokens are 0 to {self.vocab - 1}")
            if problem := self._image_problem(request):
                problems.append(f"prompt {n} {problem}")
            if request.max_tokens < 0:
                problems.append(f"max_tokens of prompt {n} is {request.max_tokens}; it must be at least 0")
        if problems:
            raise ConfigError(f"the prompts cannot be continued:\n{listing(problems)}")

    def _image_problem(self, request: Request) -> str:
        slots = self.model.image_slots
        if slots is None:
            return "has images, but the model reads text alone" if request.images else ""
        have, wanted = request.prompt.count(slots.token), sum(slots.count(one.grid) for one in request.images)
        if have == wanted:
            return ""
        return (
            f"has {have} tokens {slots.token}, but its {len(request.images)} images have {wanted} features: repeat the "
            "token once for each feature"
        )


def check_sizes(rows: int, length: int, context: int) -> None:
    """Check the number of rows, and of the positions of each.

    Raises:
        ConfigError: they are invalid for a model with this context.
    """
    problems = []
    if rows < 1:
        problems.append(f"rows is {rows}; it must be at least 1")
    if not 2 <= length <= context:
        problems.append(f"length is {length}; it must be from 2 to {context}, the model's context")
    if problems:
        raise ConfigError("; ".join(problems))


def group_size(rows: int, plan: Plan, group: int | None = None) -> int:
    """Return the number of prompts that are prefilled at a time: by default one for each device, at most `rows`."""
    return min(rows, group or plan.mesh.size)


def _buckets(length: int) -> Iterator[int]:
    size = SMALLEST_BUCKET
    while size < length:
        yield size
        size *= 2
    yield length
