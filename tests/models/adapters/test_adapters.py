"""Low-rank adapters: a new one changes nothing, PEFT's files go both ways, and merged weights compute the same."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from autoshard.ckpt.exchange.export import write_model
from autoshard.ckpt.exchange.lora import merge_adapter, read_adapter, read_model
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models import load_pretrained, save_pretrained
from autoshard.models.adapters import LoraConfig, add_adapters, load_adapter, save_adapter
from autoshard.models.decoder import Decoder
from autoshard.models.decoder.adapted import Adapted
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.parameter_paths import parameters_of
from tests.models.pretrained.folders import LLAMA, MIXTRAL, make_folder

DEEPSEEK: dict[str, Any] = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}  # fmt: skip
TOKENS = jnp.arange(24).reshape(2, 12) % 24
LORA = LoraConfig(rank=2, alpha=3, targets=("attention/*", "mlp/*"))


logits = nnx.jit(lambda model: model(TOKENS))


def load(folder: Path, **changes: Any) -> Decoder:
    """Loads a folder onto one device."""
    graph, state = nnx.split(load_pretrained(folder, plan="dp:8", **changes))
    return nnx.merge(graph, jax.device_put(state, jax.devices()[0]))


def adapted(folder: Path, lora: LoraConfig, config: dict[str, Any] = LLAMA, **changes: Any) -> Decoder:
    """Loads a folder with adapters whose second factors are not zero."""
    model = load(folder, **changes)
    before = logits(model)
    add_adapters(model, family_of(config, ""), lora, jax.random.key(0))
    if lora.dora:  # the norms are computed twice, in two ways
        np.testing.assert_allclose(logits(model), before, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(logits(model), before)
    for path in [path for path in parameters_of(model) if path.endswith(("lora_b", "lora_scale"))]:
        parent: Any = model
        *outer, name = path.split("/")
        for level in outer:
            parent = parent[int(level)] if level.isdecimal() else getattr(parent, level)
        value = getattr(parent, name)
        value[...] = value[...] + 0.1 * jax.random.normal(jax.random.key(len(path)), value[...].shape)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "scan", "dora"),
    [(LLAMA, True, False), (DEEPSEEK, False, False), (LLAMA, True, True), (DEEPSEEK, False, True)],
    ids=["llama", "deepseek", "llama-dora", "deepseek-dora"],
)
def test_an_adapter_in_pefts_format_merges_and_loads_to_the_same_model(
    tmp_path: Path, scan: bool, config: dict[str, Any], dora: bool
) -> None:
    folder = make_folder(tmp_path / "model", config)
    lora = LoraConfig(rank=2, alpha=3, targets=("attention/*",), rslora=not dora, dora=dora)
    model = adapted(folder, lora, config, scan_layers=scan)
    save_adapter(model, tmp_path / "adapter", lora, base="model")
    # Merged by code that knows only PEFT's format.
    write_model(merge_adapter(read_model(folder), read_adapter(tmp_path / "adapter")), tmp_path / "merged")
    merged = load(tmp_path / "merged")
    assert np.abs(logits(merged) - logits(load(folder))).max() > 1e-2
    np.testing.assert_allclose(logits(model), logits(merged), rtol=1e-4, atol=1e-5)
    again = load(folder, scan_layers=not scan)
    loaded = load_adapter(again, tmp_path / "adapter")
    assert (loaded.rank, loaded.alpha, loaded.rslora, loaded.dora) == (2, 3, not dora, dora)
    np.testing.assert_allclose(logits(model), logits(again), rtol=1e-4, atol=1e-5)


def test_the_names_are_those_of_peft(tmp_path: Path) -> None:
    model = adapted(make_folder(tmp_path / "model", LLAMA), LORA)
    save_adapter(model, tmp_path / "adapter", LORA)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.2."
    assert tensors[f"{prefix}self_attn.k_proj.lora_A.weight"].shape == (2, 16)
    assert tensors[f"{prefix}self_attn.k_proj.lora_B.weight"].shape == (8, 2)
    assert tensors[f"{prefix}mlp.down_proj.lora_A.weight"].shape == (2, 32)
    assert len(tensors) == 2 * 7 * 3
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 3, modules)


@pytest.mark.slow
def test_the_magnitudes_of_dora_have_pefts_names_and_are_checked(tmp_path: Path) -> None:
    lora = dataclasses.replace(LORA, dora=True)
    save_adapter(adapted(make_folder(tmp_path / "model", LLAMA), lora), tmp_path / "adapter", lora)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.2.self_attn.k_proj.lora_magnitude_vector"
    assert tensors[name].shape == (8,) and len(tensors) == 3 * 7 * 3
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    save_file({other: value for other, value in tensors.items() if other != name}, file)
    with pytest.raises(AutoshardError, match=r"layers\.2\.self_attn\.k_proj: no magnitudes, and use_dora is True"):
        load_adapter(load(tmp_path / "model"), tmp_path / "adapter")


def test_the_norms_of_dora_are_constants_for_the_gradient(tmp_path: Path) -> None:
    """If the norms had gradients, a change of a factor along its own column would have almost none."""
    weight, a, b = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(6, 4), (6, 2), (2, 4)]))
    x, magnitudes = jax.random.normal(jax.random.key(3), (5, 6)), jnp.arange(1.0, 5.0)

    def value(a: jax.Array, b: jax.Array, magnitudes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(Adapted(nnx.Param(weight), a, b, 0.5, magnitudes).project("se,ef->sf", x)))

    norms = jnp.linalg.norm(weight + 0.5 * a @ b, axis=0)

    def expected(a: jax.Array, b: jax.Array, magnitudes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ (weight + 0.5 * a @ b) * (magnitudes / norms)[None]))

    for found, want in zip(
        *(jax.value_and_grad(each, (0, 1, 2))(a, b, magnitudes)[1] for each in (value, expected)), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_adapters_of_some_layers_are_named_in_full(tmp_path: Path) -> None:
    lora = LoraConfig(rank=1, targets=("segments/0/1/*/wq",))
    model = adapted(make_folder(tmp_path / "model", LLAMA), lora, scan_layers=False)
    save_adapter(model, tmp_path / "adapter", lora)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    stacked = load(tmp_path / "model")
    with pytest.raises(AutoshardError, match=r"not model\.layers\.0\.self_attn\.q_proj.*scan_layers=False"):
        load_adapter(stacked, tmp_path / "adapter")


@pytest.mark.slow
def test_a_cached_step_with_adapters_computes_the_same(tmp_path: Path) -> None:
    """Latent attention reads one weight itself, besides projecting with it."""
    lora = LoraConfig(rank=2, targets=("attention/*",), dora=True)
    model = adapted(make_folder(tmp_path / "model", DEEPSEEK), lora, DEEPSEEK)

    @nnx.jit
    def in_two_parts(model: Decoder) -> jax.Array:
        first, cache = model.extend(TOKENS[:, :8], model.cache(2, 12), fresh=True)
        return jnp.concatenate([first, model.extend(TOKENS[:, 8:], cache)[0]], 1)

    np.testing.assert_allclose(in_two_parts(model), logits(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "message"),
    [("embed", "embed, which cannot have an adapter"), ("experts/*", "experts/w_down, which cannot"),
     ("attention/q", "matches no matrix; those that can have an adapter are attention/wk")],
)  # fmt: skip
def test_targets_that_cannot_have_adapters_are_refused(tmp_path: Path, target: str, message: str) -> None:
    model = load(make_folder(tmp_path / "model", MIXTRAL))
    with pytest.raises(ConfigError, match=message):
        add_adapters(model, family_of(MIXTRAL, ""), LoraConfig(rank=2, targets=(target,)), jax.random.key(0))


def test_a_model_with_adapters_is_not_saved_without_them(tmp_path: Path) -> None:
    model = adapted(make_folder(tmp_path / "model", LLAMA), LORA)
    with pytest.raises(AutoshardError, match="the model has adapters"):
        save_pretrained(model, tmp_path / "out")


def test_invalid_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank is -1.*lora\.alpha is 0.*lora\.targets is empty"):
        LoraConfig(rank=-1, alpha=0, targets=())
