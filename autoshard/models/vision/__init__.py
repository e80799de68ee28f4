"""A decoder that reads images, too: a vision tower, whose features take the place of image tokens."""

from autoshard.models.vision.config import TowerConfig, VisionLanguageConfig
from autoshard.models.vision.grids import feature_count, next_positions, pack_images, token_positions
from autoshard.models.vision.model import VisionLanguage
from autoshard.models.vision.tower import VisionTower

__all__ = [
    "TowerConfig",
    "VisionLanguage",
    "VisionLanguageConfig",
    "VisionTower",
    "feature_count",
    "next_positions",
    "pack_images",
    "token_positions",
]
