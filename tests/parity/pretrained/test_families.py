"""Every pretrained family against transformers: logits, loss, every gradient, export, and the same under plans."""

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
from tests.parity.pretrained.configs import CONFIGS
from tests.parity.pretrained.reference import SEQ, batch, make_reference

pytestmark = pytest.mark.parity

LOGITS, GRADIENTS = 1e-4, 1e-4
UNTRAINED = ("correction_bias", "layer_scalar")  # stored values that have no gradient


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    return make_reference(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def model(reference):
    return load_pretrained(reference.folder, plan="fsdp:8", batch=(8, 64), remat="full")


def logits_of(model, tokens, **arguments):
    graph, params = nnx.split(model)
    run = jax.jit(lambda params, tokens, given: nnx.merge(graph, params)(tokens, **given))
    return np.asarray(run(params, jnp.asarray(tokens, jnp.int32), {k: jnp.asarray(v) for k, v in arguments.items()}))


def loss_of(graph, params, inputs, targets):
    total, count = nnx.merge(graph, params).loss({"inputs": inputs, "targets": targets})
    return total / count


def gradients_as_stored(model, gradients, folder):
    """Returns gradients by the names of the folder's tensors."""
    graph, _ = nnx.split(model)
    save_pretrained(nnx.merge(graph, gradients), folder)
    return load_file(folder / "model.safetensors")


def assert_gradients_equal(found, expected):
    for name, gradient in found.items():
        if any(part in name for part in UNTRAINED):
            assert not gradient.any()
            continue
        error, size = (float(np.linalg.norm(x)) for x in (gradient - expected[name], expected[name]))
        assert error <= GRADIENTS * size, f"{name}: {error} of {size}"  # an expert that no token chose has zeros


def test_logits_of_every_position(reference, model):
    inputs, _ = batch()
    assert np.abs(logits_of(model, inputs) - reference.logits(inputs)).max() < LOGITS


@pytest.mark.few(8)
def test_padded_and_packed_rows(reference, model):
    inputs, _ = batch()
    ends = (130, 350, SEQ)
    documents = np.split(inputs[0], ends[:-1])
    packed = np.concatenate([np.full(len(d), n) for n, d in enumerate(documents)])
    padded = (np.arange(SEQ) < 200).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(len(d)) for d in documents]), np.arange(SEQ)])
    found = logits_of(model, inputs, positions=positions, segment_ids=np.stack([packed, padded]).astype(np.int32))
    expected = np.concatenate([reference.logits(d[None])[0] for d in documents])
    assert np.abs(found[0] - expected).max() < LOGITS
    whole = reference.logits(inputs[1:], attention_mask=padded[None].astype(np.int64))
    assert np.abs(found[1:] - whole)[:, padded == 1].max() < LOGITS


def test_loss_and_every_gradient(reference, model, tmp_path):
    graph, params = nnx.split(model)
    loss, gradients = jax.jit(jax.value_and_grad(partial(loss_of, graph)))(params, *map(jnp.asarray, batch()))
    expected_loss, expected = reference.loss_and_gradients
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    stored = gradients_as_stored(model, gradients, tmp_path / "gradients")
    assert {name for name in stored if not any(part in name for part in UNTRAINED)} == set(expected)
    assert_gradients_equal(stored, expected)


def test_export_is_the_same_bytes_and_loads_without_a_word(reference, model, tmp_path):
    import transformers

    save_pretrained(model, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (reference.folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert all(before[name].shape == after[name].shape for name in before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True, dtype="float32"
        )
    assert not any(report.values())


PLANS = {
    "llama3": ("fsdp:8", "tp:2 fsdp:4 seq", "cp:2 fsdp:4", "ring:2 dp:4"),
    "gemma2": ("fsdp:2 tp:4",),
    "qwen2": ("ulysses:2 fsdp:4",),
    "gemma3": ("fsdp:4 tp:2", "cp:4 dp:2"),
    "mixtral": ("ep:4 fsdp:2", "tp:2 ep:2 dp:2"),
    "gpt-oss": ("ep:4 fsdp:2", "fsdp:4 tp:2", "cp:2 dp:4"),
    "deepseek-v3": ("ep:8", "fsdp:4 tp:2"),
    "llama4": ("fsdp:8", "ep:4 fsdp:2", "tp:2 fsdp:4 seq", "cp:2 fsdp:4"),
    "gemma4": ("fsdp:8", "tp:2 fsdp:4 seq"),
    "gemma4-plain": ("fsdp:4 tp:2", "cp:2 dp:4"),
}
PIPELINES = {"llama3": ("pp:2 fsdp:4", "pp:2 tp:2 fsdp:2"), "mixtral": ("pp:2 fsdp:4", "pp:2 tp:2 dp:2")}


def assert_equal_under_plan(reference, words, folder, **options):
    """Checks the loss and every gradient of a planned step, and returns its plan."""
    expected_loss, expected = reference.loss_and_gradients
    inputs, targets = (jnp.asarray(np.concatenate([x] * 4)) for x in batch())  # the same mean over more rows
    model = load_pretrained(reference.folder, plan="dp:8", batch=(8, SEQ))
    graph, params = nnx.split(model)
    step = autoshard.auto_shard(jax.value_and_grad(partial(loss_of, graph)), plan=words, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        loss, gradients = step(params, inputs, targets)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5), words
    assert_gradients_equal(gradients_as_stored(model, gradients, folder), expected)
    return step.plan(params, inputs, targets)


@pytest.mark.parametrize("name", PLANS)
def test_loss_and_gradients_under_plans(name, tmp_path):
    reference = make_reference(name, tmp_path / "model")
    for words in PLANS[name]:
        assert_equal_under_plan(reference, words, tmp_path / words)


@pytest.mark.parametrize("name", PIPELINES)
def test_loss_and_gradients_of_pipelines(name, tmp_path):
    reference = make_reference(name, tmp_path / "model", num_hidden_layers=4)
    for words in PIPELINES[name]:
        plan = assert_equal_under_plan(reference, words, tmp_path / words, microbatches=2)
        assert (plan.stages, plan.microbatches) == (2, 2)
