"""Folders in fp8 whose weights stay codes and scales: the same numbers, the same bytes back, and less memory."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard._compat import scan_arity
from autoshard.errors import AutoshardError, AutoshardWarning, ConfigError
from autoshard.models.adapters import LoraConfig, add_adapters, load_adapter, save_adapter
from autoshard.models.pretrained import load_pretrained, plan_pretrained, save_pretrained
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.layouts import Layout
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.models.pretrained.quantized.fp8_blocks import block_counts
from tests.models.pretrained.folders import DEEPSEEK_V3, LLAMA, make_folder
from tests.models.pretrained.quantized.folders import FP8, MXFP4_GPT_OSS, make_quantized_folder
from tests.models.pretrained.quantized.test_schemes import same, stored

BLOCKS = {**FP8, "weight_block_size": [8, 8]}
FP8_LLAMA = {**LLAMA, "dtype": "bfloat16", "quantization_config": BLOCKS}
FP8_DEEPSEEK = {
    **DEEPSEEK_V3, "dtype": "bfloat16", "quantization_config": BLOCKS, "moe_intermediate_size": 16,
    "qk_nope_head_dim": 8,
}  # fmt: skip
BATCH = (8, 16)
CASES = {
    "llama": (FP8_LLAMA, "fsdp:4 tp:2"),
    "deepseek-v3": (FP8_DEEPSEEK, "ep:4 fsdp:2"),
    "gpt-oss": (MXFP4_GPT_OSS, "ep:4 fsdp:2"),
}
CODES = {
    "gpt-oss": (3, "float4_e2m1fn", "coded_limited_experts"),
    "deepseek-v3": (5, "float8_e4m3fn", "coded_swiglu_experts"),
}


def loaded(folder, plan, **options):
    """Loads a folder with its codes. Some weights of DeepSeek-V3 are decoded: its heads of 12 cross blocks of 8."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "decoded, although keep_codes is given", AutoshardWarning)
        return load_pretrained(folder, plan=plan, batch=BATCH, keep_codes=True, **options)


def load_dense(folder, plan, **options):
    """Loads a folder with decoded weights."""
    return load_pretrained(folder, plan=plan, batch=BATCH, **options)


def gradients(model):
    """Returns the loss and the gradients of the parameters that are not codes or scales."""
    graph, params, frozen = nnx.split(
        model, lambda path, _: path[-1] not in ("codes", "scale") or "norm" in str(path[-2]), ...
    )
    batch = {name: jax.random.randint(jax.random.key(n), BATCH, 0, 24) for n, name in enumerate(("inputs", "targets"))}

    def loss(params, frozen):
        total, count = nnx.merge(graph, params, frozen).loss(batch)
        return total / count

    return jax.jit(jax.value_and_grad(loss))(params, frozen)


@jax.jit
def extended(model, tokens, cache):
    return model.extend(tokens, cache)


def next_logits(model):
    """Returns the logits of two tokens of two rows, one after the other."""
    cache, found = model.cache(2, 4), []
    for tokens in ([3, 5], [7, 11]):
        logits, cache = extended(model, np.asarray(tokens, np.int32)[:, None], cache)
        found.append(logits)
    return jnp.stack(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_loss_and_the_gradients_are_those_of_decoded_weights(tmp_path, name, scan):
    config, plan = CASES[name]
    folder = make_quantized_folder(tmp_path / "in", config)
    model, dense = (load(folder, plan=plan, dtype="float32", scan_layers=scan) for load in (loaded, load_dense))
    whole = parameters_of(dense)
    codes = {path: leaf for path, leaf in parameters_of(model).items() if path.endswith("/codes")}
    least, dtype, operator = CODES.get(name, (5, "float8_e4m3fn", "scaled_product"))
    assert len(codes) >= least and {leaf.dtype for leaf in codes.values()} == {jnp.dtype(dtype)}
    assert all(leaf.shape == whole[path.removesuffix("/codes")].shape for path, leaf in codes.items())
    assert any(not leaf.sharding.is_fully_replicated for leaf in codes.values())
    (found, own), (expected, of_all) = gradients(model), gradients(dense)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    of_all = dict(nnx.to_flat_state(of_all))
    for path, leaf in nnx.to_flat_state(own):
        want = np.asarray(of_all[path][...])
        np.testing.assert_allclose(leaf[...], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    # With few tokens, products do not decode the weights.
    program = str(jax.make_jaxpr(next_logits)(model))
    assert operator in program and ("scaled_product" in program) == (name != "gpt-oss")
    np.testing.assert_allclose(*map(next_logits, (model, dense)), rtol=1e-4, atol=1e-5)


def equations(closed):
    """Yields the equations of a program, with those of the functions that it calls."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in ("jit", "pjit"):
            yield from equations(eqn.params["jaxpr"])


def test_a_scan_over_layers_does_not_slice_codes_of_4_bits(tmp_path):
    """A kernel gets the codes of all layers and the number of one. The logits are those of decoded weights."""
    folder = make_quantized_folder(tmp_path / "in", {**MXFP4_GPT_OSS, "num_hidden_layers": 6})
    model, dense = (load(folder, plan="ep:4 fsdp:2", dtype="float32") for load in (loaded, load_dense))
    scan = next(eqn for eqn in equations(jax.make_jaxpr(next_logits)(model)) if eqn.primitive.name == "scan")
    count, carries = scan_arity(scan.params)
    whole, slices = scan.invars[:count], scan.invars[count + carries :]
    shapes = [v.aval.shape for v in whole if v.aval.dtype == jnp.float4_e2m1fn]
    assert sorted(shapes) == sorted([(3, 4, 64, 32)] * 4 + [(3, 4, 32, 64)] * 2)
    assert not [v for v in slices if v.aval.dtype == jnp.float4_e2m1fn]
    np.testing.assert_allclose(*(jax.jit(next_logits)(each) for each in (model, dense)), rtol=1e-4, atol=1e-5)


def test_import_then_export_is_the_same_bytes(tmp_path):
    folder = make_quantized_folder(tmp_path / "in", FP8_DEEPSEEK)
    with pytest.warns(AutoshardWarning, match="decoded, although keep_codes is given: .*kv_b_proj.* and 3 more"):
        model = load_pretrained(folder, plan="ep:4 fsdp:2", batch=BATCH, keep_codes=True)
    save_pretrained(model, tmp_path / "out")
    assert same(stored(folder), stored(tmp_path / "out"))


@pytest.mark.parametrize("plan", ["ep:4 fsdp:2", "tp:8"])
def test_import_then_export_of_4_bits_is_the_same_bytes(tmp_path, plan):
    folder = make_quantized_folder(tmp_path / "in", MXFP4_GPT_OSS)
    model = load_pretrained(folder, plan=plan, batch=BATCH, keep_codes=True)
    save_pretrained(model, tmp_path / "out")
    assert same(stored(folder), stored(tmp_path / "out"))
    save_pretrained(model, tmp_path / "plain", dtype="bfloat16")
    read, after = Folder.open(folder).tensors(), stored(tmp_path / "plain")
    assert all(after[name].tobytes() == one.read().astype("bfloat16").tobytes() for name, one in read.items())
    assert after.keys() == read.keys()


def test_a_dtype_writes_decoded_tensors(tmp_path):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    model = load_pretrained(folder, plan="fsdp:8", batch=BATCH, keep_codes=True)
    save_pretrained(model, tmp_path / "out", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    read, after = Folder.open(folder).tensors(), stored(tmp_path / "out")
    assert after.keys() == read.keys()
    assert all(after[name].tobytes() == one.read().astype("bfloat16").tobytes() for name, one in read.items())


def test_blocks_that_are_ranges_of_the_dimensions():
    assert block_counts(Layout("(h d) e -> e h d"), (512, 8, 256), (128, 128)) == (4, 8, 2)
    assert block_counts(Layout("(h d) e -> e h d"), (512, 3, 64), (128, 128)) is None  # half a block of heads
    assert block_counts(Layout("r e -> e r"), (512, 576), (128, 128)) is None
    assert block_counts(Layout("r e -> e r"), (64, 100), (128, 128)) == (1, 1)


def test_folders_without_such_codes_are_refused(tmp_path):
    folder = make_folder(tmp_path / "plain", LLAMA)
    with pytest.raises(AutoshardError, match="keep_codes is for quantized folders, in fp8 or MXFP4"):
        load_pretrained(folder, plan="dp:8", batch=BATCH, keep_codes=True)
    (folder / "config.json").write_text(json.dumps(FP8_LLAMA))  # which says fp8, but no tensor is
    with pytest.raises(AutoshardError, match="has no weights in float8_e4m3fn: leave keep_codes out"):
        load_pretrained(folder, plan="dp:8", batch=BATCH, keep_codes=True)
    odd = make_quantized_folder(tmp_path / "odd", {**FP8_LLAMA, "quantization_config": FP8})
    with pytest.raises(AutoshardError, match="no weight can stay quantized. .* its blocks are not ranges"):
        load_pretrained(odd, plan="dp:8", batch=BATCH, keep_codes=True)


def test_a_plan_with_codes_is_made_first(tmp_path):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    plans = [plan_pretrained(folder, plan="fsdp:8", batch=BATCH, keep_codes=keep) for keep in (True, False)]
    with pytest.raises(AutoshardError, match="plan is one of another model: .*/codes is missing in the plan and"):
        load_pretrained(folder, plan=plans[1], keep_codes=True)
    codes = parameters_of(load_pretrained(folder, plan=plans[0], keep_codes=True))["segments/0/layers/0/mlp/w_up/codes"]
    assert codes.dtype == jnp.float8_e4m3fn and not codes.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_trained_beside_codes(tmp_path, dora):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    lora = LoraConfig(rank=2, targets=("attention/*", "mlp/*"), dora=dora)
    models = [load(folder, plan="dp:8", dtype="float32") for load in (loaded, load_dense)]
    for model in models:
        add_adapters(model, family_of(FP8_LLAMA, ""), lora, jax.random.key(0))
    (found, own), (expected, of_all) = (gradients(model) for model in models)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    of_all, compared = dict(nnx.to_flat_state(of_all)), 0
    for path, leaf in nnx.to_flat_state(own):
        if "lora_b" in path:
            want = np.asarray(of_all[path][...])
            np.testing.assert_allclose(leaf[...], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
            compared += bool(np.abs(want).max())
    assert compared == 7
    save_adapter(models[0], tmp_path / "adapter", lora)
    again = loaded(folder, "dp:8", dtype="float32")
    assert load_adapter(again, tmp_path / "adapter").dora is dora
    assert float(gradients(again)[0]) == pytest.approx(float(found), rel=1e-6)


def test_codes_are_not_quantized_again(tmp_path):
    model = loaded(make_quantized_folder(tmp_path / "in", FP8_LLAMA), "dp:8")
    with pytest.raises(ConfigError, match="wq is quantized already: leave it out"):
        add_adapters(
            model, family_of(FP8_LLAMA, ""), LoraConfig(rank=2, targets=("attention/wq",), quantize="nf4"),
            jax.random.key(0),
        )  # fmt: skip
