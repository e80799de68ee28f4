"""Quantized folders against transformers, which dequantizes them on CPUs: every tensor bit for bit, and the logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.pretrained import load_pretrained, save_pretrained
from autoshard.models.pretrained.folder import Folder
from tests.models.pretrained.folders import tensors_of, write_tensors
from tests.models.pretrained.quantized.folders import random_fp8, random_mxfp4
from tests.parity.pretrained.configs import CONFIGS, VOCAB
from tests.parity.pretrained.reference import make_reference

pytestmark = pytest.mark.parity

BLOCK = 4  # divides all sizes: transformers refuses smaller blocks at the edges
SCHEMES = {
    "deepseek-v3": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
    },
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]},
}  # fmt: skip
SIZES = {"deepseek-v3": {}, "gpt-oss": {"intermediate_size": 32}}
NOT_QUANTIZED = ("mlp.gate.weight", "norm", "embed", "lm_head")


@pytest.fixture(params=SCHEMES)
def folder(request, tmp_path, monkeypatch):
    name = request.param
    kind, arguments = CONFIGS[name]
    monkeypatch.setitem(CONFIGS, name, (kind, {**arguments, **SIZES[name]}))
    folder = make_reference(name, tmp_path / "model").folder
    plain, found = tensors_of(folder, "bfloat16"), {}
    for seed, (tensor, values) in enumerate(plain.items()):
        if name == "gpt-oss" and tensor.endswith("_proj"):
            found[f"{tensor}_blocks"], found[f"{tensor}_scales"] = random_mxfp4(values.shape, seed)
        elif name != "gpt-oss" and values.ndim == 2 and not any(part in tensor for part in NOT_QUANTIZED):
            found[tensor], scales = random_fp8(values.shape, (BLOCK, BLOCK), seed)
            found[f"{tensor}_scale_inv"] = scales
        else:
            found[tensor] = values.astype("float32") if tensor.endswith("correction_bias") else values
    write_tensors(folder, found)
    config = json.loads((folder / "config.json").read_text())
    config = {**config, "dtype": "bfloat16", "quantization_config": SCHEMES[name]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_values_and_logits(folder):
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    state = reference.state_dict()
    read = {name: one.read() for name, one in Folder.open(folder).tensors().items()}
    compared = 0
    for name, values in read.items():
        if name in state:
            expected = state[name].float().numpy()
            assert np.array_equal(values.astype("bfloat16").astype("float32"), expected), name
            compared += 1
    experts = {name: x for name, x in state.items() if "experts." in name and name not in read}
    for name, fused in experts.items():  # transformers joins the experts of DeepSeek-V3
        for expert, values in enumerate(fused.float().numpy()):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            own = [read[f"{name.rsplit('.', 1)[0]}.{expert}.{part}.weight"] for part in parts]
            assert np.array_equal(np.concatenate(own).astype("bfloat16").astype("float32"), values), name
            compared += len(parts)
    assert compared == len(read)

    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 64))
    with torch.no_grad():
        expected = reference.float()(torch.asarray(tokens)).logits.numpy()
    model = load_pretrained(folder, plan="fsdp:8", batch=(8, 64), dtype="bfloat16", compute_dtype="float32")
    graph, params = nnx.split(model)
    found = jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(tokens, jnp.int32)))(params)
    assert np.abs(np.asarray(found) - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


def test_transformers_reads_what_is_written_back(folder, tmp_path):
    import torch
    import transformers

    save_pretrained(load_pretrained(folder, plan="fsdp:8", batch=(8, 64)), tmp_path / "out")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16).state_dict()
        for one in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
