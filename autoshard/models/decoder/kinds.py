"""The settings that may differ between the layers of a `Decoder`, and the settings of its experts."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from autoshard._shown import shown
from autoshard.models.decoder.positions.rotary import Rotary, Scaling
from autoshard.models.decoder.positions.temperature import Temperature


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Args:
        window: a position sees the `window` positions that end at its own; None means all earlier ones.
        rotary: its rotary positions; None means none.
        experts: whether experts take the place of the MLP.
        scope: what a position sees at most: its `document`, or its `region`, a part of the document such as a window
            of an image's patches.
        chunk: size of the chunks into which each document is divided, in positions. A position sees its own chunk only
            (Llama 4). None means that documents are not divided.
        unit_norm: whether each head's queries and keys are divided by their root mean square after they are rotated.
        temperature: factor of the queries that depends on the position; None for no factor.
        head_dim: size of one head; None means that of the config.
        kv_heads: key and value heads; None means those of the config.
        ffn: hidden size of the MLP; None means that of the config.
        keys_as_values: whether the values equal the keys before normalization and rotation (Gemma 4).
        lends: the name by which later layers borrow this layer's keys and values; empty if no layer borrows them. Only
            one layer of a model may lend under a name.
        borrows: the name of the keys and values that the layer borrows; empty if it computes its own.
    """

    window: int | None = None
    rotary: Rotary | None = Rotary()
    experts: bool = False
    scope: Literal["document", "region"] = "document"
    chunk: int | None = None
    unit_norm: bool = False
    temperature: Temperature | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    keys_as_values: bool = False
    lends: str = ""
    borrows: str = ""

    @property
    def reach(self) -> int | None:
        """The largest number of positions that a position sees, counted back from its own; None for no limit."""
        return min((each for each in (self.window, self.chunk) if each is not None), default=None)


@shown
@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer.

    Args:
        experts: number of experts.
        top_k: number of experts per token.
        ffn: hidden size of an expert.
        renormalize: whether the gates of a token's experts are scaled to sum to 1. Otherwise they are the router's
            scores.
        scoring: how scores follow from the router's logits: `softmax` over all experts, or `sigmoid` of each.
        groups: number of groups of experts; a token chooses among the experts of its `top_groups` best groups only.
        top_groups: see `groups`.
        group_best: the score of a group is the sum of this many of its best experts' scores.
        choice_bias: whether a bias of each expert is added to its score for the choice, not for the gate. It has no
            gradient (DeepSeek-V3, arXiv:2412.19437).
        scale: factor of the gates.
        shared_ffn: hidden size of an MLP that every token uses besides; 0 means none.
        bias: whether the router and the experts' products have biases.
        limit: the limit of gpt-oss's gated unit, or None for the plain one. It is
            `(clip(up, -limit, limit) + 1) * min(gate, limit) * sigmoid(alpha * min(gate, limit))`.
        alpha: see `limit`.
        gated_input: whether the gate of a token multiplies the expert's input instead of its output (Llama 4). It needs
            `top_k=1`.
    """

    experts: int
    top_k: int
    ffn: int
    renormalize: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    choice_bias: bool = False
    scale: float = 1.0
    shared_ffn: int = 0
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.702  # that of gpt-oss: x * sigmoid(1.702 x) is close to gelu(x)
    gated_input: bool = False


@shown
@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Attention whose keys and values are products of one small vector of each position (arXiv:2405.04434).

    Args:
        kv_rank: size of the vector that keys and values are made of.
        plain_dim: elements of each head of queries and keys that are not rotated.
        rotary_dim: elements that are rotated. All heads share those of the keys.
        value_dim: elements of each head of values.
        q_rank: size of the vector that queries are made of; None makes them of the layer's input.
    """

    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    q_rank: int | None = None


@shown
@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """Sizes of a table with a vector for each token and layer, besides the embedding (Gemma 4, as in Gemma 3n).

    Args:
        vocab: number of tokens in the table.
        width: size of a vector.
    """

    vocab: int
    width: int


def lending_problems(kinds: tuple[LayerKind, ...]) -> list[str]:
    """Return the problems with keys and values that layers lend to later layers."""
    problems, lent = [], {}
    for number, kind in enumerate(kinds):
        if kind.borrows:
            lender = lent.get(kind.borrows)
            if lender is None:
                problems.append(f"layer {number} borrows {kind.borrows!r}, but no layer before it lends that")
            elif (lender.head_dim, lender.kv_heads, lender.reach) != (kind.head_dim, kind.kv_heads, kind.reach):
                problems.append(
                    f"layer {number} borrows {kind.borrows!r} from a layer with other heads or another window"
                )
            if kind.lends or kind.keys_as_values:
                problems.append(f"layer {number} borrows keys and values, so it cannot lend them or use keys as values")
        if kind.lends:
            if kinds.count(kind) > 1 or kind.lends in lent:
                problems.append(f"several layers lend {kind.lends!r}; only one may")
            lent[kind.lends] = kind
    return problems


def kind_problems(kinds: tuple[LayerKind, ...], head_dim: int) -> list[str]:
    """Return the problems with kinds of layers.

    Args:
        kinds: the kind of each layer.
        head_dim: number of rotated elements of a head, unless the kind has its own size of heads.
    """
    problems = lending_problems(kinds)
    if any(kind.chunk or kind.temperature for kind in kinds) and any(k.rotary and k.rotary.sections for k in kinds):
        problems.append("chunks and temperatures are not built with rotary positions of several axes")
    for kind in dict.fromkeys(kinds):
        if kind.window is not None and kind.window < 1:
            problems.append(f"a layer's window is {kind.window}; it must be at least 1")
        if kind.chunk is not None and kind.chunk < 1:
            problems.append(f"a layer's chunk is {kind.chunk}; it must be at least 1")
        if kind.temperature is not None and kind.temperature.step < 1:
            problems.append(f"the step of a layer's temperature is {kind.temperature.step}; it must be at least 1")
        if kind.chunk is not None and kind.scope != "document":
            problems.append(f"a layer has chunk {kind.chunk} and scope {kind.scope!r}; chunks cut documents only")
        rotary, rotary_dims = kind.rotary, kind.head_dim or head_dim
        if rotary is None:
            continue
        if rotary_dims % 2:
            problems.append(
                f"{rotary_dims} elements of a head are rotated, but rotation needs pairs: make the number even"
            )
        if not 0 < rotary.fraction <= 1:
            problems.append(f"the rotary fraction is {rotary.fraction}; it must be above 0 and at most 1")
        if rotary.scaling not in get_args(Scaling):
            problems.append(f"scaling is {rotary.scaling!r}; choose one of {', '.join(get_args(Scaling))}")
        if not 1.0 < rotary.base < float("inf") or not rotary.factor > 0:
            problems.append(
                f"rotary base is {rotary.base} and factor {rotary.factor}; give a base above 1, a factor above 0"
            )
        if rotary.scaling in ("llama3", "yarn") and rotary.original_context < 1:
            problems.append(f"original_context is {rotary.original_context}; {rotary.scaling} needs at least 1")
        if rotary.sections and (min(rotary.sections) < 1 or 2 * sum(rotary.sections) != rotary_dims):
            problems.append(
                f"rotary sections are {rotary.sections}; each must be at least 1, and their sum {rotary_dims // 2}, "
                "half of the elements of a head that are rotated"
            )
        if rotary.restart and len(set(rotary.sections)) != 1:
            problems.append(f"rotary sections are {rotary.sections}; with restart, they must be equal")
    return problems


def expert_problems(cfg: ExpertsConfig) -> list[str]:
    """Return what is wrong with the experts."""
    small = {name: getattr(cfg, name) for name in ("experts", "top_k", "ffn") if getattr(cfg, name) < 1}
    problems = [f"experts: {name} is {size}; it must be at least 1" for name, size in small.items()]
    if not small and (cfg.groups < 1 or cfg.experts % cfg.groups):
        problems.append(f"groups is {cfg.groups}; it must divide the {cfg.experts} experts")
    elif not small and not 1 <= cfg.top_groups <= cfg.groups:
        problems.append(f"top_groups is {cfg.top_groups}; it must be from 1 to the number of groups, {cfg.groups}")
    elif not small and cfg.top_k > cfg.top_groups * (cfg.experts // cfg.groups):
        problems.append(f"top_k is {cfg.top_k}, but {cfg.top_groups} of {cfg.groups} groups have fewer experts")
    if cfg.gated_input and cfg.top_k != 1:
        problems.append(f"gated_input is True and top_k is {cfg.top_k}; gates of inputs are built for top_k=1 only")
    if cfg.top_k > cfg.experts:
        problems.append(f"top_k is {cfg.top_k}; it must be at most the number of experts, {cfg.experts}")
    return problems
