"""Replica groups in every form, and the mesh axes that they span."""

import pytest

from autoshard.sharding.hlo.replica_groups import axes_of, groups_of

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ROWS),
        ("channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", COLUMNS),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", ROWS),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ROWS),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=1], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("source_target_pairs={{0,1},{1,0}}, channel_id=2", ((0, 1), (1, 0))),
        ('frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5}}"}', ((0, 4), (1, 5))),
        ("replica_groups={}, dimensions={0}", (tuple(range(8)),)),
        ("dimensions={0}", (tuple(range(8)),)),
    ],
)
def test_groups(attributes, groups):
    assert groups_of(attributes, 8) == groups


MESH = {"dp": 2, "one": 1, "fsdp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tp",)),
        (((1, 0), (3, 2), (5, 4), (7, 6)), ("tp",)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("fsdp",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("fsdp", "tp")),
        (((0, 4, 1, 5), (2, 6, 3, 7)), ("dp", "tp")),
        ((tuple(range(8)),), ("dp", "fsdp", "tp")),
        (tuple((i,) for i in range(8)), ()),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None),  # diagonal: not along an axis
        (((0, 1), (2, 3)), None),  # some devices are in no group
        (((0, 1), (4, 5), (2, 6), (3, 7)), None),
        (((0, 9),), None),
    ],
)
def test_axes_that_groups_span(groups, axes):
    assert axes_of(groups, MESH) == axes


def test_axes_along_which_pairs_send():
    assert axes_of(((0, 1), (1, 0), (2, 3)), MESH, pairs=True) == ("tp",)
    assert axes_of(((0, 3), (3, 0)), MESH, pairs=True) == ("fsdp", "tp")
    assert axes_of(((0, 0), (1, 1)), MESH, pairs=True) == ()
    assert axes_of(((0, 0),), {}, pairs=True) == ()
