"""The loss of pairs of answers equals an independent formula in double precision."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import load_pretrained
from autoshard.models.adapters import LoraConfig, add_adapters
from autoshard.models.decoder import Decoder
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.train.step.preference import DpoConfig, dpo_loss
from tests.models.pretrained.folders import LLAMA, make_folder

# Relative errors, measured by the first test with JAX 0.10.2 on CPU: the loss differs from the formula by 5e-8 and its
# gradient by 1.5e-7. The smallest mutant changes the loss by 1.1e-2, and the gradient by 2.2e-2.
TOLERANCE = 2e-5
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
CONFIG = DpoConfig(beta=0.5, label_smoothing=0.1)


def batch() -> dict[str, jax.Array]:
    """Makes four pairs, of which the last is padding, with answers and prompts of different lengths."""
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 24, (4, 2, 13)), np.zeros((4, 2, 12), np.float32)
    for pair, prompt, ends in ((0, 3, (9, 7)), (1, 5, (6, 12)), (2, 1, (4, 4))):
        tokens[pair, 1, : prompt + 1] = tokens[pair, 0, : prompt + 1]
        for side, end in enumerate(ends):
            mask[pair, side, prompt:end] = 1
    return {"inputs": jnp.asarray(tokens[..., :-1]), "targets": jnp.asarray(tokens[..., 1:]), "mask": jnp.asarray(mask)}


def models(folder: Path) -> tuple[Decoder, Decoder]:
    """Makes a model with adapters that have an effect, and the same model without."""
    make_folder(folder, ONE_LAYER)
    plain, model = (
        nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
        for graph, state in (nnx.split(load_pretrained(folder, plan="dp:8")) for _ in range(2))
    )
    lora = LoraConfig(rank=2, targets=("attention/*", "mlp/*"))
    add_adapters(model, family_of(ONE_LAYER, ""), lora, jax.random.key(0))
    state = nnx.to_pure_dict(nnx.state(model))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    drawn = [
        0.05 * jax.random.normal(jax.random.key(n), leaf.shape) if "lora_b" in jax.tree_util.keystr(path) else leaf
        for n, (path, leaf) in enumerate(leaves)
    ]
    nnx.update(model, tree.unflatten(drawn))
    return model, plain


def formula(
    logits: list[np.ndarray], targets: np.ndarray, mask: np.ndarray, config: DpoConfig, mutant: str = ""
) -> tuple[float, np.ndarray]:
    """Computes the mean loss, and its derivative with respect to the model's log-probability of each answer."""
    if mutant == "the last token does not count":
        mask = mask * (np.cumsum(mask[..., ::-1], -1)[..., ::-1] > 1)
    if mutant == "a token after the end counts":
        mask = np.maximum(mask, np.roll(mask, 1, -1))
    answers = []
    for each in logits:
        peak = each.max(-1, keepdims=True)
        logs = each - peak - np.log(np.exp(each - peak).sum(-1, keepdims=True))
        answers.append((np.take_along_axis(logs, targets[..., None], -1)[..., 0] * mask).sum(-1))
    policy, reference = answers
    if mutant == "means of tokens":
        policy, reference = (each / np.maximum(mask.sum(-1), 1) for each in answers)
    if mutant == "no reference":
        reference = np.zeros_like(reference)
    sign = -1 if mutant == "the wrong way round" else 1
    margins = sign * config.beta * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    smoothing = 0 if mutant == "no smoothing" else config.label_smoothing
    sigmoid = 1 / (1 + np.exp(-margins))
    losses = -(1 - smoothing) * np.log(sigmoid) - smoothing * np.log(1 - sigmoid)
    counts = mask.any((1, 2)) | (mutant == "padding counts")
    slope = sign * config.beta * (sigmoid - 1 + smoothing) * counts / counts.sum()
    return float((losses * counts).sum() / counts.sum()), np.stack([slope, -slope], -1)


MUTANTS = ("the last token does not count", "a token after the end counts", "means of tokens", "no reference",
           "the wrong way round", "no smoothing", "padding counts")  # fmt: skip


def relative(found: Any, want: Any) -> float:
    """The norm of a difference over that of what is wanted."""
    return float(np.linalg.norm(np.asarray(found) - want) / np.linalg.norm(want))


def test_loss_and_gradient_equal_the_formula_and_no_mutant_does(tmp_path: Path) -> None:
    model, plain = models(tmp_path / "model")
    given = batch()
    inputs, targets, mask = (given[name] for name in ("inputs", "targets", "mask"))
    flat = inputs.reshape(-1, 12)
    graph, params = nnx.split(model)

    def mean(params: Any) -> jax.Array:
        total, count = dpo_loss(nnx.merge(graph, params), given, CONFIG)
        return total / count

    loss, gradient = jax.jit(jax.value_and_grad(mean))(params)

    # A change of the base would change the reference with it: its gradient is that of the model's own pass alone.
    def log_probabilities(params: Any) -> jax.Array:
        return jax.nn.log_softmax(nnx.merge(graph, params)(flat).astype(jnp.float32))

    logits = jax.jit(log_probabilities)(params)
    pull = jax.jit(lambda cotangent: jax.vjp(log_probabilities, params)[1](cotangent))
    both = [np.asarray(each, np.float64).reshape(4, 2, 12, 24) for each in (logits, plain(flat))]
    ends, counts = np.asarray(targets), np.asarray(mask, np.float64)

    def gradient_of(slope: np.ndarray) -> np.ndarray:
        cotangent = np.eye(24)[ends] * counts[..., None] * slope[..., None, None]
        return flattened(pull(jnp.asarray(cotangent.reshape(logits.shape), logits.dtype))[0])

    def flattened(tree: Any) -> np.ndarray:
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])

    want, slope = formula(both, ends, counts, CONFIG)
    noise = abs(float(loss) / want - 1), relative(flattened(gradient), gradient_of(slope))
    mutants = {name: formula(both, ends, counts, CONFIG, name) for name in MUTANTS}
    changes = {name: abs(found / want - 1) for name, (found, _) in mutants.items()}
    slopes = {name: relative(gradient_of(found), gradient_of(slope)) for name, (_, found) in mutants.items()}
    assert max(noise) < TOLERANCE < min(*changes.values(), *slopes.values()), (noise, changes, slopes)
    frozen = dpo_loss(plain, given, CONFIG)
    assert float(frozen[0] / frozen[1]) == pytest.approx(np.log(2), rel=1e-6) and frozen[1] == 3


def test_a_frozen_copy_is_the_reference_of_a_model_without_adapters(tmp_path: Path) -> None:
    model, plain = models(tmp_path / "model")

    def loss(model: Decoder) -> Any:
        graph, state = nnx.split(model)
        run = jax.jit(
            jax.value_and_grad(lambda state: dpo_loss(nnx.merge(graph, state), batch(), CONFIG), has_aux=True)
        )
        (total, count), gradient = run(state)
        return (total, count), gradient

    want, _ = loss(model)
    model.reference = plain  # pyright: ignore[reportAttributeAccessIssue] - an attribute of trained models alone
    found, gradient = loss(model)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    leaves = {
        path: np.abs(leaf).max() for path, leaf in parameters_of(nnx.merge(nnx.graphdef(model), gradient)).items()
    }
    assert all((value == 0) == path.startswith("reference/") for path, value in leaves.items()), leaves


def test_invalid_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"dpo\.beta is 0.*dpo\.label_smoothing is 0\.5"):
        DpoConfig(0, 0.5)
