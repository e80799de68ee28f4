"""A static leaf that has another value at each call is named in a warning."""

import warnings

import pytest

from autoshard import auto_shard
from autoshard.errors import AutoshardWarning
from autoshard.sharding.runtime.constants import MANY_STATIC_VALUES
from tests.sharding.programs import batch


def test_a_leaf_with_many_values_is_named_once():
    double = auto_shard(lambda batch: batch["x"] * 2, plan="dp:8")
    for size in (16, 32):  # another shape starts another count
        for index in range(MANY_STATIC_VALUES - 1):
            double({"x": batch(size=size), "text": f"sentence {index}", "kind": "text"})
    with pytest.warns(
        AutoshardWarning, match=r"argument 'batch/text' is static.*8 values, the last 'sentence 7'"
    ) as seen:
        double({"x": batch(), "text": "sentence 7", "kind": "text"})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        double({"x": batch(), "text": "sentence 8", "kind": "text"})
