"""The table of options and the sets: complete, consistent, and without combinations that exclude each other."""

import pytest

from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import OPTIONS, SETS, ProgramFacts, conflicts, default_options, with_set
from autoshard.sharding.machines.options.full_memory import GPU_CHIPS

FULL = {"slices": 2, "host_traffic_bytes": 1.0, "gather_dims": 3, "layer_bytes": 1 << 20, "memory_share": 1.0}
KINDS = frozenset({"all-gather", "reduce-scatter", "all-reduce"})


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_every_option_is_described(option):
    known = {"maxtext", "recipes", "axlearn", "nvidia", "gpu", "xla", "jax", "libtpu"}
    assert option.effect and option.trouble and {word.strip() for word in option.source.split(",")} <= known
    assert {*option.needs, *option.excludes} <= OPTIONS.keys()


@pytest.mark.parametrize("each", SETS.values(), ids=lambda each: each.name)
def test_every_set_consists_of_described_options(each):
    assert each.effect and each.pays and each.options.keys() <= CHIPS.keys()
    assert {*each.default, *each.numerics} <= each.options.keys()
    assert not {*each.default} & {*each.numerics}
    assert {*each.excludes} <= SETS.keys()
    for chip, options in each.options.items():
        assert options and options.keys() <= OPTIONS.keys(), chip
        assert not list(conflicts(options)), chip
        needed = {name for option in options for name in OPTIONS[option].needs}
        assert needed <= options.keys(), chip


@pytest.mark.parametrize("chip", CHIPS)
def test_a_set_added_to_the_default_options_excludes_none_of_them(chip):
    facts = ProgramFacts(chip=chip, collectives=KINDS, **FULL)
    for each in SETS.values():
        if chip in each.options:
            merged = with_set(CHIPS[chip].options, each, facts)
            assert not list(conflicts(merged)), each.name
            assert each.options[chip].keys() <= merged.keys()


def test_values_have_the_types_that_the_compilers_take():
    for each in SETS.values():
        for chip, options in each.options.items():
            kinds = {type(value) for value in options.values()}
            assert kinds <= ({bool, str} if chip in GPU_CHIPS else {str}), each.name


def test_reductions_on_the_sparse_cores_are_off_where_abnormal_losses_were_reported():
    names = SETS["sparse-core-reductions"].options["v6e"].keys()
    for chip in ("v6e", "tpu7x"):  # by name, because the compiler's own default may be on
        assert {default_options(chip)[name] for name in names} == {"false"}
    assert {default_options("v5p")[name] for name in names} == {"true"}
    assert CHIPS["v6e"].options == default_options("v6e")


def test_the_gpus_of_the_sets_are_the_gpus_that_there_are():
    assert set(GPU_CHIPS) == {name for name, chip in CHIPS.items() if chip.platform == "cuda"}
