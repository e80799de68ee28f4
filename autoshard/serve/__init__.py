"""Text from pretrained decoders: planned prefill and decode steps, and rows that take the next prompt when one ends."""

from autoshard.serve.engine import Completion, Engine, Request
from autoshard.serve.generator import Generator, Reply, load_generator
from autoshard.serve.sampling import Sampling

__all__ = ["Completion", "Engine", "Generator", "Reply", "Request", "Sampling", "load_generator"]
