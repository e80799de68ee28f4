"""What a recipe has and our workloads have not yet, and what is planned in its place. Each case is reported as a note.

This is the one place to change when the models gain kernels, values with actions, or products in fp8: each function
maps one field of a recipe to changes of a workload's config, and says in a note what they leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_file import Recipe
from recipe_words import Remat


@dataclass(frozen=True)
class StandIn:
    """Changes of a workload's config, and a note if they are not all that the recipe has."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def remat(actions: Remat) -> StandIn:
    """The nearest remat policy: that which keeps most of the values that the recipe keeps, and no others.

    A value that the recipe keeps on the host is not kept, because the policies know the device only.
    """
    if not actions.recomputes:
        return StandIn({"remat": "none"})
    kept = set(actions.names("keep")) - {"residual"}
    if not kept and not actions.names("host"):
        return StandIn({"remat": "full"})
    # `dots` keeps the results of all projections.
    policy = "dots" if kept >= {"qkv", "out_proj", "mlp_in", "mlp_out"} else "full"
    exact = policy == "dots" and len(kept) == 4 and not actions.names("host")
    return StandIn({"remat": policy}, "" if exact else f"remat '{actions}' is planned as '{policy}'")


def attention(recipe: Recipe) -> StandIn:
    """The attention without a kernel."""
    return StandIn({"attention": "auto"}, f"attention: {recipe.attention or 'a flash kernel'} is planned as 'auto'")


def precision(recipe: Recipe) -> StandIn:
    """Products in bfloat16."""
    return StandIn({}, "" if recipe.precision == "bf16" else f"products in {recipe.precision} are planned in bf16")


def optimizer(recipe: Recipe, param_dtype: str) -> StandIn:
    """Moments in the dtype of the parameters."""
    if recipe.moment_dtype in (None, param_dtype):
        return StandIn()
    return StandIn({}, f"a first moment in {recipe.moment_dtype} is planned in {param_dtype}")


def embedding(recipe: Recipe) -> StandIn:
    """Tokens looked up by a gather."""
    return StandIn({}, "a one-hot embedding is planned as a gather" if recipe.one_hot_embedding else "")


def loss(recipe: Recipe) -> StandIn:
    """The loss over all tokens at once."""
    if (recipe.vocab_tiles or 1) == 1:
        return StandIn()
    return StandIn({}, f"a loss in {recipe.vocab_tiles} parts is planned as a whole")
