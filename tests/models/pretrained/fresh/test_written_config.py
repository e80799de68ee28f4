"""Models that changed after they were loaded: `config.json` says what the tensors are, or nothing is written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from autoshard.errors import AutoshardError
from autoshard.models import save_pretrained
from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.pretrained.fresh import fresh_origin

CONFIG = DecoderConfig(
    kinds=(LayerKind(),) * 2, vocab=24, width=16, heads=4, kv_heads=2, head_dim=4, ffn=32, context=64
)  # fmt: skip


def loaded(**changes):
    """A model as `load_pretrained` returns it, with changes of its config."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    model.origin = fresh_origin(model)
    model.cfg = dataclasses.replace(CONFIG, **changes)
    return model


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_resized_vocabulary_needs_its_config(tmp_path):
    model = loaded()
    model.embed, model.head = nnx.Param(jnp.ones((32, 16))), nnx.Param(jnp.ones((16, 32)))
    with pytest.raises(AutoshardError, match=r"embed: the model has \[32, 16\], its config says \[24, 16\]"):
        save_pretrained(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    model.cfg = dataclasses.replace(CONFIG, vocab=32)
    save_pretrained(model, tmp_path / "model")
    assert config_of(tmp_path / "model")["vocab_size"] == 32
    assert load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"].shape == (32, 16)


def test_a_changed_config_is_written(tmp_path):
    save_pretrained(loaded(norm_eps=1e-3, activation="gelu"), tmp_path / "model")
    assert config_of(tmp_path / "model")["rms_norm_eps"] == 1e-3
    assert config_of(tmp_path / "model")["hidden_act"] == "gelu"


def test_fields_of_training_are_those_of_the_folder(tmp_path):
    save_pretrained(loaded(context=32, remat="full", init_std=0.5), tmp_path / "model")
    assert config_of(tmp_path / "model")["max_position_embeddings"] == 64
    assert config_of(tmp_path / "model")["initializer_range"] == 0.02


def test_a_change_that_the_family_does_not_have_is_refused(tmp_path):
    with pytest.raises(AutoshardError, match="embed_scale is 1.0, here 2.0. Give the model the config"):
        save_pretrained(loaded(embed_scale=2.0), tmp_path / "model")


def test_parameters_on_the_host(tmp_path):
    model = loaded()
    graph, state = nnx.split(model)
    save_pretrained(model, tmp_path / "devices")
    save_pretrained(nnx.merge(graph, jax.tree.map(np.asarray, state)), tmp_path / "host")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("devices", "host")]
    assert files[0] == files[1]


def test_wrong_parameters_are_refused(tmp_path):
    model = loaded()
    graph, state = nnx.split(model)
    with pytest.raises(AutoshardError, match="embed: it has a shape, but no values"):
        save_pretrained(nnx.merge(graph, jax.eval_shape(lambda: state)), tmp_path / "model")
    setattr(model, "extra", nnx.Param(jnp.ones(3)))  # noqa: B010  # no attribute of the class
    model.head = None
    with pytest.raises(AutoshardError) as caught:
        save_pretrained(model, tmp_path / "model")
    assert "head: the model has no such parameter" in str(caught.value)
    assert "extra: no llama model has such a parameter" in str(caught.value)
