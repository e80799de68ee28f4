"""Each gradient, and a norm or clip over all of them, counts every parameter once, however it is sharded."""

import jax
import numpy as np
import optax
import pytest

from autoshard import auto_shard
from tests.parity.mixed_parameters import arguments, gradients_of, shapes
from tests.sharding.programs import assert_close

ARGUMENTS = arguments(shapes(seq=8, width=16, hidden=16, vocab=32, experts=8, frozen=8), batch=16)
CLIP = optax.clip_by_global_norm(0.01)


def clipped(p, tokens):
    gradients = gradients_of(p, tokens)
    return gradients, optax.tree.norm(gradients), CLIP.update(gradients, CLIP.init(gradients))[0]


@pytest.fixture(scope="module")
def single():
    return jax.device_get(jax.jit(clipped)(*ARGUMENTS))


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["tp:4 dp:2 seq", "fsdp:8", "dp:2 fsdp:2 ep:2", "zero1:2 cp:2 tp:2"])
def test_gradients_norm_and_clip_equal_one_device(words, single):
    gradients, norm, small = jax.device_get(auto_shard(clipped, plan=words)(*ARGUMENTS))
    assert_close(single[0], gradients)
    np.testing.assert_allclose(norm, single[1], rtol=1e-5)
    assert_close(single[2], small)
    assert np.sqrt(sum((g**2).sum() for g in small.values())) == pytest.approx(0.01, rel=1e-5)
