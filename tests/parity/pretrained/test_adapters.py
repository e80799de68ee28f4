"""Adapters against PEFT: its files load here, ours load there, and logits and gradients are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from autoshard.models.adapters import load_adapter, save_adapter
from autoshard.models.pretrained import load_pretrained
from tests.parity.pretrained.configs import VOCAB
from tests.parity.pretrained.reference import SEQ, batch, make_reference

pytestmark = pytest.mark.parity

BAR = 1e-4  # of logits, absolute, and of gradients, relative; as in test_families
MODULES = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_adapters_go_both_ways(kind, tmp_path):
    import peft
    import torch
    import transformers

    reference = make_reference("llama3", tmp_path / "model")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=MODULES, use_rslora=kind == "rslora", use_dora=kind == "dora"
    )
    theirs = peft.get_peft_model(reference.model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_pretrained(reference.folder, plan="dp:8")
    lora = load_adapter(model, tmp_path / "theirs")
    save_adapter(model, tmp_path / "ours", lora, base=str(reference.folder))
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)

    inputs, targets = batch()
    logits = theirs(input_ids=torch.asarray(inputs)).logits.float()
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.asarray(targets).reshape(-1)).backward()
    graph, params = nnx.split(model)

    def loss(params):
        total, count = nnx.merge(graph, params).loss({"inputs": jnp.asarray(inputs), "targets": jnp.asarray(targets)})
        return total / count

    found = jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(inputs)))(params)
    np.testing.assert_allclose(found, logits.detach().numpy(), atol=BAR)
    gradients = jax.jit(jax.grad(loss))(params)
    save_adapter(nnx.merge(graph, gradients), tmp_path / "gradients", lora)
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    wanted = {
        name.replace(".default.weight", "" if "magnitude" in name else ".weight"): parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    assert ours.keys() == wanted.keys()
    for name, want in wanted.items():
        error, size = (float(np.linalg.norm(x)) for x in (ours[name] - want, want))
        assert error <= BAR * size, f"{name}: {error} of {size}"

    plain = transformers.AutoModelForCausalLM.from_pretrained(reference.folder).float().eval()
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    with torch.no_grad():
        again = loaded(input_ids=torch.asarray(inputs)).logits.float().numpy()
    np.testing.assert_allclose(again, logits.detach().numpy(), atol=BAR)
    assert inputs.shape[1] == SEQ
