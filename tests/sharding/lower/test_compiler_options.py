"""Which of a plan's compiler options its program is compiled under."""

import jax
import pytest

from autoshard.errors import AutoshardWarning
from autoshard.sharding.lower import executable
from autoshard.sharding.lower.executable import supported_options

LAYERS = "xla_tpu_enable_latency_hiding_layer_scheduler"
AGGREGATOR = "xla_tpu_enable_sparse_core_collective_aggregator"


def fake_compiler(monkeypatch, known):
    """A compiler that knows these options, and that refuses the layer scheduler without the aggregator."""
    tried = []

    def compiles(options, device):
        tried.append(set(options))
        return options.keys() <= known and (LAYERS not in options or options.get(AGGREGATOR) == "true")

    monkeypatch.setattr(executable, "_compiles", compiles)
    return tried


def test_an_option_is_tried_with_what_it_needs(monkeypatch):
    tried = fake_compiler(monkeypatch, {LAYERS, AGGREGATOR})
    assert supported_options({LAYERS: "true"}, jax.devices()[0]) == {LAYERS: "true", AGGREGATOR: "true"}
    assert len(tried) == 1


def test_unknown_options_are_named_and_the_others_kept(monkeypatch):
    fake_compiler(monkeypatch, {LAYERS, AGGREGATOR, "xla_old"})
    with pytest.warns(AutoshardWarning, match="does not know the plan's options xla_new: they are left out"):
        found = supported_options({"xla_new": "1", LAYERS: "true", "xla_old": "2"}, jax.devices()[0])
    assert found == {LAYERS: "true", AGGREGATOR: "true", "xla_old": "2"}


def test_a_value_that_contradicts_a_need_is_kept(monkeypatch):
    fake_compiler(monkeypatch, {LAYERS, AGGREGATOR})
    with pytest.warns(AutoshardWarning, match=f"options {LAYERS}: they are left out"):
        found = supported_options({LAYERS: "true", AGGREGATOR: "false"}, jax.devices()[0])
    assert found == {AGGREGATOR: "false"}


def test_the_compiler_of_cpus():
    known = {"xla_cpu_enable_fast_math": True}
    assert supported_options(known, jax.devices()[0]) == known
    with pytest.warns(AutoshardWarning, match="xla_no_such_option"):
        assert supported_options(known | {"xla_no_such_option": "1"}, jax.devices()[0]) == known
