"""Keeps the `config.json` of a saved model true when its config or its parameters changed after it was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from autoshard._columns import listing
from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.fresh.comparison import RUNTIME, TRAINING, misfits, some_of
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.models.pretrained.quantized.kept_codes import is_of_codes


def written_config(family: Family, cfg: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json` for a model with this config.

    Args:
        family: the family.
        cfg: the model's config.
        values: the content that the model was loaded with. Keys of changed fields get new values; others are kept.

    Raises:
        AutoshardError: the family does not have, or does not write, a model with this config.
    """
    ignored = (*RUNTIME, *TRAINING)
    if not isinstance(cfg, DecoderConfig) or not (found := misfits(family, cfg, values, ignored)):
        return dict(values)
    if family.values is not None:
        before, after = (family.values(one) for one in (family.config(Config(values, "config.json")), cfg))
        kept = {"max_position_embeddings", "router_aux_loss_coef", "output_router_logits", "initializer_range"}
        changed = {key: x for key, x in after.items() if x != before.get(key) and key not in kept}
        if not (found := misfits(family, cfg, {**values, **changed}, ignored)):
            return {**values, **changed}
    raise AutoshardError(
        f"save_pretrained: the model's config was changed, and no config.json of the family {family.name!r} says so: "
        f"there, {some_of(found)}. Give the model the config that it was loaded with"
    )


def check_parameters(family: Family, cfg: Any, parameters: Mapping[str, Any]) -> None:
    """Compare the parameters of a model with those that its config describes.

    Args:
        family: the family.
        cfg: the model's config.
        parameters: the parameters, by path.

    Raises:
        AutoshardError: some have other shapes, are missing or unexpected, or have no values.
    """
    wanted = parameters_of(nnx.eval_shape(lambda: family.model(cfg, rngs=nnx.Rngs(0))))
    coded = {path for path in parameters if is_of_codes(path, parameters)}
    stems = {path.rpartition("/")[0] for path in coded}
    wrong = [
        f"{path}: the model has {list(parameters[path].shape)}, its config says {list(leaf.shape)}"
        for path, leaf in wanted.items()
        if path in parameters and parameters[path].shape != leaf.shape
    ]
    wrong += [f"{path}: the model has no such parameter" for path in wanted.keys() - parameters.keys() - stems]
    wrong += [
        f"{path}: no {family.name} model has such a parameter" for path in parameters.keys() - wanted.keys() - coded
    ]
    wrong += [f"{path}: it has a shape, but no values" for path, x in parameters.items() if not hasattr(x, "__array__")]
    if wrong:
        raise AutoshardError(f"save_pretrained: the parameters are not those of the model's config:\n{listing(wrong)}")
