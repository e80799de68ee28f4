"""Text in, text out: stop strings, chat, files of prompts, and the command."""

import dataclasses
import json

import pytest

from autoshard.cli import main
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models.pretrained.folder import Folder
from autoshard.serve import load_generator
from autoshard.serve.generator import stop_tokens
from autoshard.serve.prompt_file import read_prompts, replies_in, reply_to_file
from tests.models.pretrained.folders import LLAMA, write_tensors
from tests.models.pretrained.quantized.folders import FP8, quantized_tensors
from tests.serve.folders import make_text_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_text_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def generator(folder):
    return load_generator(folder, rows=2, mesh={"x": 1})


def test_pieces_join_to_the_text_and_stop_strings_cut_it(generator):
    pieces = []
    prompts = ["abc", "q", "hello"]
    found = generator.generate(prompts, max_tokens=12, on_text=lambda n, piece: pieces.append((n, piece)))
    for n, one in enumerate(found):
        assert one.text == "".join(piece for index, piece in pieces if index == n)
        assert len(one.text) == len(one.tokens) == 12 or one.reason == "stop"
    text = found[0].text
    cut = text[3:5]
    (stopped,) = generator.generate(prompts[:1], max_tokens=12, stop=["zz", cut])
    assert stopped.text == text[: text.index(cut)] and stopped.reason == "text"
    with pytest.raises(ConfigError, match="stop string is empty"):
        generator.generate(["a"], stop=[""])


def test_stop_tokens_are_those_of_the_generation_config(generator, folder, tmp_path):
    assert generator.stop_tokens == {23}
    other = make_text_folder(tmp_path / "other")
    (other / "generation_config.json").unlink()
    assert load_generator(other, rows=1, mesh={"x": 1}).stop_tokens == {5}


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"eos_token_id": 5}, {5}),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 6], "text_config": {}}, {1, 6}),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "text_config": {"eos_token_id": 7}}, {7}),
        ({"text_config": None}, set()),
    ],
    ids=["flat", "towers", "nested", "none"],
)
def test_stop_tokens_of_a_config_with_a_text_model(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_tokens(Folder.open(tmp_path)) == expected


def test_messages_go_through_the_chat_template(generator):
    messages = [{"role": "user", "content": "bc"}]
    assert generator.prompts.chat.render(messages) == "bcea"
    assert generator.generate([messages], max_tokens=6) == generator.generate(["bcea"], max_tokens=6)
    with pytest.raises(ConfigError, match="no system messages"):
        generator.encode([{"role": "system", "content": "b"}])


def test_a_template_reaches_no_internals_of_python(folder, generator):
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}"):
        with pytest.raises(ConfigError, match="chat template"):
            dataclasses.replace(generator.prompts.chat, source=source).render([])


def test_a_killed_file_is_continued_with_the_same_texts(generator, tmp_path):
    from autoshard.serve import Sampling

    file, whole, resumed = (tmp_path / name for name in ("prompts.jsonl", "whole.jsonl", "resumed.jsonl"))
    file.write_text('{"prompt": "abc"}\n\n{"messages": [{"role": "user", "content": "q"}]}\n{"prompt": "hello"}')
    prompts = read_prompts(file)
    options = {"max_tokens": 6, "sampling": Sampling(1.0, seed=1)}
    assert reply_to_file(generator, prompts, whole, **options) == 3
    lines = whole.read_text().splitlines(keepends=True)
    assert {json.loads(line)["line"] for line in lines} == {0, 2, 3}
    resumed.write_text(lines[0] + lines[1][:10])  # killed while it wrote
    assert reply_to_file(generator, prompts, resumed, **options) == 2
    assert sorted(resumed.read_text().splitlines(keepends=True)) == sorted(lines)
    assert reply_to_file(generator, prompts, resumed, **options) == 0
    one, *others = prompts
    for who, changed, asked in (
        (generator, prompts, {"max_tokens": 7}),
        (generator, [dataclasses.replace(one, prompt="b"), *others], {}),
        (generator, [dataclasses.replace(one, line=7), *others], {}),
        (dataclasses.replace(generator, source="another model"), prompts, {}),
    ):
        with pytest.raises(ConfigError, match="of another model, or with other options, for line 0"):
            reply_to_file(who, changed, resumed, **options | asked)
    with pytest.raises(ConfigError, match="not a file of replies"):
        replies_in(file)
    both, tools = '{"prompt": "a", "messages": []}', '{"prompt": "a", "tools": [{}]}'
    file.write_text("\n".join(['{"prompt": 3}', "x", '{"prompt": "a"}', both, tools]))
    with pytest.raises(ConfigError, match='(?s)line 1: .*line 2: .*line 4: it has both .*line 5: it has "tools"'):
        read_prompts(file)
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')  # with the mark that some editors write
    assert read_prompts(file)[0].prompt == "a"


def test_the_command_prints_what_the_generator_gives(generator, folder, capsys):
    plain, chat = (generator.generate([text], max_tokens=5)[0].text for text in ("abc", "abcea"))
    assert (
        main(["generate", str(folder), "--prompt", "abc", "--tokens", "5", "--plan", "tp:4 fsdp:2", "--rows", "2"]) == 0
    )
    assert capsys.readouterr().out == f"abc{plain}\n"
    assert main(["generate", str(folder), "--prompt", "abc", "--tokens", "5", "--chat", "--stop", "zz"]) == 0
    assert capsys.readouterr().out == f"{chat}\n"


@pytest.mark.slow
def test_the_command_replies_to_a_file(generator, folder, tmp_path, capsys):
    plain = generator.generate(["abc"], max_tokens=5)[0].text
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc"}\n')
    files = ["--file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(folder), *files, "--tokens", "5"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == plain
    assert "1 replies written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "3", "--file", "x"], "--step is for runs of the trainer; --file and --out are given together"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--rows", "0"], "rows is 0"),
    ],
)
def test_wrong_options_are_one_error(folder, capsys, options, message):
    assert main(["generate", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_folders_that_lack_something_are_refused(tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--chat"]) == 2
    assert "--chat need" in capsys.readouterr().err
    folder = make_text_folder(tmp_path / "weightless")
    (folder / "model.safetensors").unlink()
    assert main(["generate", str(folder)]) == 2
    assert "has no safetensors files, so it has no weights" in capsys.readouterr().err
    folder = make_text_folder(tmp_path / "damaged")
    (folder / "config.json").write_text("{")
    assert main(["generate", str(folder), "--chat"]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    folder = make_text_folder(tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(AutoshardError, match="not a tokenizer"):
        load_generator(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(AutoshardError, match=r"has no tokenizer\.json"):
        load_generator(folder)


@pytest.mark.slow
def test_weights_that_stay_codes_give_the_text_of_decoded_ones(tmp_path, capsys):
    folder, blocks = make_text_folder(tmp_path / "model"), {**FP8, "weight_block_size": [8, 8]}
    write_tensors(folder, quantized_tensors(folder, {**LLAMA, "quantization_config": blocks}))
    options = ["--prompt", "abc", "--tokens", "8", "--plan", "tp:2 dp:4", "--rows", "4"]
    assert main(["generate", str(folder), *options]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", str(folder), *options, "--keep-codes", "--show-plan"]) == 0
    plan, _, text = capsys.readouterr().out.rpartition("\nabc")
    assert f"abc{text}" == plain and "wq/codes" in plan
