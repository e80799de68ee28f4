"""Which collectives compute can hide under a chip's options."""

import jax
import pytest

from autoshard import plan
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import (
    SETS,
    ProgramFacts,
    asynchronous_kinds,
    default_options,
    keeps_gathers,
    keeps_reduce_scatters,
    with_set,
)
from tests.sharding.autotune.test_compiled_options import step

TWO_DIMENSIONS = "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather"
KEEP = "xla_tpu_prefer_async_allgather_to_allreduce"
OFFLOADED = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
}


@pytest.mark.parametrize(
    ("chip", "kinds"),
    [("v4", ()), ("v5e", ("all-gather",)), ("v5p", ("all-gather",)), ("v6e", ("all-gather",))],
)
def test_reductions_are_asynchronous_only_on_sparse_cores(chip, kinds):
    assert asynchronous_kinds(chip, {}) == kinds
    both = ("reduce-scatter", "all-reduce") if chip in ("v5p", "v6e") else ()
    assert asynchronous_kinds(chip, OFFLOADED) == (*kinds, *both)


def test_the_compilers_default_counts():
    assert asynchronous_kinds("tpu7x", {}) == ("all-gather", "reduce-scatter", "all-reduce")
    assert asynchronous_kinds("tpu7x", dict.fromkeys(OFFLOADED, "false")) == ("all-gather",)


def test_a_chip_hides_what_its_default_sets_make_asynchronous():
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        assert CHIPS[name].hides == asynchronous_kinds(name, default_options(name))
        assert CHIPS[name].options == default_options(name)
    requested = with_set(CHIPS["v6e"].options, SETS["sparse-core-reductions"], ProgramFacts("v6e"))
    assert set(asynchronous_kinds("v6e", requested)) == {"all-gather", "reduce-scatter", "all-reduce"}


def test_gathers_over_several_dimensions_are_kept_by_default():
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        options = default_options(name)
        assert CHIPS[name].keeps_gathers == keeps_gathers(name, options) == (name != "v4")
        assert not keeps_gathers(name, {**options, KEEP: "false"})


def test_only_v5e_keeps_gathers_without_sparse_cores():
    for name in ("v5e", "v5p", "v6e", "tpu7x"):
        assert keeps_gathers(name, {KEEP: "true"}) == (name == "v5e")


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(("target", "words"), [("v5e:8x8", "fsdp:64"), ("v5e:16x16", "fsdp:256")])
def test_small_shards_are_gathered_not_added(target, words):
    """A shard of 512 or 1024 rows on so many devices does not fill a tile of the memory."""
    width, devices = (512, 64) if target == "v5e:8x8" else (1024, 256)
    up, down = (jax.ShapeDtypeStruct((4, *shape), "bfloat16") for shape in ((width, 2048), (2048, width)))
    x = jax.ShapeDtypeStruct((devices * 512, width), "bfloat16")
    made = plan(step, {"up": up, "down": down}, x, target=target, plan=words)
    for options, kept in ((made.compiler_options["tpu"], True), ({}, False)):
        in_loops = [c for c in made.verify(options=options).collectives if c.trips > 1]
        assert any(each.kind == "all-gather" for each in in_loops) == kept


def test_on_tpu7x_only_the_sparse_cores_have_reduce_scatters():
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        assert (
            CHIPS[name].keeps_reduce_scatters == keeps_reduce_scatters(name, CHIPS[name].options) == (name != "tpu7x")
        )
        assert keeps_reduce_scatters(name, {**CHIPS[name].options, **OFFLOADED})


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "placing"),
    [
        ("dp:2 fsdp:32", {"dp": (("z", 2, 1),), "fsdp": (("z", 2, 2), ("y", 4, 1), ("x", 4, 1))}),  # every second plane
        ("dp:16 fsdp:4", {"dp": (("z", 4, 1), ("y", 4, 1)), "fsdp": (("x", 4, 1),)}),  # one line
    ],
)
def test_kept_gathers_run_beside_compute_over_any_group(words, placing):
    up, down = (jax.ShapeDtypeStruct((4, *shape), "bfloat16") for shape in ((512, 2048), (2048, 512)))
    x = jax.ShapeDtypeStruct((64 * 512, 512), "bfloat16")
    made = plan(step, {"up": up, "down": down}, x, target="v5p:4x4x4", plan=words).where(placing=placing)
    for options, hidden in ((made.compiler_options["tpu"], True), ({}, False)):
        gathers = [c for c in made.verify(options=options).collectives if c.kind == "all-gather" and c.trips > 1]
        assert gathers and any(each.overlapped for each in gathers) == hidden


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_gathers_over_three_dimensions_stay_gathers_by_an_option():
    up, down = (jax.ShapeDtypeStruct((4, *shape), "bfloat16") for shape in ((512, 2048), (2048, 512)))
    x = jax.ShapeDtypeStruct((64 * 512, 512), "bfloat16")
    made = plan(step, {"up": up, "down": down}, x, target="v5p:4x4x4", plan="fsdp:64")
    options = made.compiler_options["tpu"]
    for value, kept in (("true", True), ("false", False)):
        kinds = {each.kind for each in made.verify(options={**options, KEEP: value}).collectives if each.trips > 1}
        assert ("all-gather" in kinds) == kept


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_gathers_over_two_dimensions_run_beside_compute_on_v6e():
    up, down = (jax.ShapeDtypeStruct((4, *shape), "bfloat16") for shape in ((512, 2048), (2048, 512)))
    x = jax.ShapeDtypeStruct((32 * 512, 512), "bfloat16")
    made = plan(step, {"up": up, "down": down}, x, target="v6e:4x8", plan="fsdp:32")
    options = made.compiler_options["tpu"]
    for value, hidden in (("true", True), ("false", False)):
        audit = made.verify(options={**options, TWO_DIMENSIONS: value})
        gathers = [each for each in audit.collectives if each.kind == "all-gather" and each.trips > 1]
        assert gathers and any(each.overlapped for each in gathers) == hidden
