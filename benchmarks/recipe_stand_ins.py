"""Stand-ins for features of a recipe that our workloads lack. A note reports each one.

When the models gain a feature, only this module changes. Each function maps one field of a recipe to changes
of a workload's config, and says in a note what they leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from recipe_file import Recipe
from recipe_words import Remat

from autoshard.models.quantized import Quantization

QUANTIZED = tuple(name for name in get_args(Quantization) if name != "none")


@dataclass(frozen=True)
class StandIn:
    """Changes of a workload's config, and a note if they are not all that the recipe has."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def remat(actions: Remat) -> StandIn:
    """The recipe's values on the host and on the device, by name. Queries, keys and values have one name together."""
    if not actions.recomputes:
        return StandIn({"remat": "none"})
    groups, left_out = [], []
    for action in ("host", "keep"):
        names = [name for name in actions.names(action) if (action, name) != ("keep", "residual")]
        apart = [name for name in names if name in ("query", "key", "value")]
        left_out += apart
        if named := [name for name in names if name not in apart]:
            groups.append(f"{action}:{'+'.join(named)}")
    policy = " ".join(groups) or "full"
    if policy == "keep:qkv+out_proj+mlp_in+mlp_out":  # the results of all projections
        policy = "dots"
    return StandIn({"remat": policy}, f"{', '.join(left_out)} alone: recomputed" if left_out else "")


def attention(recipe: Recipe) -> StandIn:
    """The kernel of the platform."""
    return StandIn({"attention": "auto"})


def precision(recipe: Recipe, *, dropless: bool = False) -> StandIn:
    """Products of the layers in the recipe's precision; those of dropless experts, and of their model, in bf16."""
    if recipe.precision == "bf16":
        return StandIn()
    if recipe.precision in QUANTIZED and not dropless:
        return StandIn({"quantization": recipe.precision})
    return StandIn({}, f"products in {recipe.precision} are planned in bf16")


def embedding(recipe: Recipe) -> StandIn:
    """Tokens looked up by a gather."""
    return StandIn({}, "a one-hot embedding is planned as a gather" if recipe.one_hot_embedding else "")


def loss(recipe: Recipe) -> StandIn:
    """The loss, split over the vocabulary into as many parts as the recipe splits it over the tokens."""
    if (recipe.vocab_tiles or 1) == 1:
        return StandIn()
    note = f"a loss in {recipe.vocab_tiles} parts of the tokens is planned in as many parts of the vocabulary"
    return StandIn({"loss_chunks": recipe.vocab_tiles}, note)


def kernel_note(recipe: Recipe) -> str:
    """The recipe's own attention kernel and its block sizes; empty if the recipe does not say."""
    parts = [recipe.attention] if recipe.attention else []
    if recipe.attention_blocks:
        parts.append("blocks " + " ".join(f"{name}={size}" for name, size in recipe.attention_blocks.items()))
    if recipe.fused_backward:
        parts.append("one kernel for all gradients")
    if not parts:
        return ""
    return f"the recipe's attention: {', '.join(parts)}; planned: the planner's own kernel and blocks"
