"""The plans of the two steps: one state with one sharding, and parameters where the step that reads them wants them."""

import jax.numpy as jnp
import pytest

from autoshard.errors import PlanError
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.load import Described, load_pretrained
from autoshard.models.pretrained.parameter_paths import as_tree, by_path
from autoshard.serve.engine import Engine
from autoshard.serve.sampling import GREEDY, Settings
from autoshard.serve.steps import Prompts, Steps
from tests.models.pretrained.folders import LLAMA, MIXTRAL, QWEN2_5_VL, make_folder


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["ep:4 fsdp:2", "dp:4 tp:2"])
def test_the_prefill_step_keeps_the_shardings_of_the_decode_step(tmp_path, words):
    # With a small window, the prefill step alone would shard the slots of the cache.
    folder = make_folder(tmp_path / "model", {**MIXTRAL, "sliding_window": 6})
    steps = Engine(load_pretrained(folder, plan="fsdp:8", batch=(8, 16)), rows=8, plan=words).steps
    settings = Settings.of([GREEDY] * 8, [0] * 8)
    tokens, counts, source = (jnp.zeros(shape, jnp.int32) for shape in ((8, 32), (8,), (8,)))
    prompts = Prompts(tokens, counts, jnp.zeros((8, 24), bool), source, settings)
    decode, prefill = steps.plan.in_shardings(), steps.prefill_plan(steps.new_state(), prompts).in_shardings()
    assert all(leaf.sharding == by_path(decode[0])[path] for path, leaf in by_path(steps.params).items())
    for argument in (0, 1):
        for path, sharding in by_path(decode[argument]).items():
            assert by_path(prefill[argument])[path].spec == sharding.spec, path


def test_a_pipeline_is_refused_with_advice():
    with pytest.raises(PlanError, match="'pp:2 fsdp:4' has pp:2, but generation .* such as tp:2 in the place of pp:2"):
        Steps(None, {}, 8, 32, {"plan": "pp:2 fsdp:4"})


def test_the_seeds_of_four_rows_are_not_words_of_a_random_key(tmp_path):
    """The prefill step reads no old seeds. As words of a key, they would make the rows of the cache its batch."""
    described = Described.of(Folder.open(make_folder(tmp_path / "model", LLAMA)), None, {})
    steps = Steps(described.graph, as_tree(described.shapes), 4, 32, {"plan": "dp:4 tp:2"})
    settings = Settings.of([GREEDY] * 4, [0] * 4)
    tokens, counts, source = (jnp.zeros(shape, jnp.int32) for shape in ((4, 32), (4,), (4,)))
    made = steps.prefill_plan(
        steps.decode_shapes()[1], Prompts(tokens, counts, jnp.zeros((4, 24), bool), source, settings)
    )
    assert made.in_shardings()[2].tokens.spec[0] == "dp"


def test_the_prefill_plan_shards_the_tower(tmp_path):
    files = Folder.open(make_folder(tmp_path / "model", QWEN2_5_VL))
    described = Described.of(files, None, {})
    steps = Steps(described.graph, as_tree(described.abstract(files.tensors())), 4, 64, {"plan": "fsdp:4 tp:2"})
    found = steps.shardings(4)
    assert found.keys() == described.shapes.keys()
    whole = [path for path, one in found.items() if "vision" in path and "/w" in path and "tp" not in str(one)]
    assert not whole
    assert found["text/embed"] == steps.plan.in_shardings()[0]["text"]["embed"]
