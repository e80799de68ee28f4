"""Positions, windows and places of images, on the host."""

import numpy as np
import pytest

from autoshard.errors import AutoshardError
from autoshard.models.decoder import DecoderConfig, LayerKind, Rotary
from autoshard.models.vision import TowerConfig, VisionLanguageConfig, pack_images, token_positions
from autoshard.models.vision.grids import bucket, window_ids

TEXT = DecoderConfig(
    vocab=32, width=16, kinds=(LayerKind(rotary=Rotary(sections=(1, 1, 2))),), heads=2, kv_heads=1, head_dim=8, ffn=16,
    context=64,
)  # fmt: skip
TOWER = TowerConfig(width=16, layers=2, heads=2, ffn=16, out_width=16, patch=2, window=2, whole=(1,))
CFG = VisionLanguageConfig(TEXT, TOWER, image_token=9)


def image(height, width, value=0.0):
    return np.full((height * width, TOWER.patch_size), value, np.float32), (1, height, width)


def test_positions_of_tokens_before_in_and_behind_an_image():
    tokens = np.array([[1, 2, *[9] * 6, 3, 4]])
    found = token_positions(tokens, [[(1, 4, 6)]], CFG)
    assert found[0].T.tolist() == [
        [0, 0, 0], [1, 1, 1],
        [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4],
        [5, 5, 5], [6, 6, 6],
    ]  # fmt: skip


def test_windows_at_the_edges_are_smaller_and_frames_have_their_own():
    assert np.bincount(window_ids((1, 6, 8), 2, 2)).tolist() == [16, 16, 8, 8]
    assert np.bincount(window_ids((2, 4, 2), 2, 4)).tolist() == [8, 8]


def test_images_of_a_row_have_ids_and_places_of_their_own():
    tokens = np.array([[1, 9, 9, 2, 9], [9, 1, 1, 1, 1]])
    packed = pack_images(tokens, [[image(2, 4, 1.0), image(2, 2, 2.0)], [image(2, 2, 3.0)]], CFG, patches=16)
    assert packed["segment_ids"].tolist() == [[1] * 8 + [2] * 4 + [0] * 4, [1] * 4 + [0] * 12]
    assert packed["region_ids"].max() == 2 and packed["places"].tolist() == [[-1, 0, 1, -1, 2], [0, -1, -1, -1, -1]]
    assert packed["patches"][:, :, 0].tolist() == [[1.0] * 8 + [2.0] * 4 + [0.0] * 4, [3.0] * 4 + [0.0] * 12]


def test_rows_of_few_lengths_share_a_program():
    assert {bucket(n, 2) for n in range(1, 1025)} == {256, 512, 1024}
    assert bucket(256, 3) == 261
    tokens, others = np.full((1, 12), 9), np.array([[9, 9, 1, 9, *[1] * 8]])
    shapes = [
        {name: (x.shape, x.dtype) for name, x in pack_images(tokens, own, CFG).items()}
        for tokens, own in ((tokens, [[image(6, 8)]]), (others, [[image(2, 4), image(2, 2)]]))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "tokens, images, options, message",
    [
        ([[9, 1]], [[image(2, 4)]], {}, "row 0 has 1 image tokens .* its 1 images have 2 features"),
        ([[9, 1]], [[image(2, 3)]], {}, "multiples of 2"),
        ([[9, 9]], [[image(2, 4)]], {"patches": 4}, "at least 8, the patches of the largest row"),
    ],
)
def test_images_that_do_not_fit(tokens, images, options, message):
    with pytest.raises(AutoshardError, match=message):
        pack_images(np.array(tokens), images, CFG, **options)


def test_tokens_between_those_of_an_image():
    with pytest.raises(AutoshardError, match="the image from token 0 on has 2 features"):
        token_positions(np.array([[9, 1, 9]]), [[(1, 2, 4)]], CFG)
