"""Choices of what a layer does with its named values, and their additive prices."""

from dataclasses import replace

import pytest

from autoshard.models import GPTConfig
from autoshard.train.program.remat_choice import Choice, Part, Parts, choices

PARTS = Parts(
    full_us=1000.0,
    full_bytes=500.0,
    compute_us=1000.0,
    values={"residual": Part(0.0, 200.0), "qkv": Part(60.0, 300.0), "context": Part(40.0, 100.0)},
    microbatches=2,
    host_us_per_byte=1.0,
)


def test_every_choice_is_a_policy_and_none_occurs_twice():
    names = ("residual", "qkv", "context")
    found = [choice.remat for choice in choices(names, names)]
    assert len(found) == len(set(found)) == 2 * 3 * 3
    for remat in found:
        assert GPTConfig(remat=remat).remat == remat
    assert "host:residual+qkv keep:context" in found and "full" in found


def test_without_a_host_values_are_kept_or_recomputed():
    assert {c.remat for c in choices(("residual", "qkv", "context"), ())} == {
        "full", "keep:qkv", "keep:context", "keep:qkv+context"
    }  # fmt: skip


def test_requested_values_wait_on_the_host_in_every_choice():
    found = [c.remat for c in choices(("residual", "qkv", "context"), ("qkv",), ("qkv",))]
    assert found == ["host:qkv", "host:qkv keep:context"]


@pytest.mark.parametrize(
    ("choice", "time_us", "peak"),
    [
        (Choice(), 1000.0, 500.0),
        (Choice(keep=("qkv",)), 940.0, 500.0 + 300 / 2),
        (Choice(host=("qkv",)), 940.0 + (300 - 250), 500.0),  # sent in a forward pass of 250 us
        (Choice(host=("residual",), keep=("context",)), 960.0, 500.0 - 200 / 2 + 100 / 2),
    ],
)
def test_prices(choice, time_us, peak):
    found = PARTS.price(choice)
    assert found[:2] == (pytest.approx(time_us), pytest.approx(peak))


def test_a_transfer_reads_and_writes_the_memory_of_the_device():
    """An offloaded value costs two copies more than a kept one."""
    parts = replace(PARTS, host_us_per_byte=0.1, copy_us_per_byte=0.01)
    assert parts.price(Choice(keep=("qkv",)))[0] == 1000 - 60
    assert parts.price(Choice(host=("qkv",)))[0] == pytest.approx(1000 - 60 + 2 * 300 * 0.01)
    assert parts.price_mix(Choice(host=("qkv",)), 0.5)[0] == pytest.approx(1000 - 0.5 * (60 - 2 * 300 * 0.01))


def test_a_part_of_the_layers_offloads_where_the_link_is_the_bound():
    """All layers send 300 us of values in a forward pass of 250 us; three quarters of them send 225 us."""
    choice = Choice(host=("qkv",), keep=("context",))
    whole, part = PARTS.price_mix(choice, 1.0), PARTS.price_mix(choice, 0.75)
    assert whole == PARTS.price(choice) and whole[2] > PARTS.hidden_us > part[2] == 225.0
    assert whole[0] == pytest.approx(1000 - 60 - 40 + 50) and part[0] == pytest.approx(1000 - 0.75 * 60 - 40)
    assert part[1] == whole[1] == 500.0 + 100 / 2
    residual = Choice(host=("residual",))
    assert PARTS.price_mix(residual, 0.5)[1] == 500.0 - 0.5 * 200 / 2
