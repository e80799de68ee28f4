"""Pretrained models: folders as they come from the Hugging Face Hub, read onto shards and written back."""

from autoshard.models.pretrained.families import Family, known_families
from autoshard.models.pretrained.images import ImageReader
from autoshard.models.pretrained.load import load_pretrained, plan_pretrained
from autoshard.models.pretrained.save import save_pretrained
from autoshard.models.pretrained.tables import stored

__all__ = ["Family", "ImageReader", "known_families", "load_pretrained", "plan_pretrained", "save_pretrained", "stored"]
