"""ViT against transformers: logits, loss, every gradient, export, and the same under a plan."""

import warnings
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.models.pretrained import load_pretrained, save_pretrained

pytestmark = pytest.mark.parity

LOGITS, GRADIENTS = 1e-4, 1e-4
CLASSES, ROWS = 5, 8


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=24, patch_size=4,
        num_labels=CLASSES, initializer_range=0.1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.ViTForImageClassification(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start from constants: errors would not show
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("vit") / "model"
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def expected(reference):
    """Returns logits, loss and gradients of PyTorch."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model, batch = reference[0], a_batch()
    pixels = torch.asarray(np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2)))
    logits = model(pixel_values=pixels).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.asarray(batch["labels"]).long())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    stored = {name: x.numpy() for name, x in revert_weight_conversion(model, gradients).items()}
    return logits.detach().numpy(), float(loss.detach()), stored


def a_batch():
    rng = np.random.default_rng(1)
    images = rng.normal(size=(ROWS, 24, 24, 3)).astype("float32")
    return {"images": images, "labels": rng.integers(0, CLASSES, ROWS).astype("int32")}


def loss_of(graph, params, batch):
    total, count = nnx.merge(graph, params).loss(batch)
    return total / count


@pytest.mark.parametrize("scan", [True, False], ids=["stacked", "separate"])
def test_logits_loss_gradients_and_export(reference, expected, scan, tmp_path):
    import transformers

    logits, expected_loss, expected_gradients = expected
    model = load_pretrained(reference[1], plan="fsdp:8", batch=(ROWS, 1), scan_layers=scan)
    graph, params = nnx.split(model)
    found = jax.jit(lambda params, images: nnx.merge(graph, params)(images))(params, a_batch()["images"])
    assert np.abs(np.asarray(found) - logits).max() < LOGITS
    step = autoshard.auto_shard(jax.value_and_grad(partial(loss_of, graph)), plan="fsdp:4 tp:2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        loss, gradients = step(params, a_batch())
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    save_pretrained(nnx.merge(graph, gradients), tmp_path / "gradients")
    stored = load_file(tmp_path / "gradients/model.safetensors")
    assert set(stored) == set(expected_gradients)
    for name, gradient in stored.items():
        error, size = (
            float(np.linalg.norm(x)) for x in (gradient - expected_gradients[name], expected_gradients[name])
        )
        # A bias of keys adds the same to all scores of a query: its gradient is 0 but for rounding.
        assert error <= (1e-6 if name.endswith("key.bias") else GRADIENTS * size), f"{name}: {error} of {size}"
    save_pretrained(model, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (reference[1], tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = transformers.AutoModelForImageClassification.from_pretrained(
            tmp_path / "out", output_loading_info=True, dtype="float32"
        )
    assert not any(report.values())
