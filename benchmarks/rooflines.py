"""Lower bounds of a style's step time and memory, without compilation.

Units: seconds, bytes, operations (2 for a multiply-add), of one device. n devices, t of them along tensor, e along
expert, g along fsdp, m microbatches, P parameters (P_e of them experts'), L layers, B tokens of a device's batch.

    compute   products of the traced step and what its kernels state, with recomputation / n / (0.95 peak)
    wire      bytes that a device must send, over all links at 0.9 of their bandwidth:
        fsdp      (g - 1) / g x Q x 2 bytes, for ZeRO-3 one gather forward and one backward in each microbatch and one
                  reduction a step, for ZeRO-2 and 1 one reduction and one gather a step, Q = P_e / (e t) + (P-P_e) / t
        data      2 (d - 1) / d x Q / g x 2 bytes once a step, over the d devices of data (for dense parameters also of
                  expert)
        tensor    (t - 1) / t x 2 bytes x B x width x 8 for each layer: two all-reduces forward and two backward
    time      max(compute, wire), as if communication were hidden completely
    memory    the stored state, and the residuals of each layer for the backward pass of one microbatch: its input
              (`full`), the results of its projections too (`dots`, `none`), and scores of plain attention (`none`).
              Of named values only the layer's input counts, if it is not on the host

No implementation sends or stores less, so pruning by these bounds never loses the best program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
from estimate import FLOPS_SHARE, find_target
from expert_plans import Case, Style
from links import LINK_SHARE

from autoshard.kernels.constants import BLOCKWISE_KEYS, KERNEL_KEYS
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.models.moe import MoEConfig
from autoshard.models.vit import ViTConfig
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import Workload
from autoshard.sharding.machines.device_mesh import traced_machine
from autoshard.spmdrules.custom_ops.kernel_cost import declared_costs
from autoshard.train.program.build import workload_step

HALF, WORD, MOMENTS = 2, 4, 8  # bytes: of 16 bits, of 32 bits, of both moments of a parameter in 32 bits


@dataclass(frozen=True)
class Bound:
    """Lower bounds for programs of one style: seconds of a step, bytes of a device."""

    compute: float
    wire: float
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return max(self.compute, self.wire)


def bound(case: Case, style: Style, remat: str, microbatches: int) -> Bound:
    """Return the bound of a style on a case's machine."""
    chip = find_target(case.target).chip
    work = case.variant(remat)
    data, group, expert, tensor = style.sizes
    flops = products(work, traced_machine(None, case.target)) / case.devices / (FLOPS_SHARE * chip.flops)
    links = LINK_SHARE * chip.link * (2 * chip.torus if chip.torus else 1)
    total, experts = parameters(work)
    own, dense = experts / (expert * tensor), (total - experts) / tensor
    trips = 2 * microbatches + 1 if style.zero == 3 else 2
    over, replicas = (group * expert, data) if style.spread else (group, data * expert)  # of dense parameters
    wire = ((group - 1) / group * own + (over - 1) / over * dense) * HALF * trips
    for copies, size in ((data, own / group), (replicas, dense / over)):
        wire += 2 * (copies - 1) / copies * size * HALF
    decoder = _decoder(work.config)
    rows = work.batch_size / style.ways(style.batch)
    residual_bytes = 0.0
    if decoder is not None:
        tokens = rows * _positions(work.config)
        wire += (tensor - 1) / tensor * HALF * tokens * decoder.width * 8 * decoder.layers
        residual_bytes = _residual_bytes(work, decoder, tokens / microbatches, style, remat)
    state = sum(
        size * (WORD / (parts if style.zero == 3 else 1) + MOMENTS / parts)
        for size, parts in ((own, group), (dense, over))
    )
    return Bound(flops, wire / links, state + residual_bytes)


@lru_cache
def products(work: Workload, machine: Planned | None = None) -> float:
    """Return the operations of all products of the train step, traced with the kernels of a machine."""
    step, state, batch = workload_step(work)
    with planned_for(machine):
        return _products(jax.make_jaxpr(step)(state, batch).jaxpr)


@lru_cache
def parameters(work: Workload) -> tuple[float, float]:
    """Return the number of parameters, and how many of them belong to experts."""
    _, state, _ = workload_step(work)
    leaves = jax.tree_util.tree_flatten_with_path(state.params)[0]
    sizes = {jax.tree_util.keystr(path): float(prod(leaf.shape)) for path, leaf in leaves}
    experts = sum(size for path, size in sizes.items() if "experts" in path and "w_" in path and "shared" not in path)
    return sum(sizes.values()), experts


def _products(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2.0 * prod(eqn.outvars[0].aval.shape) * prod(eqn.invars[0].aval.shape[d] for d in contracted)
        elif name in ("ragged_dot", "ragged_dot_general"):
            # rows x inner x outer, for the product and both of its gradients
            rows = eqn.invars[0].aval.shape[0]
            sizes = [prod(v.aval.shape) / rows for v in (*eqn.invars[:2], eqn.outvars[0]) if v.aval.shape[0] == rows]
            total += 2.0 * rows * prod(sizes)
        elif name == "conv_general_dilated":
            shape, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
            total += 2.0 * prod(eqn.outvars[0].aval.shape) * prod(shape) / shape[numbers[0]]
        if stated := declared_costs(eqn, [v.aval for v in eqn.invars]):
            total += sum(cost.flops for cost in stated)
            continue
        trips = eqn.params.get("length", 1) if name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += trips * _products(inner)
    return total


def _decoder(config: Any) -> Any:
    """Return the config of a model's transformer, or None if it has none."""
    if isinstance(config, WideResNetConfig):
        return None
    return config.gpt if isinstance(config, MoEConfig) else config.encoder if isinstance(config, ViTConfig) else config


def _positions(config: Any) -> int:
    return config.positions if isinstance(config, ViTConfig) else config.context


def _residual_bytes(work: Workload, decoder: Any, tokens: float, style: Style, remat: str) -> float:
    tensor = style.sizes[3]
    stream = HALF * tokens * decoder.width / (tensor if style.sequence else 1)
    if "host:" in remat:
        return 0.0
    residual_bytes = decoder.layers * stream
    if remat in ("dots", "none"):
        heads = decoder.head_dim * (decoder.heads + 2 * decoder.key_heads)
        hidden = 0 if isinstance(work.config, MoEConfig) else decoder.hidden * (2 if decoder.mlp == "swiglu" else 1)
        residual_bytes += decoder.layers * HALF * tokens * (heads + hidden) / tensor
    positions = _positions(work.config)
    fewest = min(KERNEL_KEYS, BLOCKWISE_KEYS)  # keys for which `auto` may be another implementation
    plain = decoder.attention == "plain" or (decoder.attention == "auto" and positions < fewest)
    if remat == "none" and plain:
        residual_bytes += decoder.layers * HALF * tokens * positions * decoder.heads / tensor
    return residual_bytes
