"""Text from pretrained decoders: planned prefill and decode steps, and rows that take the next prompt when one ends."""

from autoshard.serve.engine import Completion, Engine, Request
from autoshard.serve.sampling import Sampling

__all__ = ["Completion", "Engine", "Request", "Sampling"]
