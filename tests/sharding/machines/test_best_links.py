"""The least time of a collective, wherever its groups are."""

import itertools
from itertools import islice

import pytest

from autoshard.sharding.cost.collectives import is_hidden_on
from autoshard.sharding.machines.best_links import best_links
from autoshard.sharding.machines.device_assignments import assignments
from autoshard.sharding.machines.targets import find_target

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
MESHES = (
    {"a": 2, "b": 4, "c": 2, "d": 2}, {"a": 4, "b": 8}, {"a": 8, "b": 2, "c": 2}, {"a": 32}, {"a": 3, "b": 11},
)  # fmt: skip


@pytest.mark.parametrize("name", ["v5e:4x8", "v5p:2x4x4", "tpu7x:2x2x4", "h100:4x8", "v5e:4x4*2"])
def test_no_device_assignment_gives_less(name):
    topology, chip = find_target(name).topology, find_target(name).chip
    reached = set()
    for mesh in MESHES:
        for order in itertools.permutations(mesh):
            for found in islice(assignments(topology, mesh, order), 64):
                for count in range(1, len(mesh) + 1):
                    for axes, kind in itertools.product(itertools.combinations(mesh, count), KINDS):
                        devices = 1
                        for a in axes:
                            devices *= mesh[a]
                        links, best = found.links(kind, axes), best_links(topology, kind, devices)
                        assert is_hidden_on(chip, links) <= any(is_hidden_on(chip, each) for each in best.links)
                        for size in (0.0, 1e4, 1e9):
                            time_us = links.time_us(size * links.factor)
                            assert best.time_us(size) <= time_us * (1 + 1e-9), (mesh, order, axes, kind)
                            reached |= {(kind, devices)} if size and best.time_us(size) >= 0.999 * time_us else set()
    assert len(reached) > 15, "most bounds are reached"
