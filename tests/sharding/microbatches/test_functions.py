"""Many small functions are computed alike in microbatches, or refused."""

import jax
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.microbatches.accumulation import in_microbatches
from autoshard.sharding.microbatches.flow import find_flow
from autoshard.sharding.microbatches.operator_steps import NotCut
from autoshard.sharding.microbatches.states import Cut, Split
from autoshard.sharding.rewrite.evaluation import rewritten
from tests.sharding.microbatches.functions import FUNCTIONS, REFUSED, ROWS, TOKENS, WEIGHTS

QUICK = ("rng rows", "merge T", "reshape split", "scan carry init", "cond", "cond max", "scan max init",
         "scatter add W", "p div", "concat sums", "dus sum2", "vmap rng", "tile", "repeat", "segment",
         "grad count and one", "grad row weights",
         *REFUSED)  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FUNCTIONS])
def test_a_cut_computes_what_the_function_computes(name):
    fn = FUNCTIONS[name]
    args = WEIGHTS, TOKENS if fn.__code__.co_varnames[1] == "t" else ROWS
    closed = rewritten(_compat.dce(jax.make_jaxpr(fn)(*args)))
    for count in (2, 4):
        if name in REFUSED:
            with pytest.raises(NotCut):
                find_flow(closed, {1: Split(0)}, count)
            continue
        written = in_microbatches(closed, find_flow(closed, {1: Split(0)}, count), Cut(count))
        made = _compat.jaxpr_as_function(_compat.dce(jax.make_jaxpr(written)(*args)))(*args)
        for actual, expected in zip(made, jax.tree.leaves(fn(*args)), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
