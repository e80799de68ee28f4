"""Finds the answers of the assistant in a conversation that a chat template has rendered."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.models.pretrained.chat_template import REASONING, ChatTemplate

ASSISTANT = "assistant"
Conversation = tuple[str, list[range]]


def render_answers(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], special: Sequence[str]
) -> list[Conversation]:
    """Render a conversation, and find the characters that the model writes.

    A template with the marks `{% generation %}` says itself what they are. Without marks, an answer is what the text up
    to it has beyond the text of the messages before it, which ends as a prompt does. It ends with its last special
    token, such as `<|im_end|>`: the line end that some templates write after it is not the model's.

    Most templates render the start of a conversation as the start of its text. Some do not: they remove the reasoning
    of earlier answers, or end the last one differently. Then each answer gets a text of its own, which ends with it.

    Args:
        template: the template.
        messages: the conversation.
        special: the texts of the tokenizer's special tokens.

    Returns:
        Texts with the ranges of their characters that count.

    Raises:
        ConfigError: the template refuses the messages.
        ValueError: there is no answer, or the text does not show where it starts.
    """
    answers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not answers:
        raise ValueError(f"it has no message with the role {ASSISTANT!r}")
    text, marked = template.render_marked(messages)
    if marked:
        return [(text, marked)]
    own: list[Conversation] = []
    for n in answers:
        until = template.render(messages[: n + 1], answer_follows=False)
        start = _start(template.render(messages[:n]), until, messages[n])
        own.append((until, [range(start, _end(until, start, special))]))
    if all(text.startswith(until) for until, _ in own):
        return [(text, [one for _, spans in own for one in spans])]
    return own


def _start(prompt: str, until: str, message: Mapping[str, Any]) -> int:
    """Return where an answer starts in the text up to it."""
    if until.startswith(prompt):
        return len(prompt)
    # The prompt has more than the header of the answer, such as a tag that opens its reasoning. The answer begins with
    # its reasoning or its content. That text reaches the place where the prompt and the whole text start to differ.
    common = len(os.path.commonprefix([prompt, until]))
    texts = [text.strip() for name in (*REASONING, "content") if isinstance(text := message.get(name), str)]
    places = [until.find(text, max(common - len(text) + 1, 0)) for text in texts if text]
    if not (found := [place for place in places if place >= 0]):
        raise ValueError("the text that the chat template renders does not show where an answer starts")
    return min(found)


def _end(text: str, start: int, special: Sequence[str]) -> int:
    """Return where an answer ends: after its last special token if only whitespace follows, else with the text."""
    last = max((place + len(one) for one in special if (place := text.rfind(one, start)) >= 0), default=len(text))
    return len(text) if text[last:].strip() else last
