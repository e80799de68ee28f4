"""Exactly the tokens of the assistant count, whatever the chat template looks like."""

from collections.abc import Mapping, Sequence

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from autoshard.errors import ConfigError
from autoshard.models.pretrained.chat_template import ChatTemplate
from autoshard.train.data.rows.encoding import RowEncoder
from tests.train.data.rows import templates

HI, WHY, HM = ({"role": "user", "content": text} for text in ("hi why", "then", "hm"))
SO, BYE = ({"role": "assistant", "content": text} for text in ("because so", "bye"))
THOUGHT = {"role": "assistant", "content": "<think> oh </think> because so"}
END = " <|im_end|>"


def counted(template: str, messages: Sequence[Mapping[str, str | None]], prompt: int = 0) -> list[list[str]]:
    """Returns the tokens that count of each document, as runs of text; the first messages may be a prompt."""
    made = templates.tokenizer()
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, "a test")
    row = {"prompt": messages[:prompt], "completion": messages[prompt:]} if prompt else {"messages": messages}
    found = []
    for document in RowEncoder(made, chat).documents(row):
        words = [
            str(made.id_to_token(n)) if yes else "\n" for n, yes in zip(document.tokens, document.counts, strict=True)
        ]
        found.append([run.strip() for run in " ".join(words).split("\n") if run.strip()])
    return found


@pytest.mark.parametrize(
    ("template", "end"),
    [("CHATML", END), ("HEADERS", " <|eot|>"), ("INST", " </s>"), ("MODEL", END), ("MARKED", END), ("PLAIN", "")],
)
def test_each_answer_and_its_end_count_and_nothing_else(template: str, end: str) -> None:
    found = counted(getattr(templates, template), [HI, SO, WHY, BYE])
    assert found == [[f"because so{end}", f"bye{end}"]]


def test_a_template_that_renders_the_start_differently_gives_each_answer_its_own_text() -> None:
    assert counted(templates.CLOSED, [HI, SO, WHY, BYE]) == [
        [f"because so{END} </s>"], [f"bye{END} </s>"]
    ]  # fmt: skip
    assert counted(templates.REASONING, [HI, THOUGHT, WHY, BYE]) == [
        [f"<think> oh </think> because so{END}"], [f"bye{END}"]
    ]  # fmt: skip
    assert counted(templates.CHATML, [HI, THOUGHT]) == [[f"<think> oh </think> because so{END}"]]


@pytest.mark.parametrize("template", ["CHATML", "MARKED", "REASONING"])
def test_answers_in_a_prompt_do_not_count(template: str) -> None:
    assert counted(getattr(templates, template), [HI, THOUGHT, WHY, BYE], prompt=3) == [[f"bye{END}"]]


def test_a_prompt_that_starts_the_reasoning_leaves_the_content() -> None:
    assert counted(templates.OPENED, [HI, SO]) == [[f"because so{END}"]]
    assert counted(templates.OPENED, [HI, THOUGHT]) == [[f"oh </think> because so{END}"]]


def test_an_answer_that_is_a_part_of_the_text_behind_it_counts() -> None:
    """The letter stands in `<|im_end|>`, too, and the word in the header."""
    for text, word in (("d", "?"), ("assistant", "assistant")):
        assert counted(templates.OPENED, [HI, {"role": "assistant", "content": text}]) == [[f"{word}{END}"]]


def test_the_reasoning_of_an_answer_counts() -> None:
    answer = {"role": "assistant", "reasoning_content": "oh", "content": "so"}
    assert counted(templates.THINKING, [HI, answer]) == [[f"oh </think> so{END}"]]
    # The prompt has the marks of an empty reasoning.
    empty = templates.THINKING.replace("assistant <think> {% endif %}", "assistant <think> </think> {% endif %}")
    assert counted(empty, [HI, answer]) == [[f"oh </think> so{END}"]]


@pytest.mark.parametrize(
    ("template", "field", "message"),
    [
        ("THINKING", "thinking", "a message has thinking, .* rename it to reasoning_content, which"),
        ("CHATML", "reasoning_content", "a message has reasoning_content, .* remove it"),
        ("CHATML", "tool_calls", "a message has tool_calls, .* remove it"),
    ],
)
def test_what_a_template_does_not_read_is_refused(template: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        counted(getattr(templates, template), [HI, {**SO, field: "oh"}])
    counted(getattr(templates, template), [HI, {**SO, field: None}])


def test_tools_are_refused() -> None:
    for made in (RowEncoder(templates.tokenizer()).documents, RowEncoder(templates.tokenizer()).pair):
        with pytest.raises(ValueError, match="it has tools, which are not built"):
            made({"text": "hi", "chosen": "so", "rejected": "bye", "prompt": "hi", "tools": [{"name": "oh"}]})


def test_a_conversation_may_end_with_a_question() -> None:
    assert counted(templates.CHATML, [HI, SO, HM]) == [[f"because so{END}"]]
    with pytest.raises(ValueError, match="no message with the role 'assistant'"):
        counted(templates.CHATML, [HI])


def test_a_date_in_a_template_is_fixed(tmp_path) -> None:
    folder = templates.make_chat_folder(tmp_path / "m", "{{ strftime_now('%Y-%m-%d') }}")
    chat = RowEncoder.of(folder, folder / "tokenizer.json").chat
    assert chat is not None and chat.render([HI]) == "2024-07-26"


@pytest.mark.parametrize("trim", [True, False])
def test_tokens_of_whitespace_count_also_where_the_tokenizer_trims_their_offsets(trim: bool) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    made.add_special_tokens(["<e>"])
    answer = {"role": "assistant", "content": "a é"}
    text = "{% for m in messages %}{{ m.content }}; {% endfor %}"
    ended = text.replace("; ", "<e>\n")
    (document,) = RowEncoder(made, ChatTemplate(ended, {}, "a test")).documents({"messages": [HI, answer]})
    # The line end behind the special token does not count.
    assert document.counts.tolist() == [False] * len("hi why-\n") + [True] * len("a é-".encode()) + [False]
    for encoder, row in (
        (RowEncoder(made, ChatTemplate(text, {}, "a test")), {"messages": [HI, answer]}),
        (RowEncoder(made), {"prompt": "hi why; ", "completion": "a é; "}),
    ):
        (document,) = encoder.documents(row)
        assert document.counts.tolist() == [False] * len("hi why; ") + [True] * len("a é; ".encode())
