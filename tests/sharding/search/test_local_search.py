"""Plans beyond the known ones: words that change a plan by one thing, and what the search makes of them."""

import dataclasses

import pytest

from autoshard import Plan, plan
from autoshard.errors import PlanRequestError
from autoshard.models import workload
from autoshard.sharding.layout.plan_edits import Change
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.search import layout_search, local_search
from autoshard.train.program.build import workload_step
from tests.sharding.search.test_layout_search import train_step

TINY = workload("llama-tiny")


def tiny(words):
    return plan(*workload_step(TINY), target="cpu:8", plan=words, donate_argnums=0)


def test_words_are_read_and_written_alike():
    for text in ("dp:2 tp:4 seq tp-ffn dp+optimizer", "my-axis=fsdp:8", "my-axis=fsdp:8 my-axis+vocab my-axis_1-a+b"):
        assert str(parse_request(text)) == text
    assert parse_request("my-axis=fsdp:8 my-axis+vocab").changes == (Change("my-axis", True, "vocab"),)


def test_a_word_less_leaves_an_axis_whole():
    before, after = tiny("dp:4 tp:2 seq"), tiny("dp:4 tp:2 seq tp-ffn")
    assert "ffn" in before.axis_rules["tp"] and "ffn" not in after.axis_rules["tp"]
    spec = {leaf.path: leaf.spec for leaf in after.inputs}
    assert not any("tp" in str(spec[path]) for path in spec if path.endswith(("w_up", "w_gate", "w_down")))
    assert any("tp" in str(spec[path]) for path in spec if path.endswith("wq"))


def test_a_word_more_stores_a_part_of_the_state():
    before, after = tiny("dp:2 fsdp:4"), tiny("dp:2 fsdp:4 dp+optimizer")
    assert before.storage == {"parameter": ("fsdp",), "optimizer": ("fsdp",)}
    assert after.storage == {"parameter": ("fsdp",), "optimizer": ("dp", "fsdp")}
    assert after.estimate.peak_memory_bytes < before.estimate.peak_memory_bytes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dp:8 tp-ffn", "there is no mesh axis 'tp'; there is dp"),
        ("dp:2 tp:4 tp-fnn", "no logical axis 'fnn'.*Did you mean 'tp-ffn'?"),
        ("dp:2 tp:4 dp+batch", "'dp' has batch already; leave the word out"),
        ("dp:2 tp:4 dp-optimizer", "'dp' does not have optimizer to begin with; leave the word out"),
    ],
)
def test_words_that_mean_nothing(words, said):
    with pytest.raises(PlanRequestError, match=said):
        tiny(words)


def short_of_rows(words: str | None = None) -> Plan:
    """A GPT whose batch has a quarter as many rows as there are devices."""
    work = workload("gpt-1.3b").with_(batch_size=16)
    config = dataclasses.replace(work.config, layers=8, remat="full")
    step, state, batch = workload_step(dataclasses.replace(work, config=config))
    return plan(step, state, batch, target="v5e:8x8", plan=words, donate_argnums=0)


def test_it_finds_what_has_no_name_and_can_be_asked_for(monkeypatch):
    named = short_of_rows()
    assert "+" not in named.chosen and "-" not in named.chosen  # what it finds saves less than it has to
    for module in (local_search, layout_search):
        monkeypatch.setattr(module, "WORTH", 0.05)
    made = short_of_rows()
    assert "+" in made.chosen or "-" in made.chosen
    assert made.estimate.step_time_us < 0.95 * named.estimate.step_time_us
    again = short_of_rows(made.chosen)
    assert again.estimate == made.estimate
    assert [leaf.spec for leaf in again.inputs] == [leaf.spec for leaf in made.inputs]


@pytest.mark.parametrize(("name", "target"), [("gpt-tiny", "h100:8"), ("mixtral-tiny", "v5e:2x4")])
def test_it_repeats_no_work_to_save_traffic(name, target):
    made = plan(*workload_step(workload(name).with_(batch_size=4)), target=target, donate_argnums=0)
    assert "-" not in made.chosen  # of so small a model everything would be faster repeated


def test_it_is_never_worse_than_a_known_plan():
    made = plan(*train_step(), target="h100:8", donate_argnums=0)
    assert made.estimate.step_time_us <= min(us for _, us, peak in made.candidates if peak <= made.limit_bytes) + 1e-3
