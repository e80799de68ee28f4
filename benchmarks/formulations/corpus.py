"""All programs of the corpus, by name."""

from __future__ import annotations

from collections.abc import Mapping

from formulations import (
    adapters,
    bert,
    block_optimizer,
    contrastive,
    diffusion,
    gemma,
    gpt,
    graph_network,
    linear_attention,
    llama,
    one_hot_experts,
    parallel_blocks,
    preconditioned,
    recommender,
    reinforcement,
    residual_network,
    resnet,
    shared_experts,
    sorted_experts,
    state_space,
    translation,
    unet,
)
from formulations.formulation import Formulation

_MODULES = (
    llama,
    gpt,
    gemma,
    parallel_blocks,
    bert,
    translation,
    one_hot_experts,
    shared_experts,
    sorted_experts,
    residual_network,
    resnet,
    unet,
    state_space,
    linear_attention,
    diffusion,
    graph_network,
    recommender,
    reinforcement,
    contrastive,
    adapters,
    block_optimizer,
    preconditioned,
)

CORPUS: Mapping[str, Formulation] = {each.name: each for module in _MODULES for each in module.FORMULATIONS}
