"""Continuous batching: each text is what the model gives for its prompt alone, in any order and under any plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.serve import Engine, Request, Sampling

SIZES = {"vocab": 32, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 32, "context": 48, "init_std": 0.5}
CONFIG = DecoderConfig(kinds=(LayerKind(window=6), LayerKind()), **SIZES)
PROMPTS = [np.random.default_rng(n).integers(0, 32, n).tolist() for n in (3, 35, 9, 1, 20, 7, 2)]


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def expected(model):
    """The greedy tokens of each prompt, recomputed from the whole text for each of them."""
    graph, params = nnx.split(model)
    logits = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(10):
            padded = np.zeros((1, 48), np.int32)
            padded[0, : len(text)] = text
            text.append(int(jnp.argmax(logits(params, padded)[0, len(text) - 1])))
        found.append(tuple(text[len(prompt) :]))
    return found


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, rows=3, mesh={"x": 1})


def test_rows_take_the_next_prompt_and_results_keep_the_order(engine, expected):
    lengths = [10, 4, 7, 10, 1, 0, 9]
    calls = []
    requests = [Request(prompt, n) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    found = engine.run(requests, lambda *call: calls.append(call))
    assert [one.tokens for one in found] == [text[:n] for text, n in zip(expected, lengths, strict=True)]
    assert {one.reason for one in found} == {"tokens"}
    for n, one in enumerate(found):
        assert tuple(token for index, token in calls if index == n) == one.tokens
    places = [index for index, _ in calls]
    assert places.index(4) < len(places) - 1 - places[::-1].index(0)  # prompt 4 started before prompt 0 ended


def test_stop_tokens_callbacks_and_full_rows_end_a_text(engine, expected):
    text = expected[0]
    stop = text[4]
    (found,) = engine.run([Request(PROMPTS[0], 10, stop=frozenset({stop, 99}))])
    assert (found.tokens, found.reason) == (text[: text.index(stop)], "stop")
    (found,) = engine.run([Request(PROMPTS[0], 10)], lambda n, token: token == stop)
    assert (found.tokens, found.reason) == (text[: text.index(stop) + 1], "text")
    (found,) = engine.run([Request([*PROMPTS[1]] + [1] * 10, 10)])
    assert (len(found.tokens), found.reason) == (4, "length")  # 48 positions, and one token that is not cached


def test_seeded_texts_depend_on_no_other_row(engine):
    settings = Sampling(1.0, top_p=0.9, repetition_penalty=1.2, seed=5)
    requests = [Request(prompt, 8, settings, number=n) for n, prompt in enumerate(PROMPTS)]
    found = engine.run(requests)
    assert [engine.run([one])[0] for one in requests[2:4]] == found[2:4]
    assert engine.run(requests[::-1])[::-1] == found
    assert engine.run([Request(PROMPTS[2], 8, settings, number=50)])[0] != found[2]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["fsdp:2 tp:2", pytest.param("tp:2", marks=pytest.mark.slow)])
def test_plans_give_the_same_texts(model, expected, words):
    engine = Engine(model, rows=4, plan=words, target="cpu:" + ("2" if words == "tp:2" else "4"))
    found = engine.run([Request(prompt, 10) for prompt in PROMPTS])
    assert [one.tokens for one in found] == expected


def test_wrong_prompts_are_named_together_before_anything_runs(engine):
    with pytest.raises(ConfigError, match="(?s)prompt 0 is empty.*prompt 7 has token 32.*prompt 2 has 49 tokens"):
        engine.run([Request([]), Request([32], number=7), Request([1] * 49)])
    with pytest.raises(ConfigError, match="rows is 0.*length is 49"):
        Engine(Decoder(CONFIG, rngs=nnx.Rngs(0)), rows=0, length=49)


def test_no_program_is_compiled_after_the_first_prompts_of_each_length(engine, caplog):
    with jax.log_compiles():
        engine.run([Request(prompt, 3) for prompt in PROMPTS])
        jax.jit(lambda x: x + 1)(1.0)
        assert "Compiling" in caplog.text  # compilation is seen
        caplog.clear()
        engine.run([Request(prompt[::-1], 5, Sampling(0.5, top_k=3)) for prompt in PROMPTS[::-1]])
        assert "Compiling" not in caplog.text
