"""A decoder with a vision tower: what a feature depends on, places of features, and generation from a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.vision import TowerConfig, VisionLanguage, VisionLanguageConfig, VisionTower, token_positions
from autoshard.models.vision.grids import pack_images
from tests.models.vision.test_grids import CFG, TEXT, TOWER, image


@pytest.fixture(scope="module")
def model():
    return VisionLanguage(CFG, rngs=nnx.Rngs(0))


def random_image(height, width, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=image(height, width)[0].shape).astype("float32"), (1, height, width)


def compiled(model, run, *arguments):
    """Returns `run(model, *arguments)` under jit."""
    graph, params = nnx.split(model)
    return jax.jit(lambda params, *arguments: run(nnx.merge(graph, params), *arguments))(params, *arguments)


def features(model, packed):
    names = ("patches", "positions", "segment_ids", "region_ids")
    given = [np.moveaxis(packed[name], 1, 0) if name == "positions" else packed[name] for name in names]
    return np.asarray(compiled(model.vision, lambda tower, *given: tower(*given), *given))


def test_an_image_does_not_depend_on_its_neighbours_or_the_padding(model):
    one, other = random_image(4, 8, 0), random_image(8, 4, 1)
    tokens = np.full((1, 16), 9)
    both = features(model, pack_images(tokens, [[other, one]], CFG, patches=96))
    alone = features(model, pack_images(tokens[:, :8], [[one]], CFG, patches=32))
    assert np.abs(both[0, 8:16] - alone[0]).max() < 1e-5


@pytest.mark.slow
def test_a_window_sees_itself_and_a_whole_layer_all():
    def depends(whole):
        cfg = TowerConfig(**{**TOWER.__dict__, "whole": whole})
        tower = VisionTower(cfg, rngs=nnx.Rngs(0))
        values, grid = random_image(8, 8, 2)
        packed = pack_images(np.full((1, 16), 9), [[(values, grid)]], CFG, patches=64)

        def first(tower, patches):
            x = tower(patches, np.moveaxis(packed["positions"], 1, 0), packed["segment_ids"], packed["region_ids"])
            return jnp.sum(x[0, 0])

        gradient = compiled(tower, jax.grad(first, argnums=1), packed["patches"])
        return {int(n) for n in packed["region_ids"][0][np.asarray(jnp.any(gradient[0] != 0, axis=-1))]}

    assert depends(()) == {1} and depends((1,)) == {1, 2, 3, 4}


def test_generation_from_a_cache_equals_the_whole_row(model):
    tokens, own = np.array([[1, 9, 9, 9, 9, 2, 3, 4, 5]]), [[random_image(4, 4, 3)]]
    positions = token_positions(tokens, [[(1, 4, 4)]], CFG)
    images = pack_images(tokens, own, CFG, patches=16)

    def all_at_once(model, tokens, images, positions):
        return model(tokens, images=images, positions=positions)

    whole = compiled(model, all_at_once, tokens, images, positions)
    start = pack_images(tokens[:, :7], own, CFG, patches=16)

    def first(model, tokens, images, positions):
        counts = jnp.array([6])  # the seventh token is padding
        return model.extend(tokens, model.cache(1, 16), images=images, positions=positions, counts=counts, fresh=True)

    logits, cache = compiled(model, first, tokens[:, :7], start, positions[..., :7])
    assert jnp.abs(logits[:, :6] - whole[:, :6]).max() < 1e-5
    assert cache.following.tolist() == [positions[0, 0, 6]] != cache.lengths.tolist()  # the image took two positions
    for at in (6, 7, 8):
        logits, cache = compiled(model, lambda model, *given: model.extend(*given), tokens[:, at : at + 1], cache)
        assert jnp.abs(logits[:, 0] - whole[:, at]).max() < 1e-5


def test_configs_that_do_not_fit():
    with pytest.raises(ValueError, match="vision.out_width is 16; it must be text.width, 32"):
        VisionLanguageConfig(TEXT.__class__(**{**TEXT.__dict__, "width": 32}), TOWER, 9)
    with pytest.raises(ValueError, match="width is 12; it must be a multiple of 4 times the 2 heads"):
        TowerConfig(width=12, layers=1, heads=2, ffn=8, out_width=8)
    with pytest.raises(ValueError, match="TowerConfig: .*activation is 'tanh'"):
        TowerConfig(**{**TOWER.__dict__, "activation": "tanh"})
    with pytest.raises(ValueError, match="give region_ids"):
        VisionTower(TOWER, rngs=nnx.Rngs(0))(
            jnp.zeros((1, 4, 24)), jnp.zeros((2, 1, 4), jnp.int32), jnp.zeros((1, 4), jnp.int32)
        )
