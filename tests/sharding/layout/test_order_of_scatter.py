"""In which order of dimensions a product is reduce-scattered: only behind dimensions of size 1."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.layout.operator_sharding import order_of_scatter

MESH = {"pp": 2, "tp": 4}
Fake: Any = SimpleNamespace


def order(shape, computed, want, transpose=None, kind="reduce-scatter", name="dot_general"):
    """The order for a product of a shape that is computed in one sharding and wanted in another."""
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)
    op = Fake(name=name, rule=Fake(results=[None]), results=(7,), eqn=Fake(outvars=[Fake(aval=aval)]))
    strategy = Fake(moves=[Fake(array=-1, kind=kind, axes=("tp",))], spec=lambda _: computed)
    transposed = {} if transpose is None else {7: (8, transpose)}
    return order_of_scatter(Fake(mesh=MESH, roles=Fake(transposed_gradients=transposed)), op, strategy, want)


STAGES = ((2, 16, 8), (("pp",), (), ()), (("pp",), ("tp",), ()))


def test_one_stage_on_each_device_is_dropped():
    assert order(*STAGES) == (0, 1, 2)
    assert order((1, 16, 8), ((), (), ()), ((), ("tp",), ())) == (0, 1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (4, 16, 8)},  # two stages on a device
        {"kind": "all-reduce"},
        {"name": "mul"},
        {"computed": ((), ("pp",), ()), "want": (("tp",), ("pp",), ())},  # along the first dimension already
        {"shape": (2, 16, 8), "want": (("pp",), ("tp",), ("pp",))},  # along two
    ],
)
def test_other_results_are_left_to_the_partitioner(arguments):
    shape, computed, want = STAGES
    assert order(**{"shape": shape, "computed": computed, "want": want} | arguments) is None


def test_a_gradient_is_scattered_after_its_transpose():
    computed, want = (("pp",), (), ()), (("pp",), (), ("tp",))
    assert order((2, 16, 8), computed, want) is None  # behind 16 rows
    assert order((2, 16, 8), computed, want, transpose=(0, 2, 1)) == (0, 2, 1)
