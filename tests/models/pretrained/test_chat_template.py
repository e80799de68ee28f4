"""What a chat template gets besides the messages: the same as in transformers."""

import pytest

from autoshard.models.pretrained.chat_template import ChatTemplate


def rendered(source):
    template = ChatTemplate(source, {"bos_token": "<s>"}, "tokenizer_config.json")
    return template.render([{"role": "user", "content": "Grüße <b>"}])


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_are_none(name):
    assert rendered("{% if " + name + " is not none %}has{% else %}none{% endif %}") == "none"


def test_special_tokens_have_their_names():
    assert rendered("{{ bos_token }}") == "<s>"


@pytest.mark.parametrize(
    "options, expected",
    [("", '"Grüße <b>"'), ("(ensure_ascii=true)", '"Gr\\u00fc\\u00dfe <b>"'), ("(indent=2)", '"Grüße <b>"')],
)
def test_json(options, expected):
    assert rendered("{{ messages[0].content | tojson" + options + " }}") == expected
