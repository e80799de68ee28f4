"""Families that read images against transformers: logits, loss, every gradient, export, generation, under plans."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.models.pretrained import load_pretrained, save_pretrained
from autoshard.models.pretrained.images import ImageReader
from autoshard.models.vision import pack_images, token_positions
from tests.parity.pretrained.vision_reference import CONFIGS, GRIDS, Reference, a_batch

pytestmark = pytest.mark.parity

LOGITS, GRADIENTS = 1e-4, 1e-4


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def model(reference):
    return load_pretrained(reference.folder, plan="fsdp:8", batch=(8, 64), remat="full")


def our_batch(cfg, patches=None):
    tokens, targets, images = a_batch()
    return {
        "inputs": tokens.astype("int32"),
        "targets": targets.astype("int32"),
        "positions": token_positions(tokens, GRIDS, cfg),
        "images": pack_images(tokens, images, cfg, patches=patches),
    }


def logits_of(model, batch):
    graph, params = nnx.split(model)
    run = jax.jit(
        lambda params, batch: nnx.merge(graph, params)(
            batch["inputs"], images=batch["images"], positions=batch["positions"]
        )
    )
    return np.asarray(run(params, batch))


def loss_of(graph, params, batch):
    total, count = nnx.merge(graph, params).loss(batch)
    return total / count


def assert_gradients_equal(model, gradients, expected, folder):
    save_pretrained(nnx.merge(nnx.graphdef(model), gradients), folder)
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(expected)
    for name, gradient in found.items():
        error, size = (float(np.linalg.norm(x)) for x in (gradient - expected[name], expected[name]))
        assert error <= GRADIENTS * size, f"{name}: {error} of {size}"


def test_logits_of_every_position_whatever_the_padding(reference, model):
    tokens, _, images = a_batch()
    expected = reference.logits(tokens, images)
    for patches in (None, 92 + 4):
        assert np.abs(logits_of(model, our_batch(model.cfg, patches)) - expected).max() < LOGITS


def test_loss_and_every_gradient(reference, model, tmp_path):
    graph, params = nnx.split(model)
    loss, gradients = jax.jit(jax.value_and_grad(partial(loss_of, graph)))(params, our_batch(model.cfg))
    expected_loss, expected = reference.loss_and_gradients()
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert_gradients_equal(model, gradients, expected, tmp_path / "gradients")


def test_export_is_the_same_bytes_and_loads_without_a_word(reference, model, tmp_path):
    import transformers

    save_pretrained(model, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (reference.folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path / "out", output_loading_info=True, dtype="float32"
        )
    assert not any(report.values())


def test_generated_tokens(reference, model):
    import torch

    tokens, _, images = a_batch()
    prompt, own, new = tokens[:1, :90], images[:1], 64
    with torch.no_grad():
        expected = reference.model.generate(
            **reference.inputs(prompt, own), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 90:].tolist()
    positions = token_positions(prompt, GRIDS[:1], model.cfg)
    images_ = pack_images(prompt, own, model.cfg)
    graph, params = nnx.split(model)

    @jax.jit
    def first(params, tokens, images, positions):
        model = nnx.merge(graph, params)
        return model.extend(tokens, model.cache(1, 160), images=images, positions=positions, fresh=True, last=True)

    @jax.jit
    def following(params, token, cache):
        return nnx.merge(graph, params).extend(token, cache)

    logits, cache = first(params, jnp.asarray(prompt, jnp.int32), images_, positions)
    found = []
    for _ in range(new):
        found.append(int(jnp.argmax(logits[0, -1])))
        logits, cache = following(params, jnp.full((1, 1), found[-1], jnp.int32), cache)
    assert found == expected


@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:4 tp:2"])
def test_loss_and_gradients_under_plans(words, tmp_path):
    reference = Reference("qwen2.5-vl", tmp_path / "model")
    expected_loss, expected = reference.loss_and_gradients()
    model = load_pretrained(reference.folder, plan="dp:8", batch=(8, 64))
    batch = jax.tree.map(lambda x: np.concatenate([x] * 4), our_batch(model.cfg))
    step = autoshard.auto_shard(jax.value_and_grad(partial(loss_of, nnx.graphdef(model))), plan=words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        loss, gradients = step(nnx.state(model), batch)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert_gradients_equal(model, gradients, expected, tmp_path / "gradients")


@pytest.mark.parametrize("size", [(40, 60), (200, 333), (31, 900), (5, 9), (700, 500)])
def test_patches_of_images(size, tmp_path):
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 32 * 32, "longest_edge": 320 * 320})
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = processor(images=[pixels], return_tensors="np")
    found, grid = ImageReader.of(tmp_path)(pixels)
    assert list(grid) == expected["image_grid_thw"][0].tolist()
    assert np.abs(found - expected["pixel_values"]).max() < 1e-5
