"""Chat templates: from messages to the text that a model continues, or was trained on."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.models.pretrained.folder import read_table

TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"  # of models that read images
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which messages have the reasoning of an answer. Each template reads one of them, or none."""
# They stand for `{% generation %}` and `{% endgeneration %}` in a rendered text. Unicode reserves both for such uses
# (section 23.7, noncharacters), so no message has them.
_START, _END = "\ufdd0", "\ufdd1"


@shown
@dataclass(frozen=True)
class ChatTemplate:
    """The template of a folder. It runs in a sandbox of jinja2, which reaches neither files nor Python's internals.

    Attributes:
        source: the template.
        tokens: special tokens that it may use: `bos_token`, `eos_token`, ...
        where: its file, for messages.
        day: the date that templates get which ask for it; by default the day of the call.
    """

    source: str
    tokens: Mapping[str, str]
    where: str
    day: datetime.datetime | None = None

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Read the template of a folder.

        It is `chat_template.jinja`, or the one in `chat_template.json`, or the one in `tokenizer_config.json`.

        Raises:
            ConfigError: a file is damaged.
        """
        file = folder / TOKENIZER_CONFIG
        config = read_table(file) if file.exists() else {}
        try:
            source = (folder / TEMPLATE_FILE).read_text() if (folder / TEMPLATE_FILE).exists() else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / TEMPLATE_FILE} cannot be read: {error}") from error
        where = str(folder / TEMPLATE_FILE)
        for table in (folder / PROCESSOR_TEMPLATE, file):
            if source is None and table.exists():
                source, where = read_table(table).get("chat_template"), str(table)
        if isinstance(source, list):  # several templates with names
            source = {one.get("name"): one.get("template") for one in source}.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, {name: _content(x) for name, x in config.items() if name.endswith("_token")}, where)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_follows: bool = True) -> str:
        """Return the text of messages.

        Args:
            messages: tables with `role` and `content`.
            answer_follows: whether the text ends where the model's answer starts.

        Raises:
            ConfigError: the template refuses the messages, or is not a template.
        """
        return self._rendered(messages, answer_follows).replace(_START, "").replace(_END, "")

    def render_marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[range]]:
        """Return the text of messages, and the characters that the template marks as the model's own.

        A template marks them by `{% generation %}` and `{% endgeneration %}`. There are none if it has no such marks.

        Raises:
            ConfigError: the template refuses the messages, or is not a template.
        """
        text, found = "", []
        for n, part in enumerate(self._rendered(messages, False).split(_START)):
            marked, end, rest = part.partition(_END) if n else ("", "", part)
            if end:
                found.append(range(len(text), len(text) + len(marked)))
            text += marked + rest
        return text, found

    def _rendered(self, messages: Sequence[Mapping[str, Any]], answer_follows: bool) -> str:
        self._check(messages)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        extensions = (_GenerationMarks, LoopControlExtension)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: (self.day or datetime.datetime.now()).strftime(form)
        try:
            template = environment.from_string(self.source)
            # Templates compare tools and documents with none; jinja2 would compare an undefined name as another value.
            given = {"tools": None, "documents": None, **self.tokens}
            return template.render(messages=messages, add_generation_prompt=answer_follows, **given)
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the chat template of {self.where} fails: {error}") from error

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse messages with content that the template does not read, because it would be left out silently."""
        for name in (*REASONING, "tool_calls"):
            if any(message.get(name) for message in messages) and not re.search(rf"\b{name}\b", self.source):
                read = [other for other in REASONING if re.search(rf"\b{other}\b", self.source)]
                hint = (
                    f"rename it to {read[0]}, which the template reads" if read and name in REASONING else "remove it"
                )
                raise ConfigError(
                    f"a message has {name}, which the chat template of {self.where} does not read: {hint}"
                )


class _GenerationMarks(Extension):
    """The statement `{% generation %}...{% endgeneration %}`, which writes its content between two marks."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END))
        return [start, *body, end]


def _content(token: Any) -> str:
    """A special token is a text, or a table with its text."""
    return token if isinstance(token, str) else str((token or {}).get("content", ""))
