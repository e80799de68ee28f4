"""The time of collectives on links, worked out by hand. A v5e link carries 45e9 bytes a second, a v5p one 90e9."""

import pytest
from estimate import find_target
from links import wire

B = 90e6  # bytes: 2 ms on a v5e link, 1 ms on a v5p one
MS = 1e-3


def grid(x, y, z=1):
    """The coordinates of partitions, in the order of a mesh (x, y, z)."""
    return [(i, j, k, 0) for i in range(x) for j in range(y) for k in range(z)]


ALL16 = (tuple(range(16)),)
ROWS = tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(4))  # along y of a 4 x 4
COLUMNS = tuple(tuple(range(i, 16, 4)) for i in range(4))


@pytest.mark.parametrize(
    ("name", "kind", "groups", "seconds"),
    [
        # A 4 x 4 of v5e has no rings: a device at a corner receives over one link in each dimension.
        ("v5e:4x4", "all-gather", ALL16, 15 / 16 * 2 / 2 * MS),
        ("v5e:4x4", "reduce-scatter", ALL16, 15 / 16 * 2 / 2 * MS),
        ("v5e:4x4", "all-reduce", ALL16, 2 * 15 / 16 * 2 / 2 * MS),
        ("v5e:4x4", "all-gather", ROWS, 3 / 4 * 2 * MS),
        ("v5e:4x4", "all-gather", COLUMNS, 3 / 4 * 2 * MS),
        ("v5e:4x4", "collective-broadcast", ROWS, 2 * MS),
        # Every other chip of a row: the two groups of a row share its middle link.
        ("v5e:4x4", "all-gather", tuple((4 * i + j, 4 * i + j + 2) for i in range(4) for j in range(2)), 2 * MS),
        # Neighbours: they share no link.
        ("v5e:4x4", "all-gather", tuple((4 * i + j, 4 * i + j + 1) for i in range(4) for j in (0, 2)), MS),
        # Quarters of 2 x 2 have a link in each dimension.
        ("v5e:4x4", "all-gather", ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)), 3 / 4 * MS),
        # Quarters of 2 x 2 with gaps: in each dimension two groups share a link, so 2 x 1/2.
        ("v5e:4x4", "all-gather", ((0, 2, 8, 10), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15)), 3 / 4 * 2 * MS),
        # Diagonals of 4 chips are not boxes; their four bounding boxes all overlap.
        (
            "v5e:4x4", "all-gather",
            ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)), 3 / 4 * 4 * 2 * MS,
        ),
        # Over the middle of a line of 4, each of the 2 chips on one side sends half of its payload.
        ("v5e:4x4", "all-to-all", ROWS, 2 * MS),
        ("v5e:4x4", "ragged-all-to-all", ROWS, 2 * MS),
        ("v5e:4x4", "all-to-all", tuple((i, i + 1) for i in range(0, 16, 2)), MS),
        # To the next chip of a row; the last one to the first, over the same links in the other direction.
        ("v5e:4x4", "collective-permute", tuple((i, i - i % 4 + (i + 1) % 4) for i in range(16)), 2 * MS),
        # To the next chip but one of a row: two messages share the middle link.
        ("v5e:4x4", "collective-permute", tuple((i, i + 2) for i in range(16) if i % 4 < 2), 4 * MS),
        # A group of one sends nothing.
        ("v5e:4x4", "all-reduce", tuple((i,) for i in range(16)), 0.0),
    ],
)  # fmt: skip
def test_mesh_without_rings(name, kind, groups, seconds):
    assert wire(find_target(name), kind, groups, B, grid(4, 4)).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "places", "kind", "groups", "seconds"),
    [
        # v5p 4 x 4 x 4: rings in all three dimensions, two ways each.
        ("v5p:4x4x4", grid(4, 4, 4), "all-gather", (tuple(range(64)),), 63 / 64 / 6 * MS),
        ("v5p:4x4x4", grid(4, 4, 4), "all-reduce", (tuple(range(64)),), 2 * 63 / 64 / 6 * MS),
        (
            "v5p:4x4x4", grid(4, 4, 4), "all-gather",
            tuple(tuple(range(16 * i, 16 * i + 16)) for i in range(4)), 15 / 16 / 4 * MS,
        ),
        ("v5p:4x4x4", grid(4, 4, 4), "all-to-all", (tuple(range(64)),), 4 / 8 * MS),
        # Half of a ring is a line. Every other chip of a ring is a ring that two groups share.
        (
            "v5p:4x4x4", grid(4, 4, 4), "all-gather",
            tuple((i + j, i + j + 1) for i in range(0, 64, 4) for j in (0, 2)), 1 / 2 * MS,
        ),
        (
            "v5p:4x4x4", grid(4, 4, 4), "all-gather",
            tuple((i + j, i + j + 2) for i in range(0, 64, 4) for j in range(2)), 1 / 2 * MS,
        ),
        # To the next chip of a ring: each link carries one message, the shorter way around.
        (
            "v5p:4x4x4", grid(4, 4, 4), "collective-permute",
            tuple((i + j, i + (j + 1) % 4) for i in range(0, 64, 4) for j in range(4)), MS,
        ),
        # 2 x 2 x 4 is less than a cube, so it has no rings. 8 x 16 of v5e has a ring only in the dimension of 16.
        ("v5p:2x2x4", grid(2, 2, 4), "all-gather", (tuple(range(16)),), 15 / 16 / 3 * MS),
        ("v5e:8x16", grid(8, 16), "all-gather", (tuple(range(128)),), 127 / 128 / 3 * 2 * MS),
        ("v5e:16x16", grid(16, 16), "all-gather", (tuple(range(256)),), 255 / 256 / 4 * 2 * MS),
    ],
)  # fmt: skip
def test_rings(name, places, kind, groups, seconds):
    assert wire(find_target(name), kind, groups, B, places).seconds == pytest.approx(seconds)


def test_two_devices_of_a_chip():
    """They share the chip's links. Between themselves they use the chip's memory."""
    target = find_target("v5p:4x4x4")
    coordinates = [(x, 0, 0, core) for x in range(4) for core in range(2)]
    together = wire(target, "all-gather", (tuple(range(8)),), B, coordinates)
    apart = wire(target, "all-gather", ((0, 2, 4, 6), (1, 3, 5, 7)), B, coordinates)
    inside = wire(target, "all-gather", ((0, 1), (2, 3), (4, 5), (6, 7)), B, coordinates)
    assert together.seconds == pytest.approx(3 / 4 / 2 * MS)
    assert apart.seconds == pytest.approx(3 / 4 * MS)
    assert (inside.seconds, inside.links) == (pytest.approx(B / 2765e9), frozenset())


def test_short_messages_take_the_time_of_their_hops():
    target = find_target("v5e:4x4")
    assert wire(target, "all-gather", ALL16, 4, grid(4, 4)).seconds == pytest.approx(6e-6)
    assert wire(target, "all-reduce", ALL16, 4, grid(4, 4)).seconds == pytest.approx(12e-6)
    assert wire(target, "collective-permute", ((0, 15),), 4, grid(4, 4)).seconds == pytest.approx(6e-6)
    around = find_target("v5p:4x4x4")  # the ends of a ring are one hop apart
    assert wire(around, "collective-permute", ((0, 3),), 4, grid(4, 4, 4)).seconds == pytest.approx(1e-6)
    full = find_target("v5e:16x16")
    assert wire(full, "all-gather", (tuple(range(256)),), 4, grid(16, 16)).seconds == pytest.approx(16e-6)


NVLINK, NETWORK = B / 405e9, B / 45e9
HOSTS = tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(4))


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all-gather", HOSTS, 7 / 8 * NVLINK),
        ("all-reduce", HOSTS, 2 * 7 / 8 * NVLINK),
        ("all-gather", (tuple(range(32)),), 31 / 32 * NVLINK),  # the network needs less time
        ("all-gather", ((0, 1, 8, 9, 16, 17, 24, 25),), 3 / 4 / 2 * NETWORK),
        ("all-gather", tuple(tuple(range(i, 32, 8)) for i in range(8)), 3 / 4 * NETWORK),
        ("all-to-all", (tuple(range(32)),), 24 / 32 * NETWORK),
        ("all-to-all", HOSTS, 7 / 8 * NVLINK),
        ("collective-permute", ((0, 1), (1, 0)), NVLINK),
        ("collective-permute", ((0, 1), (1, 8)), NETWORK),
        ("all-gather", ((0, 8),), 1 / 2 * NETWORK),
    ],
)
def test_hosts(kind, groups, seconds):
    target = find_target("h100:4x8")
    assert wire(target, kind, groups, B, target.places()).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("all-gather", 1 / 2), ("all-reduce", 2 / 2), ("all-to-all", 1 / 2), ("collective-permute", 1)],
)
def test_slices(kind, seconds):
    """A device sends 3.125e9 bytes a second to other slices, and large messages reach 0.9 of that."""
    target = find_target("v5e:4x4*2")
    groups = tuple((100000 + n, 200000 + n) for n in range(16))
    found = wire(target, kind, groups, B, grid(4, 4))
    assert found.seconds == pytest.approx(seconds * B / (0.9 * 3.125e9)) and found.links == {"network"}
    inside = wire(target, "all-gather", ROWS, B, grid(4, 4))
    assert inside == wire(find_target("v5e:4x4"), "all-gather", ROWS, B, grid(4, 4)), "partitions of one slice"


def test_occupied_links():
    """Collectives along different dimensions share no links, and neither do permutes in opposite directions."""
    target, coordinates = find_target("v5e:4x4"), grid(4, 4)
    rows, columns = (wire(target, "all-gather", groups, B, coordinates).links for groups in (ROWS, COLUMNS))
    on = tuple((4 * i + j, 4 * i + j + 1) for i in range(4) for j in range(3))
    forward, backward = (
        wire(target, "collective-permute", pairs, B, coordinates).links for pairs in (on, tuple((b, a) for a, b in on))
    )
    assert not rows & columns and not forward & backward and forward < rows and backward < rows


@pytest.mark.parametrize("name", ["v5e", "v5e:4x4x4", "v99:4x4", "h100:8"])
def test_unknown_target(name):
    with pytest.raises(ValueError, match="is not a target"):
        find_target(name)
