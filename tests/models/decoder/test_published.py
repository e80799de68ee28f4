"""The published sizes have the published numbers of parameters."""

import math

import jax
import pytest
from flax import nnx

from autoshard.models.decoder.decoder import Decoder
from autoshard.models.decoder.published import DECODERS

# Billions of parameters. gpt-oss: arXiv:2508.10925, table 1. DeepSeek-V3: arXiv:2412.19437, without the layer that
# predicts a second token. Qwen3: the names of the models in arXiv:2505.09388. Gemma 3: arXiv:2503.19786, table 1,
# embedding and other parameters. Llama 4 and Gemma 4: the models' cards. That of Gemma 4 2B counts 2.3 without the
# table of vectors for each token and layer, which is added here.
BILLIONS = {
    "gemma3-4b": (0.675 + 3.209, 0.01),
    "gemma3-12b": (1.012 + 10.759, 0.01),
    "gpt-oss-20b": (20.91, 0.01),
    "gpt-oss-120b": (116.83, 0.01),
    "qwen3-30b-a3b": (30.5, 0.1),
    "qwen3-235b-a22b": (235.0, 0.5),
    "deepseek-v3": (671.0, 0.5),
    "llama4-maverick-17b-128e": (400.0, 1.0),
    "gemma4-2b": (2.3 + 262_144 * 35 * 256 / 1e9, 0.05),
    "gemma4-31b": (30.7, 0.05),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DECODERS)
def test_parameters(name):
    model = nnx.eval_shape(lambda: Decoder(DECODERS[name], rngs=nnx.Rngs(0)))
    found = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param))) / 1e9
    expected, tolerance = BILLIONS[name]
    assert abs(found - expected) <= tolerance
