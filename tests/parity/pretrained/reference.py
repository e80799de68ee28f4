"""Models of transformers in PyTorch: a folder of a tiny random one, its logits, loss and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.pretrained.configs import CONFIGS, VOCAB

SEQ = 520  # short rows hide errors of rotary positions


@dataclass
class Reference:
    """A model of transformers, and the folder that it was saved to."""

    model: Any
    folder: Path

    def logits(self, tokens: np.ndarray, **arguments: np.ndarray) -> np.ndarray:
        """Returns the logits of `[batch, seq]` tokens."""
        import torch

        with torch.no_grad():
            given = {name: torch.asarray(np.array(value)) for name, value in arguments.items()}
            return self.model(input_ids=torch.asarray(np.array(tokens)), **given).logits.float().numpy()

    @cached_property
    def loss_and_gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """The mean cross-entropy of `batch()`, and its gradient for each tensor of the folder."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        inputs, targets = batch()
        self.model.zero_grad()
        logits = self.model(input_ids=torch.asarray(inputs)).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.asarray(targets).reshape(-1))
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        stored = revert_weight_conversion(self.model, gradients)  # the names and shapes of the files
        return float(loss.detach()), {name: x.numpy() for name, x in stored.items()}


def batch(rows: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets, `[rows, SEQ]`."""
    rng = np.random.default_rng(3)
    return rng.integers(0, VOCAB, (rows, SEQ)), rng.integers(0, VOCAB, (rows, SEQ))


def make_reference(name: str, folder: Path, **changes: Any) -> Reference:
    """Makes a random model of a config, with changes of its arguments, and saves it."""
    import transformers

    kind, arguments = CONFIGS[name]
    model = randomized(getattr(transformers, kind)(**arguments | changes))
    model.save_pretrained(folder)
    return Reference(model, folder)


def randomized(config: Any) -> Any:
    """Makes a random model of a config."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        # Norm scales, biases and sinks start from constants, with which errors would not show.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        if (
            type(config).__name__ == "Gemma4TextConfig"
        ):  # its scores are not scaled down, so large queries would amplify rounding errors
            for path, parameter in model.named_parameters():
                if "q_norm" in path:
                    parameter.mul_(parameter.numel() ** -0.5)
        for path, buffer in model.named_buffers():
            if "correction_bias" in path:
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if "layer_scalar" in path:
                buffer.copy_(1.0 + 0.2 * torch.randn_like(buffer))
    return model
