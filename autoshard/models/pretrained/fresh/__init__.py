"""The family and the `config.json` of a model that was made here, or changed since it was loaded."""

from autoshard.models.pretrained.fresh.fitting_family import fresh_origin
from autoshard.models.pretrained.fresh.written_config import check_parameters, written_config

__all__ = ["check_parameters", "fresh_origin", "written_config"]
