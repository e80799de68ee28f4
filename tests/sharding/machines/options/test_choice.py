"""Which sets apply to a program, how they are merged, and what options need."""

import pytest

from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import (
    SETS,
    ProgramFacts,
    UnknownSetError,
    applicable_sets,
    conflicts,
    default_options,
    named_set,
    off_by_numerics,
    reported_numerics,
    sets_in,
    with_needed,
    with_set,
    without_reported,
)
from autoshard.sharding.machines.options.full_memory import GPU_CHIPS

KINDS = frozenset({"all-gather", "reduce-scatter"})
GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
REDUCE = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"
FUSE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
MEMORY = "xla_tpu_scoped_vmem_limit_kib"
LAYERS = "xla_tpu_enable_latency_hiding_layer_scheduler"
AGGREGATOR = "xla_tpu_enable_sparse_core_collective_aggregator"


def names(facts, options=None):
    return [each.name for each in applicable_sets(facts, options or default_options(facts.chip))]


def test_a_set_is_tried_where_its_condition_holds():
    plain = ProgramFacts("v6e", collectives=KINDS)
    assert names(plain) == ["reduction-layout", "gather-fusion"]
    assert not any(names(ProgramFacts(chip)) for chip in ("v5p", "v6e", "tpu7x"))
    assert names(ProgramFacts("v5e")) == ["scoped-vmem"]
    assert "scoped-vmem" in names(ProgramFacts("v6e"), {MEMORY: "16384"})
    assert names(ProgramFacts("v6e", host_traffic_bytes=1.0))[:3] == [
        "host-link",
        "slow-host-link",
        "host-transfers",
    ]
    assert [names(ProgramFacts("v5p", collectives=KINDS, memory_share=share))[:1] for share in (0.8, 0.9)] == [
        ["gather-fusion"],
        ["full-memory"],
    ]
    assert "data-parallel-overlap" in names(ProgramFacts("v5e", slices=2, collectives=KINDS))
    assert "sparse-core-nd-gathers" not in names(ProgramFacts("tpu7x", collectives=KINDS, gather_dims=1))
    assert "sparse-core-nd-gathers" in names(ProgramFacts("tpu7x", collectives=KINDS, gather_dims=2))


def test_sets_with_reports_of_wrong_numbers_are_not_tried():
    for chip in ("v6e", "tpu7x"):
        assert "sparse-core-reductions" not in names(ProgramFacts(chip, collectives=KINDS))
    assert [name for name, _ in off_by_numerics("v6e", default_options("v6e"))] == [
        "sparse-core-reductions",
        "gather-fusion-overlap",
    ]


def test_a_set_replaces_the_options_of_those_that_it_excludes():
    facts = ProgramFacts("v6e", collectives=KINDS)
    merged = with_set(default_options("v6e"), SETS["gather-fusion"], facts)
    assert FUSE in merged and not {GATHER, GATHER.replace("_all", "_2d_all")} & merged.keys()
    assert "xla_jf_spmd_threshold_for_windowed_einsum_mib" in merged
    assert with_set(merged, SETS["sparse-core-gathers"], facts) == default_options("v6e")


def test_combined_collectives_have_the_size_of_a_layer():
    facts = ProgramFacts("h100", collectives=KINDS, layer_bytes=12345)
    merged = with_set({}, SETS["gpu-combined-layers"], facts)
    assert set(merged.values()) == {"12345"}
    assert sets_in("h100", merged) == (["gpu-combined-layers"], [])
    assert names(ProgramFacts("h100", collectives=KINDS)) == ["gpu-o1"]


def test_unknown_sets_list_those_that_there_are():
    with pytest.raises(
        UnknownSetError, match=r"no option set 'fast'; the sets of v5e are no-collective-matmul, .*host"
    ):
        named_set("fast", "v5e")
    with pytest.raises(UnknownSetError, match="option set 'gather-fusion' is not for v5e; the sets of v5e are"):
        named_set("gather-fusion", "v5e")
    with pytest.raises(UnknownSetError, match="cpu has no sets; pass a mapping"):
        named_set("gather-fusion", "cpu")


def test_an_option_brings_what_it_needs():
    completed, added = with_needed({LAYERS: "true"})
    assert completed == {LAYERS: "true", AGGREGATOR: "true"}
    assert added == [f"{AGGREGATOR}=true, which {LAYERS} needs"]
    chain, added = with_needed({"xla_tpu_enable_layer_scheduler_for_dependent_collectives": "true"})
    assert {LAYERS, AGGREGATOR} <= chain.keys() and len(added) == 2
    assert with_needed({LAYERS: "false"}) == ({LAYERS: "false"}, [])
    assert with_needed({LAYERS: "true", AGGREGATOR: "false"})[0][AGGREGATOR] == "false"


def test_options_that_exclude_each_other():
    assert list(conflicts({GATHER: "true", FUSE: True})) == [(GATHER, FUSE)]
    assert not list(conflicts({GATHER: "true", FUSE: "false"}))


def test_options_in_terms_of_sets():
    fused = with_set(default_options("v6e"), SETS["gather-fusion-overlap"], ProgramFacts("v6e"))
    assert sets_in("v6e", fused)[0] == [
        "no-collective-matmul", "no-sparse-core-reductions", "scoped-vmem", "gather-fusion-overlap",
    ]  # fmt: skip
    gathers = SETS["sparse-core-gathers"].options["tpu7x"]
    assert sets_in("tpu7x", {"xla_own": "1", **gathers}) == (["sparse-core-gathers"], ["xla_own"])


def test_a_part_of_a_reported_set_is_reported():
    assert [name for name, _ in reported_numerics("v6e", {REDUCE: "true"})] == ["sparse-core-reductions"]
    assert not reported_numerics("v6e", {REDUCE: "false"}) and not reported_numerics("v5p", {REDUCE: "true"})
    assert not reported_numerics("v6e", with_set({}, SETS["gather-fusion"], ProgramFacts("v6e")))
    assert without_reported("v6e", {REDUCE: "true", GATHER: "true"}) == {REDUCE: "false", GATHER: "true"}
    assert without_reported("v6e", {REDUCE: True}) == {REDUCE: False}
    assert without_reported("v5p", {REDUCE: "true"}) == {REDUCE: "true"}


def test_an_option_that_the_compiler_turns_on_by_default_is_reported():
    # The compiler for tpu7x runs reductions on the SparseCores unless it is told not to.
    all_reduce = REDUCE.replace("reduce_scatter", "all_reduce")
    assert [name for name, _ in reported_numerics("tpu7x", {})] == ["sparse-core-reductions"]
    assert reported_numerics("tpu7x", {all_reduce: False})
    assert not reported_numerics("tpu7x", {all_reduce: False, REDUCE: "false"})
    assert without_reported("tpu7x", {all_reduce: True}) == {all_reduce: False, REDUCE: "false"}
    assert not reported_numerics("tpu7x", without_reported("tpu7x", {}))
    assert not reported_numerics("v6e", {}) and without_reported("v6e", {}) == {}


def test_the_speed_of_the_host_link_is_tried_where_values_move():
    def names(**facts):
        return [each.name for each in applicable_sets(ProgramFacts("v6e", **facts), default_options("v6e"))]

    assert "host-link" in names(host_traffic_bytes=1e9) and "host-link" not in names(collectives=KINDS)
    assert "host-link" not in [
        each.name for each in applicable_sets(ProgramFacts("v5e", host_traffic_bytes=1e9), default_options("v5e"))
    ]


def test_the_scheduler_may_fill_the_memory_of_every_gpu():
    for chip in GPU_CHIPS:
        assert sets_in(chip, default_options(chip)) == (["full-memory"], [])
        assert CHIPS[chip].options == default_options(chip)
        (percent,) = default_options(chip).values()
        assert 0.9 < 0.8 * int(percent) / 100 < 0.95  # of XLA's 80 % of the memory
