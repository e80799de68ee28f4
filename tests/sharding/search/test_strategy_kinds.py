"""Kinds of plans."""

import pytest

from autoshard.sharding.search.strategy_kinds import kind_of


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        ("dp", ["dp:8", "zero1:8", "dp:2 zero1:4", "dp:8 tp:1"]),
        ("fsdp", ["fsdp:8", "dp:2 fsdp:4", "dp:8 state", "data=fsdp:8", "fsdp:8 fsdp+vocab"]),
        ("tp", ["tp:8 seq", "fsdp:4 tp:2", "data=fsdp:4 model=tp:2"]),
        ("cp", ["cp:8", "fsdp:4 ring:2", "ring:2 ulysses:4", "isp:8"]),
        ("ep", ["ep:8", "dp:2 ep:4"]),
        ("pp", ["pp:4 dp:2"]),
        ("hybrid", ["ep:4 tp:2", "pp:2 fsdp:2 tp:2", "fsdp:2 tp:2 gather:2"]),
        ("", ["{'tp': ['ffn']}", "as placed"]),
    ],
)
def test_the_kind_of_a_strategy(kind: str, strategies: list[str]) -> None:
    assert [kind_of(strategy) for strategy in strategies] == [kind] * len(strategies)
