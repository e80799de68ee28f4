"""A decoder that reads images, too: a vision tower, whose features take the place of image tokens."""

from autoshard.models.vision.config import TowerConfig, VisionLanguageConfig
from autoshard.models.vision.grids import ImageSlots, feature_count, pack_images, token_positions
from autoshard.models.vision.model import VisionLanguage
from autoshard.models.vision.tower import VisionTower

__all__ = [
    "ImageSlots",
    "TowerConfig",
    "VisionLanguage",
    "VisionLanguageConfig",
    "VisionTower",
    "feature_count",
    "pack_images",
    "token_positions",
]
