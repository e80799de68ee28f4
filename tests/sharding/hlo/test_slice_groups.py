"""Groups of partitions in the module of one slice, and those of sends between slices."""

import pytest

from autoshard.sharding.hlo.slice_groups import Slices

# Mesh a:2 x b:4. Axis `a` is inside of a slice, `b` has two slices of two devices: device = 4 (b // 2) + 2 a + b % 2.
ORDER = (0, 1, 4, 5, 2, 3, 6, 7)
SLICES = Slices(ORDER, 2)


def test_a_module_numbers_the_partitions_of_its_slice():
    assert SLICES.partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert SLICES.in_all_slices(((0, 2), (1, 3))) == ((0, 4), (1, 5), (2, 6), (3, 7)), "groups along `a`"


@pytest.mark.parametrize(
    ("target", "groups"),
    [
        ('"{1,2}x{0:3}"', ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("{{100000,200000},{100003,200003}}", ((0, 2), (5, 7))),
        ("{{100000->200003},{200003->100000}}", ((0, 7), (7, 0))),
        ('"of a later version"', ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("{{100000,900000}}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_the_devices_of_a_send_between_slices(target, groups):
    assert SLICES.between_slices(f'frontend_attributes={{_xla_megascale_target={target},_xla="x"}}') == groups
