"""Which collectives compute can hide under a chip's options."""

import pytest

from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import SETS, ProgramFacts, asynchronous_kinds, default_options, with_set

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
