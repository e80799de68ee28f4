"""What needs no gradient costs none: no residual, recomputation, transfer to the host, product or reduction."""

from collections import Counter
from functools import cache
from typing import Any

import optax
import pytest

from autoshard import Plan, plan
from autoshard.models import GPT, GPTConfig
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import batch_shapes, make_train_step

LAYERS = 4
WEIGHTS = 7  # of a layer: queries, keys, values, output; gate, up, down
HOST = "host:residual+qkv keep:out_proj"
VALUES_ON_HOST = 4  # residual, queries, keys, values


@cache
def planned(remat: str, scan_layers: bool, freeze: tuple[str, ...] = (), offload: str | None = None) -> Plan:
    config = GPTConfig(vocab=32, layers=LAYERS, heads=2, width=8, context=8, remat=remat, scan_layers=scan_layers)
    program = make_program(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-2), freeze=freeze)
    step: Any = make_train_step(program, optax.constant_schedule(1e-2))
    shapes = program.abstract_state(), batch_shapes(32, 8)
    return plan(step, *shapes, target="v5e:2x4", plan="fsdp:8", offload=offload)


def counts(made: Plan) -> Counter[str]:
    """How often each operator runs in a step."""
    assert made.bound is not None
    found: Counter[str] = Counter()
    for op in made.bound.problem.program.ops():
        found[op.name] += int(op.trips)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("remat", "scan_layers"), [("none", True), ("full", False), (HOST, True)])
def test_a_frozen_weight_has_no_product_for_its_gradient(remat, scan_layers):
    frozen = planned(remat, scan_layers, ("blocks/*/w*",))
    fewer = counts(planned(remat, scan_layers))["dot_general"] - counts(frozen)["dot_general"]
    assert fewer >= WEIGHTS * LAYERS  # and under rematerialization, products whose results nothing needs
    paths = [leaf.path for leaf in frozen.inputs if "/frozen/" in leaf.path]
    assert len(paths) >= WEIGHTS and all(frozen.reduce_axes(path) == {} for path in paths)


@pytest.mark.few(1)
@pytest.mark.parametrize("remat", ["none", "full", HOST])
def test_layers_below_all_trained_ones_only_run_forward(remat):
    """The embedding and the first two of four layers are frozen: half of the backward pass is not there."""
    whole, half = (counts(planned(remat, False, f)) for f in ((), ("embed", "blocks/0/*", "blocks/1/*")))
    forward = counts(planned(remat, False, ("embed", "blocks/*", "blocks/*/*")))
    per_layer = (whole["dot_general"] - half["dot_general"]) / 2
    assert per_layer >= (whole["dot_general"] - forward["dot_general"]) / LAYERS - 1
    assert whole["device_put"] == (2 * VALUES_ON_HOST * LAYERS if remat == HOST else 0)
    assert half["device_put"] == whole["device_put"] / 2 and forward["device_put"] == 0
    assert forward["scan"] == 0


def test_the_planner_offloads_no_value_of_frozen_layers():
    below = ("embed", "blocks/0/*", "blocks/1/*", "blocks/2/*")
    whole, part = (planned("full", False, freeze, "residual").offload["residual"] for freeze in ((), below))
    assert part == whole / LAYERS
