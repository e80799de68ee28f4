"""Decoders that were made here: transformers loads what `save_pretrained` writes, and computes the same logits."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from flax import nnx

from autoshard.models import save_pretrained
from autoshard.models.decoder import Decoder
from tests.models.pretrained.fresh.test_fitting_family import CONFIGS
from tests.parity.pretrained.reference import SEQ

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_a_saved_decoder(name, tmp_path, caplog):
    import torch
    import transformers

    cfg = dataclasses.replace(CONFIGS[name], init_std=0.1)  # small errors show
    model = Decoder(cfg, rngs=nnx.Rngs(0))
    _move_constants(model)
    save_pretrained(model, tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, notes = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", attn_implementation="eager", output_loading_info=True
        )
    assert not any(notes.values()) and not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    tokens = np.random.default_rng(3).integers(0, cfg.vocab, (2, SEQ))
    with torch.no_grad():
        expected = found.eval()(input_ids=torch.asarray(tokens)).logits.numpy()
    np.testing.assert_allclose(model(tokens), expected, atol=1e-4, rtol=1e-4)


def _move_constants(model):
    """Add noise to scales, biases and sinks: they start from constants, with which errors would not show."""
    state = nnx.state(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    nnx.update(model, jax.tree.unflatten(tree, noisy))
