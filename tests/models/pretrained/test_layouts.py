"""Layouts: from a stored tensor to a parameter, range by range, and back."""

import itertools

import numpy as np
import pytest

from autoshard.models.pretrained.layouts import Layout

CASES = {
    "plain": (Layout("v e -> v e"), (5, 4)),
    "transposed": (Layout("f e -> e f"), (4, 6)),
    "heads first": (Layout("(h d) e -> e h d"), (4, 3, 2)),
    "heads last": (Layout("e (h d) -> h d e"), (3, 2, 4)),
    "experts": (Layout("x e f -> x f e"), (2, 3, 4)),
    "part outside": (Layout("(part f) e -> e f", 1, 3), (4, 6)),
    "part inside": (Layout("x e (f part) -> x e f", 1, 2), (2, 3, 4)),
    "part between": (Layout("(h part d) e -> e h d", 2, 3), (4, 3, 2)),
}


def ranges(size):
    return [slice(0, size), slice(0, 1), slice(size - 1, size), slice(1, size)]


def parameter_of(layout, tensor, shape):
    """Makes the parameter with plain NumPy: split the groups, move the dimensions, take the part."""
    sizes = {**dict(zip(layout.names, shape, strict=True)), "part": layout.parts}
    names = [name for group in layout.groups for name in group]
    split = tensor.reshape([sizes[name] for name in names])
    if "part" in names:
        split = split.take(layout.part, axis=names.index("part"))
        names.remove("part")
    return np.einsum(split, [ord(n[0]) - 97 for n in names], [ord(n[0]) - 97 for n in layout.names])


@pytest.mark.parametrize("case", CASES)
def test_every_range_is_read_from_its_place_alone(case):
    layout, shape = CASES[case]
    tensor_shape = layout.tensor_shape(shape)
    tensor = np.arange(np.prod(tensor_shape)).reshape(tensor_shape)
    whole = parameter_of(layout, tensor, shape)
    for index in itertools.product(*map(ranges, shape)):
        read = tensor[layout.tensor_index(index, shape)]
        assert np.array_equal(layout.parameter(read, index, shape), whole[index]), index


@pytest.mark.parametrize("case", CASES)
def test_write_undoes_parameter(case):
    layout, shape = CASES[case]
    tensor_shape = layout.tensor_shape(shape)
    tensor = np.arange(np.prod(tensor_shape)).reshape(tensor_shape)
    again = np.full_like(tensor, -1)
    for part in range(layout.parts):
        each = Layout(layout.text, part, layout.parts)
        each.write(again, parameter_of(each, tensor, shape))
    assert np.array_equal(again, tensor)


def test_a_shard_of_heads_reads_no_other_heads():
    layout, shape = Layout("(h d) e -> e h d"), (4, 8, 2)
    assert layout.tensor_index((slice(0, 4), slice(2, 4), slice(0, 2)), shape) == (slice(4, 8), slice(0, 4))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_pieces_divide_a_range_in_the_order_of_the_tensor(case, most):
    layout, shape = CASES[case]
    tensor_shape = layout.tensor_shape(shape)
    places = parameter_of(layout, np.arange(np.prod(tensor_shape)).reshape(tensor_shape), shape)
    for index in itertools.product(*map(ranges, shape)):
        pieces = [places[piece] for piece in layout.pieces(index, shape, most)]
        assert max(piece.size for piece in pieces) <= most
        assert np.array_equal(
            np.sort(np.concatenate([piece.ravel() for piece in pieces])), np.sort(places[index].ravel())
        )
        assert all(a.max() < b.min() for a, b in itertools.pairwise(pieces)), index


def test_pieces_are_as_large_as_their_limit_allows():
    layout, shape = Layout("(h d) e -> e h d"), (10, 6, 4)
    assert list(layout.pieces((slice(0, 10), slice(0, 6), slice(0, 4)), shape, 90)) == [
        (slice(0, 10), slice(n, n + 2), slice(0, 4)) for n in (0, 2, 4)
    ]
