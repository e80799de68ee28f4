"""Published quantized tensors: codes of a few bits and scales of blocks, read as plain values and written back."""

from autoshard.models.pretrained.quantized.schemes import Scheme, scheme_of

__all__ = ["Scheme", "scheme_of"]
