"""Text from pretrained models: planned prefill and decode steps, and rows that take the next prompt when one ends."""

from autoshard.serve.engine import Completion, Engine, Request
from autoshard.serve.generator import Generator, Reply, load_generator
from autoshard.serve.model import GenerativeModel
from autoshard.serve.prompts import PromptImage, PromptReader
from autoshard.serve.sampling import Sampling

__all__ = [
    "Completion",
    "Engine",
    "GenerativeModel",
    "Generator",
    "PromptImage",
    "PromptReader",
    "Reply",
    "Request",
    "Sampling",
    "load_generator",
]
