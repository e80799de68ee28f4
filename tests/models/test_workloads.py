"""The registry of workloads: names, models, batches and error messages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard.errors import AutoshardError
from autoshard.models import (
    ALPA_GPT,
    ALPA_MOE,
    ALPA_WIDE_RESNET,
    GPT,
    GPT3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    VIT,
    WORKLOADS,
    MoE,
    ViT,
    WideResNet,
    workload,
)
from autoshard.models.decoder.published import DECODERS
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import batch_shapes, make_train_step
from tests.models.small import count, text_entropy, trained

TINY = {
    "gpt-tiny": GPT,
    "llama-tiny": GPT,
    "moe-tiny": MoE,
    "mixtral-tiny": MoE,
    "wide-resnet-tiny": WideResNet,
    "vit-tiny": ViT,
}
REPRESENTATIVES = ("gpt-1.3b", "llama2-7b", "mixtral-8x7b", "moe-2.4b", "wide-resnet-250m", "vit-l16", *TINY)


def test_all_sizes_are_registered():
    published = [*ALPA_GPT, *GPT3, *LLAMA, *MISTRAL, *ALPA_MOE, *MIXTRAL, *DECODERS, *ALPA_WIDE_RESNET, *VIT]
    assert sorted(WORKLOADS) == sorted([*published, *TINY]) and len(WORKLOADS) == 57
    assert all(work.name == name for name, work in WORKLOADS.items())


@pytest.mark.parametrize(
    ("name", "context", "trained_on"),
    [
        ("llama3.1-8b", 131_072, 8192),
        ("llama3.1-405b", 131_072, 8192),
        ("mistral-7b", 32_768, 8192),
        ("mixtral-8x22b", 65_536, 4096),
        ("gpt3-175b", 2048, 2048),
        ("gemma3-12b", 131_072, 8192),
        ("deepseek-v3", 163_840, 4096),
    ],
)
def test_a_workload_may_train_on_less_than_the_published_context(name, context, trained_on):
    sizes = {**GPT3, **LLAMA, **MISTRAL, **MIXTRAL, **DECODERS}
    assert (sizes[name].context, workload(name).config.context) == (context, trained_on)


@pytest.mark.parametrize(("name", "published"), [("gpt3-175b", 174_604_836_864), ("mistral-7b", 7_241_732_096)])
def test_parameters_of_a_dense_model(name, published):
    """Mistral's as counted in its checkpoint. GPT-3's 174.6 billion (arXiv:2005.14165, table D.1) with 50304 tokens."""
    assert count(lambda rngs: workload(name).build(rngs)) == published


@pytest.mark.parametrize("name", TINY)
def test_it_builds_its_model(name):
    model: Any = nnx.eval_shape(lambda: workload(name).build(nnx.Rngs(0)))
    assert type(model) is TINY[name] and model.cfg == workload(name).config


@pytest.mark.parametrize("name", TINY)
def test_a_random_batch_has_the_planned_shapes_and_values_in_range(name):
    work = workload(name)
    batch, other = work.random_batch(), work.random_batch(1)
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == {
        key: (x.shape, x.dtype) for key, x in work.batch().items()
    }
    tokens = "inputs" in batch
    integers = batch["inputs" if tokens else "labels"]
    kinds = getattr(work.config, "gpt", work.config).vocab if tokens else work.config.classes
    assert kinds / 2 < integers.max() < kinds and integers.min() >= 0
    assert (integers != other["inputs" if tokens else "labels"]).any()
    assert not tokens or batch["mask"].all()


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVES if "vit" not in name and "resnet" not in name])
def test_batches_of_tokens_are_the_trainers(name):
    work = workload(name)
    assert work.batch() == batch_shapes(work.batch_size, work.config.context)
    assert work.batch(4) == batch_shapes(4, work.config.context)


@pytest.mark.parametrize("name", ["vit-l16", "wide-resnet-250m"])
def test_batches_of_images(name):
    batch = {key: (leaf.shape, leaf.dtype) for key, leaf in workload(name).batch(4).items()}
    assert batch == {"images": ((4, 224, 224, 3), jnp.float32), "labels": ((4,), jnp.int32)}
    assert workload(name).batch()["labels"].shape == (workload(name).batch_size,)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_the_trainers_step_takes_it(name):
    """Traced at full size: the step returns a state with the shapes and dtypes of its argument."""
    work = workload(name)
    program = make_program(work.build, optax.adamw(1e-3))
    step = make_train_step(program, optax.constant_schedule(1e-3), microbatches=2)
    state = program.abstract_state()
    after, metrics = jax.eval_shape(step, state, work.batch())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    assert bool(state.variables) == ("resnet" in name)


def test_with_returns_a_changed_copy():
    work = workload("llama2-7b").with_(context=2048, remat="dots", batch_size=8)
    assert work.batch() == batch_shapes(8, 2048)
    assert work.config == dataclasses.replace(LLAMA["llama2-7b"], context=2048, remat="dots")
    assert workload("llama2-7b").config == LLAMA["llama2-7b"]


def test_with_changes_fields_of_a_mixture_and_of_its_gpt():
    work = workload("moe-tiny").with_(experts=4, context=16, scan_layers=False)
    assert (work.config.experts, work.config.gpt.context, work.config.gpt.scan_layers) == (4, 16, False)
    assert work.config.gpt.width == workload("moe-tiny").config.gpt.width
    assert work.batch() == batch_shapes(16, 16)
    with pytest.raises(ValueError, match="layers 3 is not a multiple of moe_every 2"):
        workload("moe-tiny").with_(layers=3)
    assert workload("moe-tiny").with_(layers=3, moe_every=3).config.gpt.layers == 3


def test_an_unknown_name_lists_the_known_names():
    with pytest.raises(AutoshardError, match=r"Did you mean llama2-7b.*\? The known ones are deepseek-v3, g"):
        workload("lama2-7b")
    with pytest.raises(AutoshardError, match="unknown model '%'. The known ones are .*wide-resnet-tiny"):
        workload("%")


@pytest.mark.parametrize(
    "name, message",
    [
        ("vit-l16", r"vit-l16: ViTConfig has no field 'contxt'. The known ones are activation"),
        ("gpt-1.3b", r"GPTConfig has no field 'contxt'\. Did you mean context\? The known ones are attention, bias"),
        ("moe-10b", r"MoEConfig has no field 'contxt'\. Did you mean context\? The known ones are .*experts"),
    ],
)
def test_an_unknown_field_lists_the_known_fields(name, message):
    with pytest.raises(AutoshardError, match=message):
        workload(name).with_(contxt=5)


def test_an_invalid_value_is_an_error():
    with pytest.raises(ValueError, match="remat is 'half'; choose one of none, full"):
        workload("gpt-tiny").with_(remat="half")


@pytest.mark.slow
def test_the_small_gpt_learns():
    """The other small models have such a test in their own files."""
    losses, *_ = trained(workload("gpt-tiny").with_(batch_size=8), 40)
    assert losses[0] == pytest.approx(np.log(128), abs=0.15)
    assert np.mean(losses[-5:]) < text_entropy() - 0.3
