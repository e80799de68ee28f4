"""Prompts with images: their places, files of prompts, few programs, shards of the tower, and bad input."""

import json
import re
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from autoshard.cli import main
from autoshard.errors import AutoshardError, ConfigError
from autoshard.serve import load_generator
from autoshard.serve.prompt_file import read_prompts, reply_to_file
from tests.serve.folders import make_image_folder, make_text_folder

pytest.importorskip("PIL")

U = 20  # the token of an image
FEATURES = {"one": 2 * 3, "two": 4 * 2, "three": 8 * 8}  # multiples of 8 pixels, with at least 256 and at most 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def generator(folder):
    return load_generator(folder, rows=2, mesh={"x": 1})


def image(folder, name):
    return str(folder / f"{name}.png")


def test_images_take_their_places(generator, folder):
    one, three = (image(folder, name) for name in ("one", "three"))
    read = generator.prompts.read
    tokens, images = read("aubuc", [one, three])
    assert tokens == [0, *[U] * FEATURES["one"], 1, *[U] * FEATURES["three"], 2]
    assert [one.grid for one in images] == [(1, 4, 6), (1, 16, 16)]
    # A text without placeholders is a user's message.
    assert read("bc", [one])[0] == [*[U] * FEATURES["one"], 1, 2, 0]
    parts = [{"type": "text", "text": "b"}, {"type": "image", "image": one}, {"type": "image"}]
    assert read([{"role": "user", "content": parts}], [three])[0] == [
        1,
        *[U] * (FEATURES["one"] + FEATURES["three"]),
        0,
    ]
    pixels = np.zeros((16, 24, 3), np.uint8)
    assert read("u", [pixels])[0] == [U] * FEATURES["one"]


def test_replies_depend_on_the_images_alone(generator, folder):
    prompts, images = ["aub", "ab", "uauc", "ubu"], [["two"], [], ["one", "two"], ["one", "one"]]
    files = [[image(folder, name) for name in own] for own in images]
    found = generator.generate(prompts, images=files, max_tokens=8)
    for prompt, own, reply in zip(prompts, files, found, strict=True):
        assert generator.generate([prompt], images=[own], max_tokens=8) == [reply]
    other = generator.generate(["aub"], images=[[255 * np.ones((33, 20, 3), np.uint8)]], max_tokens=8)
    assert other != found[:1]  # of the same size, with other pixels


def test_no_program_is_compiled_for_images_of_other_sizes_and_numbers(generator, folder, caplog):
    rng = np.random.default_rng(1)
    generator.generate(["uc"], images=[[image(folder, "one")]], max_tokens=2)
    with jax.log_compiles():
        caplog.clear()
        for sizes in [[(20, 36)], [(16, 16), (30, 20)], [(18, 70), (40, 16), (16, 16)]]:
            images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
            generator.generate(["u" * len(images)], images=[images], max_tokens=2)
        assert "Compiling" not in caplog.text
        generator.generate(["u"], images=[[np.zeros((60, 60, 3), np.uint8)]], max_tokens=2)  # another bucket of tokens
        assert "Compiling" in caplog.text


def test_files_of_prompts_have_images(generator, folder, tmp_path):
    file, out = folder / "prompts.jsonl", tmp_path / "out.jsonl"
    parts = [{"type": "image", "image": "two.png"}, {"type": "text", "text": "b"}]
    lines = [
        {"prompt": "bc", "images": ["one.png"]}, {"prompt": "ab"}, {"messages": [{"role": "user", "content": parts}]},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    prompts = read_prompts(file)
    assert reply_to_file(generator, prompts, out, max_tokens=4) == 3
    written = out.read_text().splitlines(keepends=True)
    texts = {json.loads(line)["line"]: json.loads(line)["text"] for line in written}
    expected = [("ubca", ["one"]), ("ab", []), ("uba", ["two"])]
    for n, (text, names) in enumerate(expected):
        (reply,) = generator.generate([text], images=[[image(folder, name) for name in names]], max_tokens=4)
        assert reply.text == texts[n]
    out.write_text(written[0])
    assert reply_to_file(generator, prompts, out, max_tokens=4) == 2
    assert sorted(out.read_text().splitlines(keepends=True)) == sorted(written)
    chat = read_prompts(file, chat=True)[0]
    assert generator.encode(chat.prompt, chat.images) == generator.encode("bc", chat.images)
    file.write_text(json.dumps({"prompt": "a", "images": "one.png"}))
    with pytest.raises(ConfigError, match="\"images\" is 'one.png'; it must be a list"):
        read_prompts(file)


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(folder, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "pretrained.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    (block,) = [textwrap.dedent(one) for one in blocks if "generator.generate(prompts, images=" in one]
    (tmp_path / "Qwen2.5-VL-3B-Instruct").symlink_to(folder)
    for name, source in {"cat.png": "one.png", "dog.png": "three.png"}.items():
        (tmp_path / name).symlink_to(folder / source)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_the_command_takes_images(generator, folder, capsys):
    one, three = (image(folder, name) for name in ("one", "three"))
    (reply,) = generator.generate(["bc"], images=[[one, three]], max_tokens=5)
    given = ["--image", one, "--image", three, "--prompt", "bc", "--tokens", "5", "--plan", "fsdp:4 tp:2"]
    assert main(["generate", str(folder), *given]) == 0
    assert capsys.readouterr().out == f"{reply.text}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "none.png"], "there is no file 'none.png'"),
        (["--image", "{folder}/config.json"], "config.json' cannot be read as an image"),
        (["--image", "{folder}/cut.png"], "cut.png' cannot be read: .*damaged or truncated"),
        (["--image", "{folder}/one.png", "--prompt", "uu"], "has 2 placeholders u and 1 image: give one"),
        (["--prompt", "u"], "has 1 placeholder u and 0 images"),
        (["--image", "{folder}/three.png", "--length", "40"], r"66 tokens \(64 of them for images\), more than the 40"),
        (["--image", "{folder}/one.png", "--file", "x", "--out", "y"], "--image and --file exclude each other"),
    ],
)
def test_wrong_images_are_one_error(folder, capsys, options, message):
    (folder / "cut.png").write_bytes((folder / "three.png").read_bytes()[:500])
    assert main(["generate", str(folder), *[one.format(folder=folder) for one in options]]) == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(capsys.readouterr().err)


def test_a_reader_that_orders_patches_in_another_way_is_refused(folder, tmp_path):
    own = make_image_folder(tmp_path / "own")
    file = own / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "merge_size": 4}))
    with pytest.raises(ConfigError, match="has a merge_size of 4, but the model merges 2 x 2 patches"):
        load_generator(own, rows=1, mesh={"x": 1}, check=lambda reader: reader.read("a", [image(folder, "one")]))


def test_images_for_a_model_of_text(folder, tmp_path):
    text = load_generator(make_text_folder(tmp_path / "text"), rows=1, mesh={"x": 1})
    with pytest.raises(ConfigError, match="has 1 image, but the model reads text alone"):
        text.generate(["ab"], images=[[image(folder, "one")]])


def test_prompts_that_cannot_be_read_are_named_together(generator, folder):
    with pytest.raises(ConfigError, match="(?s)prompt 0: there is no file.*prompt 2: the prompt has 2 placeholders"):
        generator.generate(["a", "b", "uu"], images=[["none.png"], [], [image(folder, "one")]])
    with pytest.raises(ConfigError, match="images has 1 lists for 2 prompts"):
        generator.generate(["a", "b"], images=[[]])
    with pytest.raises(ConfigError, match="has 'url': download it"):
        generator.encode([{"role": "user", "content": [{"type": "image", "url": "https://x"}]}])
    with pytest.raises(ConfigError, match="more images than the 0 that are given"):
        generator.encode([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(AutoshardError, match="no chat template: give the prompt as text, with u in the place"):
        import dataclasses

        dataclasses.replace(generator.prompts, chat=None).read("a", [image(folder, "one")])
