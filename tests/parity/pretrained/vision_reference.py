"""Models of transformers that read images: a folder of a tiny random one, its logits, loss and gradients."""

from __future__ import annotations

import numpy as np

from tests.parity.pretrained.configs import SIZES, VOCAB
from tests.parity.pretrained.reference import SEQ

IMAGE, START = VOCAB - 4, VOCAB - 2
TEXT = {**SIZES, "bos_token_id": 0, "eos_token_id": 1, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
}}  # fmt: skip
VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "initializer_range": 0.1}
CONFIGS = {
    "qwen2-vl": ("Qwen2VLConfig", {**VISION, "embed_dim": 24, "hidden_size": 32}, False),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {
            **VISION, "hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        True,
    ),
}  # fmt: skip
# The grids of the images of two rows: several sizes and counts; heights and widths that windows of 4 do not divide.
GRIDS = [[(1, 6, 10), (1, 8, 4)], [(1, 14, 6)]]
MERGE = 2


def a_batch():
    """Returns tokens, targets `[2, SEQ]`, and the patches of each row's images."""
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(2, IMAGE, (2, SEQ)), rng.integers(2, IMAGE, (2, SEQ))
    images = [[(rng.normal(size=(h * w, 96)).astype("float32"), (t, h, w)) for t, h, w in row] for row in GRIDS]
    for row, grids in zip(tokens, GRIDS, strict=True):
        at = 7
        for _, height, width in grids:
            count = height * width // MERGE**2
            row[at], row[at + 1 : at + 1 + count] = START, IMAGE
            at += 1 + count + 40
    return tokens, targets, images


class Reference:
    """A random model of transformers, saved to a folder.

    With a larger `spread` of its weights, a model generates more kinds of tokens.
    """

    def __init__(self, name, folder, spread=1.0):
        import torch
        import transformers

        kind, vision, tied = CONFIGS[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(
            text_config=TEXT, vision_config=vision, image_token_id=IMAGE, video_token_id=VOCAB - 3,
            vision_start_token_id=START, vision_end_token_id=VOCAB - 1, tie_word_embeddings=tied,
        )  # fmt: skip
        made = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        self.model, self.folder = made.float().eval(), folder
        with torch.no_grad():
            for parameter in self.model.parameters():  # biases start from 0: errors would not show
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(spread)
        self.model.save_pretrained(folder)

    def inputs(self, tokens, images):
        import torch

        patches = np.concatenate([values for row in images for values, _ in row])
        return {
            "input_ids": torch.asarray(tokens),
            "pixel_values": torch.asarray(patches),
            "image_grid_thw": torch.asarray([grid for row in images for _, grid in row]),
            "mm_token_type_ids": torch.asarray((tokens == IMAGE).astype("int32")),
        }

    def logits(self, tokens, images):
        import torch

        with torch.no_grad():
            return self.model(**self.inputs(tokens, images)).logits.numpy()

    def loss_and_gradients(self):
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        tokens, targets, images = a_batch()
        self.model.zero_grad()
        logits = self.model(**self.inputs(tokens, images)).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.asarray(targets).reshape(-1))
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return float(loss.detach()), {
            name: x.numpy() for name, x in revert_weight_conversion(self.model, gradients).items()
        }
