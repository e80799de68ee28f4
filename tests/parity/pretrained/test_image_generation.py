"""Prompts with images against transformers: 64 greedy tokens from image files, in one batch and under a plan."""

import json

import numpy as np
import pytest

from autoshard.serve import load_generator
from tests.parity.pretrained.vision_reference import CONFIGS, IMAGE, START, VOCAB, Reference

pytestmark = pytest.mark.parity

NEW = 64
LETTERS = [chr(code) for code in range(33, 33 + VOCAB - 4)]
PAD, BEGIN, VIDEO, END = "<|image_pad|>", "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
SIZES = {"one": (40, 60), "wide": (33, 120), "tall": (90, 20), "large": (150, 130)}
# Prompts with several numbers of images of several sizes, and one without.
PROMPTS = [("what", ("one",)), ("compare", ("large", "wide")), ("hello", ()), ("all", ("tall", "one", "wide"))]


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    """A model with a tokenizer, a chat template, and the config of a processor."""
    from PIL import Image
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2VLImageProcessorPil

    folder = tmp_path_factory.mktemp(request.param) / "model"
    made = Reference(request.param, folder, spread=4.0)
    words = {letter: n for n, letter in enumerate([*LETTERS, PAD, VIDEO, BEGIN, END])}
    assert (words[PAD], words[BEGIN]) == (IMAGE, START)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, VIDEO, BEGIN, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 96 * 96})
    processor.save_pretrained(folder)
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return made, processor


def expected_of(made, processor, prompt, names):
    """Returns transformers' greedy tokens."""
    import torch
    from PIL import Image
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(made.folder / "tokenizer.json"), chat_template=TEMPLATE)
    content = [*[{"type": "image"}] * len(names), {"type": "text", "text": prompt}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    given = {}
    if names:
        images = processor(images=[Image.open(made.folder / f"{name}.png") for name in names], return_tensors="pt")
        given = {"pixel_values": images["pixel_values"], "image_grid_thw": images["image_grid_thw"]}
        pieces = text.split(PAD)
        counts = [int(np.prod(grid)) // 4 for grid in images["image_grid_thw"].tolist()]
        text = "".join(piece + PAD * count for piece, count in zip(pieces, [*counts, 0], strict=True))
    ids = torch.asarray([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        out = made.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == IMAGE).int(),
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **given,
        )  # fmt: skip
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def expected(reference):
    found = [expected_of(*reference, *prompt) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 8 for tokens in found), found  # a model that repeats itself would hide errors
    return found


def tokens_of(generator, folder):
    texts = [[{"role": "user", "content": text}] if not names else text for text, names in PROMPTS]
    images = [[folder / f"{name}.png" for name in names] for _, names in PROMPTS]
    return [one.tokens for one in generator.generate(texts, images=images, max_tokens=NEW)]


def test_ragged_prompts_with_several_images(reference, expected):
    folder = reference[0].folder
    assert tokens_of(load_generator(folder, rows=3, length=640, plan="dp:1", target="cpu:1"), folder) == expected


def test_under_a_plan_that_shards_the_tower(reference, expected):
    folder = reference[0].folder
    generator = load_generator(folder, rows=4, length=640, plan="fsdp:4 tp:2")
    tower = generator.engine.model.vision.segments[0]
    tower = tower if hasattr(tower, "layers") else tower[0]
    assert "tp" in str(tower.layers[0].attention.wq[...].sharding.spec)
    assert tokens_of(generator, folder) == expected
