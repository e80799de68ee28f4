"""Values of a `config.json` that folders spell in several ways or leave out: the same logits as transformers."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from autoshard.models.pretrained import load_pretrained
from tests.parity.pretrained.configs import CONFIGS
from tests.parity.pretrained.reference import Reference, batch, randomized

pytestmark = pytest.mark.parity

LOGITS = 1e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROTARY = ("rope_parameters",)
# For each row: the config, the keys that its file lacks, and the values that it has besides.
ROWS = {
    "yarn with magnitudes": ("llama2", ROTARY, {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "yarn with a factor of attention": ("llama2", ROTARY, {"rope_scaling": {**YARN, "attention_factor": 1.4}}),
    "linear in the spelling of old folders": (
        "qwen3", ROTARY, {"rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "original context beside the table": (
        "mistral", ROTARY, {"rope_scaling": YARN, "original_max_position_embeddings": 128},
    ),
    "mixtral without rotary keys": ("mixtral", ROTARY, {}),
    "gpt-oss without rotary keys": ("gpt-oss", ROTARY, {}),
    "gpt-oss with a base alone": ("gpt-oss", ROTARY, {"rope_theta": 3e3}),
    "gemma2 without caps": ("gemma2", ("final_logit_softcapping", "attn_logit_softcapping"), {}),
    "deepseek without a factor of experts": ("deepseek-v3", ("routed_scaling_factor",), {}),
    "qwen3-moe with windows": (
        "qwen3-moe", (), {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    ),
    "gemma3 with old rotary keys": (
        "gemma3",
        ROTARY,
        {"rope_theta": 5e4, "rope_local_base_freq": 3e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "heads that do not divide the width": ("qwen2", (), {"head_dim": 12}),
}  # fmt: skip


def made(name, without, changes, folder):
    """Makes a random model for the content of a `config.json`, and its folder with that content."""
    import transformers

    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**arguments)
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    config.save_pretrained(folder)
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes, "architectures": [architecture]}
    text = json.dumps({key: value for key, value in values.items() if key not in without})
    file.write_text(text)
    model = randomized(transformers.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    file.write_text(text)  # transformers has written it in its own spelling
    return Reference(model, folder)


@pytest.mark.parametrize("row", ROWS)
def test_logits(row, tmp_path):
    reference, (inputs, _) = made(*ROWS[row], tmp_path), batch(rows=1)
    graph, params = nnx.split(load_pretrained(tmp_path, plan="dp:8", batch=(8, 64)))
    found = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))(params, inputs.astype(np.int32))
    assert np.abs(np.asarray(found) - reference.logits(inputs)).max() < LOGITS
