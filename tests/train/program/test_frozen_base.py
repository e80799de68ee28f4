"""Under adapters the base costs nothing but its forward pass: no gradient, moment, residual or reduction."""

from pathlib import Path
from typing import Any

import jax
import pytest

import autoshard
from autoshard.models.adapters import LoraConfig
from autoshard.models.gpt_config import GPTConfig
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.step.optimizer import OptimizerConfig
from autoshard.train.step.train_step import batch_shapes
from tests.models.pretrained.folders import LLAMA, make_folder

FFN, WIDTH = 48, 16
BASE = {**LLAMA, "intermediate_size": FFN}
BATCH = batch_shapes(8, 12)


def results(jaxpr: Any, name: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of an operator, in all nested programs."""
    found = []
    for eqn in jaxpr.eqns:
        found += [var.aval.shape for var in eqn.outvars if eqn.primitive.name == name]
        for inner in nested(eqn.params):
            found += results(inner, name)
    return found


def nested(params: dict[str, Any]) -> list[Any]:
    """Returns the programs among the parameters of an operator."""
    leaves = jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(getattr(leaf, "jaxpr", leaf), "eqns")]


@pytest.fixture
def steps(tmp_path: Path) -> dict[str, tuple[Any, Any]]:
    """The step and the shapes of the state of a full run, and of one with adapters at the queries."""
    folder = make_folder(tmp_path / "model", BASE)
    found = {}
    for name, rank in (("full", 0), ("lora", 2)):
        config = TrainConfig(
            pretrained=PretrainedConfig(folder), lora=LoraConfig(rank=rank, targets=("attention/wq",)),
            gpt=GPTConfig(context=12), batch_size=8, optimizer=OptimizerConfig(warmup_steps=1),
        )  # fmt: skip
        program = make_program_of(config)
        found[name] = train_step_of(config, program), program.abstract_state()
    return found


def test_the_base_has_no_gradient_no_residual_of_its_own_and_no_moment(steps: dict[str, tuple[Any, Any]]) -> None:
    full, lora = (jax.make_jaxpr(step)(state, BATCH).jaxpr for step, state in steps.values())
    gradients = [(WIDTH, FFN), (FFN, WIDTH), (24, WIDTH), (WIDTH, 24)]
    assert {*results(full, "dot_general")} >= {(WIDTH, FFN), (FFN, WIDTH)}
    assert not {*results(lora, "dot_general")} & {*gradients}
    # Stacked over layers: what the backward pass keeps. The input of w_down is for its gradient alone.
    kept = [sum(shape[-1] == FFN and shape[1] == 8 for shape in results(each, "scan")) for each in (full, lora)]
    assert kept[1] < kept[0]
    state = steps["lora"][1]
    trained, moments = (sum(leaf.size for leaf in jax.tree.leaves(part) if leaf.ndim) for part in
                        (state.params, state.opt_state))  # fmt: skip
    assert moments == 2 * trained == 2 * 3 * 2 * (WIDTH + 16)  # layers, rank, inputs and outputs


def test_the_plan_reduces_nothing_of_the_base(steps: dict[str, tuple[Any, Any]]) -> None:
    reduced = {}
    for name, (step, state) in steps.items():
        plan = autoshard.plan(step, state, BATCH, target="cpu:8", plan="fsdp:8", donate_argnums=0)
        part = "/frozen/" if name == "lora" else "/params/"
        assert (name == "lora") == any("lora_rank" in names for names in plan.logical_axes.values())
        reduced[name] = {leaf.path: bool(plan.reduce_axes(leaf.path)) for leaf in plan.inputs if part in leaf.path}
    # Each device has some features of the embedding, with the gradients of all tokens.
    assert [path for path, is_reduced in reduced["full"].items() if not is_reduced] == ["0/params/embed"]
    assert reduced["lora"] and not any(reduced["lora"].values())
