"""The loss that balances the load of experts, and every gradient with it, against transformers."""

import jax
import numpy as np
import pytest
from flax import nnx

from autoshard.models.pretrained import load_pretrained
from tests.parity.pretrained.configs import CONFIGS
from tests.parity.pretrained.reference import batch, make_reference
from tests.parity.pretrained.test_families import assert_gradients_equal, gradients_as_stored

pytestmark = pytest.mark.parity

COEFFICIENT = 0.5  # large, so that the loss and its gradients show it


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_loss_and_gradients(name, tmp_path, monkeypatch):
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    kind, arguments = CONFIGS[name]
    own = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    monkeypatch.setitem(CONFIGS, name, (kind, {**arguments, **own}))
    reference = make_reference(name, tmp_path / "model")
    inputs, targets = batch()
    result = reference.model(
        input_ids=torch.asarray(inputs), labels=torch.asarray(targets), shift_labels=torch.asarray(targets)
    )
    assert float(result.aux_loss) > 0.1
    result.loss.backward()
    gradients = {path: p.grad for path, p in reference.model.named_parameters() if p.grad is not None}
    expected = {path: x.numpy() for path, x in revert_weight_conversion(reference.model, gradients).items()}

    model = load_pretrained(reference.folder, plan="fsdp:8", batch=(8, 64), remat="full")
    graph, params = nnx.split(model)

    def loss(params):
        total, count = nnx.merge(graph, params).loss({"inputs": inputs, "targets": targets})
        return total / count

    found, gradients = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found, float(result.loss.detach()), rtol=1e-5)
    total, count = nnx.merge(graph, params).loss({"inputs": inputs, "targets": targets}, deterministic=True)
    np.testing.assert_allclose(found - total / count, COEFFICIENT * float(result.aux_loss.detach()), rtol=1e-4)
    assert_gradients_equal(gradients_as_stored(model, gradients, tmp_path / "gradients"), expected)
