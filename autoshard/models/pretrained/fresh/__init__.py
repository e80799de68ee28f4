"""The family and the `config.json` of a model that was made here, not loaded from a folder."""

from autoshard.models.pretrained.fresh.fitting_family import fresh_origin

__all__ = ["fresh_origin"]
