"""Text of a pretrained folder on the device, against the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autoshard.cli import main
from autoshard.serve import Sampling, load_generator
from tests.serve.folders import make_text_folder

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("full_precision")]

PROMPTS = ["abc", "q", "hellohello", "xyzzy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_text_folder(tmp_path_factory.mktemp("model") / "tiny")


def on_the_cpu() -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:1]), ("x",), axis_types=kinds)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, seed=1)], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu(folder, sampling):
    generators = load_generator(folder, rows=2), load_generator(folder, rows=2, mesh=on_the_cpu())
    found, expected = (each.generate(PROMPTS, max_tokens=24, sampling=sampling) for each in generators)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
    assert len({reply.tokens for reply in found}) > 1
    platforms = {device.platform for x in jax.tree.leaves(generators[0].engine.steps.params) for device in x.devices()}
    assert platforms == {jax.default_backend()}


def test_the_command_writes_the_same_text(folder, capsys):
    (expected,) = load_generator(folder, rows=1, mesh=on_the_cpu()).generate(["abc"], max_tokens=8)
    assert main(["generate", str(folder), "--prompt", "abc", "--tokens", "8", "--rows", "1"]) == 0
    assert capsys.readouterr().out == f"abc{expected.text}\n"
