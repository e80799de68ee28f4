"""All programs of the corpus, by name."""

from __future__ import annotations

from collections.abc import Mapping

from formulations import gpt, llama, one_hot_experts, residual_network
from formulations.formulation import Formulation

_MODULES = (llama, gpt, one_hot_experts, residual_network)

CORPUS: Mapping[str, Formulation] = {each.name: each for module in _MODULES for each in module.FORMULATIONS}
