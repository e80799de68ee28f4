"""LoRA adapters of PEFT: the merged model computes the same as base plus adapter."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from autoshard.ckpt import Checkpointer, CheckpointError, MismatchError
from autoshard.ckpt.exchange.export import write_model
from autoshard.ckpt.exchange.lora import merge_adapter, read_adapter, read_model
from autoshard.cli import main
from autoshard.models import GPT, GPTConfig

RNG = np.random.default_rng(0)
IN, OUT, RANK, VOCAB = 24, 16, 4, 30


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape, scale=0.3).astype(np.float32)


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        {f"base_model.model.{name}": values for name, values in tensors.items()}, folder / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 10, "use_rslora": False, "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def write_base(folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["gpt"]}))
    return folder


def merge(base: Path, adapter: Path, out: Path) -> dict[str, np.ndarray]:
    write_model(merge_adapter(read_model(base), read_adapter(adapter)), out)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("fan_in_first", [False, True])
def test_a_merged_layer_equals_base_plus_adapter(tmp_path: Path, rslora: bool, fan_in_first: bool) -> None:
    w, a, b, x = normal(OUT, IN), normal(RANK, IN), normal(OUT, RANK), normal(7, IN)
    other = normal(3)
    base = write_base(tmp_path / "base", {"layers.0.up.weight": w.T if fan_in_first else w, "norm.weight": other})
    adapter = write_adapter(
        tmp_path / "adapter",
        {"layers.0.up.lora_A.weight": a, "layers.0.up.lora_B.weight": b},
        use_rslora=rslora, fan_in_fan_out=fan_in_first,
    )  # fmt: skip
    scale = 10 / np.sqrt(RANK) if rslora else 10 / RANK
    want = x @ w.T + scale * (x @ a.T) @ b.T
    merged = merge(base, adapter, tmp_path / "out")
    weight = merged["layers.0.up.weight"]
    np.testing.assert_allclose(x @ (weight if fan_in_first else weight.T), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(merged["norm.weight"], other)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"architectures": ["gpt"]}


def test_embeddings_saved_modules_and_patterns(tmp_path: Path) -> None:
    table, w, head = normal(VOCAB, OUT), normal(OUT, IN), normal(VOCAB, OUT)
    base = write_base(
        tmp_path / "base", {"embed.weight": table, "a.up.weight": w, "b.up.weight": w, "head.weight": head}
    )
    pairs = {name: (normal(2, IN), normal(OUT, 2)) for name in "ab"}
    tensors = {"embed.lora_embedding_A": normal(RANK, VOCAB), "embed.lora_embedding_B": normal(OUT, RANK)}
    for name, (a, b) in pairs.items():
        tensors |= {f"{name}.up.lora_A.weight": a, f"{name}.up.lora_B.weight": b}
    new_head = normal(VOCAB, OUT)
    adapter = write_adapter(
        tmp_path / "adapter",
        tensors | {"head.modules_to_save.weight": new_head},
        rank_pattern={"up": 2}, alpha_pattern={"b.up": 3},
    )  # fmt: skip
    merged = merge(base, adapter, tmp_path / "out")
    rows = np.array([3, 0, 29])
    a, b = tensors["embed.lora_embedding_A"], tensors["embed.lora_embedding_B"]
    np.testing.assert_allclose(merged["embed.weight"][rows], table[rows] + 10 / RANK * (a.T[rows] @ b.T), atol=1e-5)
    for name, alpha in (("a", 10), ("b", 3)):
        np.testing.assert_allclose(
            merged[f"{name}.up.weight"], w + alpha / 2 * pairs[name][1] @ pairs[name][0], atol=1e-5
        )
    np.testing.assert_array_equal(merged["head.weight"], new_head)


def test_a_checkpoint_as_base(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In Flax weights are fan-in first, heads are separate dimensions, and names have no `.weight`."""
    wq, up = normal(OUT, 4, 6), normal(OUT, IN).astype(ml_dtypes.bfloat16)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(3, {"params": {"attention": {"wq": jnp.asarray(wq)}, "up": jnp.asarray(up)}}, block=True)
    a, b = normal(RANK, OUT), normal(24, RANK)
    tensors = {
        f"{module}.lora_{side}.weight": m for module in ("attention.wq", "up") for side, m in (("A", a), ("B", b))
    }
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    assert main(["ckpt", "merge", str(tmp_path / "run"), str(adapter), str(tmp_path / "out")]) == 0
    assert "2 of 2 tensors changed" in capsys.readouterr().out
    exported = load_file(tmp_path / "out" / "model.safetensors")
    change = (10 / RANK * b @ a).T
    np.testing.assert_allclose(exported["attention.wq"], wq + change.reshape(OUT, 4, 6), atol=1e-5)
    assert exported["up"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(exported["up"], (up.astype(np.float32) + change).astype(ml_dtypes.bfloat16))


def test_a_sharded_base(tmp_path: Path, mesh8: Mesh) -> None:
    """The merged model does not depend on whether the base was sharded over devices or files."""
    w, other, pair = normal(IN, OUT), normal(8, 8), {"A": normal(RANK, IN), "B": normal(OUT, RANK)}
    sharded = jax.device_put({"up": w, "norm": other}, NamedSharding(mesh8, PartitionSpec("data", "model")))
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(3, {"params": sharded, "step": jnp.int32(3)}, block=True)
        checkpoints.export(3, tmp_path / "files", shard_bytes=500)
    assert len([*(tmp_path / "files").glob("*.safetensors")]) == 2
    adapter = write_adapter(
        tmp_path / "adapter", {f"up.lora_{side}.weight": m for side, m in pair.items()}, fan_in_fan_out=True
    )
    assert main(["ckpt", "merge", str(tmp_path / "run"), str(adapter), str(tmp_path / "one")]) == 0
    merged = [load_file(tmp_path / "one" / "model.safetensors"), merge(tmp_path / "files", adapter, tmp_path / "other")]
    for each in merged:
        np.testing.assert_allclose(each["up"], w + 10 / RANK * (pair["B"] @ pair["A"]).T, atol=1e-5)
        np.testing.assert_array_equal(each["norm"], other)
    np.testing.assert_array_equal(merged[0]["up"], merged[1]["up"])


def test_an_adapter_for_another_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {"up.weight": normal(OUT, IN), "down.weight": normal(IN, OUT)})
    pair = {"up.lora_A.weight": normal(RANK, OUT), "up.lora_B.weight": normal(IN, RANK)}
    pair |= {"gate.lora_A.weight": normal(RANK, IN), "gate.lora_B.weight": normal(OUT, RANK)}
    adapter = write_adapter(tmp_path / "adapter", pair)
    with pytest.raises(MismatchError, match="is for another base than") as caught:
        merge(base, adapter, tmp_path / "out")
    assert "2 of 2 modules do not match" in str(caught.value)
    assert "gate: the base has no such weight" in str(caught.value)
    assert "up: the base has [16, 24], the adapter [24, 16], fan-out first" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(use_dora=True), "no magnitudes, and use_dora is True"),
        (dict(use_qalora=True), "has use_qalora=True: only LoRA, rank-stabilized LoRA and DoRA"),
        (dict(peft_type="IA3"), "has peft_type='IA3'"),
        (dict(bias="all"), "has bias='all'"),
        (dict(lora_bias=True), "has lora_bias=True"),
        (dict(target_parameters=["experts.down_proj"]), "has target_parameters="),
        (dict(use_bdlora={"nblocks": 2}), "has use_bdlora="),
        (dict(kasa_config={"beta": 1e-4}), "has kasa_config="),
        (
            dict(init_lora_weights="pissa_niter_16"),
            "has init_lora_weights='pissa_niter_16': it was trained on changed",
        ),
        (dict(init_lora_weights="olora"), "has init_lora_weights='olora'"),
        (dict(init_lora_weights="corda"), "has init_lora_weights='corda'"),
        (dict(init_lora_weights="loftq"), "has init_lora_weights='loftq'"),
        (dict(r=16), r"(?s)ranks that differ from its settings:.*up: A has rank 4, adapter_config\.json has 16"),
        (dict(rank_pattern={"u.": 3}), r"up: A has rank 4, adapter_config\.json has 3"),
        (dict(r=None), "(?s)is not as PEFT writes it:.*r is None; it must be a whole number of at least 1"),
        (dict(r=0), "r is 0; it must"),
        (dict(r=-4), "r is -4; it must"),
        (dict(r=True), "r is True; it must"),
        (dict(lora_alpha=float("nan")), "lora_alpha is nan; it must be a finite number"),
        (dict(lora_alpha=10**400), "lora_alpha is 10+; it must be a finite number"),
        (dict(lora_alpha="16"), "lora_alpha is '16'; it must be a finite number"),
        (dict(rank_pattern={"up": 0}), "rank_pattern has 'up': 0; it must"),
        (dict(rank_pattern=["up"]), "rank_pattern is .* it must be an object"),
        (dict(rank_pattern={"u(p": 4}), r"rank_pattern has 'u\(p', which is not a regular expression: "),
        (dict(alpha_pattern={"*up": 4}), r"alpha_pattern has '\*up', which is not a regular expression: "),
        (dict(alpha_pattern={"up": float("inf")}), "alpha_pattern has 'up': inf; it must"),
        (dict(use_rslora="false"), "use_rslora is 'false'; it must be true or false"),
    ],
)
def test_unsupported_adapters(tmp_path: Path, config: dict, message: str, capsys: pytest.CaptureFixture) -> None:
    pair = {"up.lora_A.weight": normal(RANK, IN), "up.lora_B.weight": normal(OUT, RANK)}
    adapter = write_adapter(tmp_path / "adapter", pair, **config)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(adapter)
    base = write_base(tmp_path / "base", {"up.weight": normal(OUT, IN)})
    assert main(["ckpt", "merge", str(base), str(adapter), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("autoshard ckpt: error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initializations_that_do_not_change_the_base(tmp_path: Path, start: Any) -> None:
    pair = {"up.lora_A.weight": normal(RANK, IN), "up.lora_B.weight": normal(OUT, RANK)}
    assert read_adapter(write_adapter(tmp_path / "adapter", pair, init_lora_weights=start)).scale("up") == 10 / RANK


def test_folders_without_adapters_or_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a LoRA adapter: it has no adapter_config\.json"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "adapter", {"up.lora_A.weight": normal(RANK, IN)})
    with pytest.raises(CheckpointError, match="only one matrix of a pair:\n  up"):
        read_adapter(folder)
    settings = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(f"[{settings}]")
    with pytest.raises(CheckpointError, match="is not as PEFT writes it: it has no JSON object of settings"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text(settings)
    (folder / "adapter_model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(folder)
    with pytest.raises(CheckpointError, match="has no model: there is no model"):
        read_model(tmp_path)
    base = write_base(tmp_path / "base", {"w": normal(2)})
    index = {"weight_map": {"w": "../adapter/adapter_model.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names files that are not beside it"):
        read_model(base)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is not a LoRA adapter: it has no adapter_model\.safetensors"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "has no weight_map from tensor names to file names"),
        ({"weight_map": ["w"]}, "has no weight_map from tensor names to file names"),
        ({"weight_map": {"w": 1}}, "has no weight_map from tensor names to file names"),
        ({"weight_map": {"w": "model.safetensors", "v": "gone.safetensors"}}, r"there is no gone\.safetensors$"),
        ({"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}, r"model\.safetensors has no v$"),
    ],
    ids=str,
)
def test_an_index_that_does_not_match_its_files(tmp_path: Path, index: Any, message: str) -> None:
    base = write_base(tmp_path / "base", {"w": normal(2)})
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_model(base)


def test_an_embedding_with_a_trained_table(tmp_path: Path) -> None:
    """The table of the adapter replaces that of the base, and the pair is added to it."""
    table, a, b = normal(VOCAB, OUT), normal(RANK, VOCAB), normal(OUT, RANK)
    base = write_base(tmp_path / "base", {"embed.weight": normal(VOCAB, OUT)})
    tensors = {"embed.base_layer.weight": table, "embed.lora_embedding_A": a, "embed.lora_embedding_B": b}
    merged = merge(base, write_adapter(tmp_path / "adapter", tensors), tmp_path / "out")
    np.testing.assert_allclose(merged["embed.weight"], table + 10 / RANK * (b @ a).T, atol=1e-5)


def test_a_sum_out_of_the_range_of_the_base_s_dtype(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {"up.weight": np.full((OUT, IN), 65000, np.float16)})
    pair = {"up.lora_A.weight": np.full((RANK, IN), 10, np.float32), "up.lora_B.weight": np.full((OUT, RANK), 10, "f4")}
    with pytest.raises(CheckpointError, match=r"^up\.weight has values of up to 65992, but the largest float16 is"):
        merge(base, write_adapter(tmp_path / "adapter", pair), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_reads_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base(tmp_path / "base", {f"w{i}.weight": normal(OUT, IN) for i in range(6)})
    pairs = {
        f"w{i}.lora_{s}.weight": m for i in range(6) for s, m in (("A", normal(RANK, IN)), ("B", normal(OUT, RANK)))
    }
    adapter = write_adapter(tmp_path / "adapter", pairs)
    model = merge_adapter(read_model(base), read_adapter(adapter))
    assert sum(np.asarray(one.read()).nbytes for one in model.tensors) == 6 * OUT * IN * 4
    assert all(one.read() is not one.read() for one in model.tensors)  # values are not cached


@pytest.mark.few(1)
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("fan_in_fan_out", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_an_adapter_of_the_trainers_model(tmp_path: Path, fan_in_fan_out: bool, scan: bool, exported: bool) -> None:
    """The merged model computes base plus adapter: layers are stacked, heads apart, and weights `[in, out]`.

    All matrices are square here, so that a transposed change would have the right shape.
    """
    cfg = GPTConfig(vocab=16, layers=2, heads=4, width=8, ffn=8, context=4, scan_layers=scan, tie_head=True)
    model = GPT(cfg, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"params": params}, block=True)
        content = {"model": "gpt", "config": dataclasses.asdict(cfg), "dtype": "float32", "max_length": 4, "format": 1}
        content |= {"generation": {"temperature": 1.0, "top_k": None}, "tokenizer": {"kind": "bytes"}}
        (tmp_path / "run" / "inference.json").write_text(json.dumps(content))
        if exported:
            checkpoints.export(1, tmp_path / "base")
    modules = [f"blocks.{layer}.{part}" for layer in (0, 1) for part in ("attention.wq", "attention.wo", "mlp.w_up")]
    pairs = {module: (normal(RANK, 8), normal(8, RANK)) for module in modules[:-1]}
    tensors = {f"{module}.lora_{side}.weight": pair[side == "B"] for module, pair in pairs.items() for side in "AB"}
    table, norm = normal(RANK, 16), normal(8)
    tensors |= {"embed.lora_embedding_A": table, "embed.lora_embedding_B": np.eye(8, RANK, dtype=np.float32)}
    tensors |= {"blocks.1.mlp_norm.scale": norm}
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=fan_in_fan_out)
    base = tmp_path / ("base" if exported else "run")
    assert main(["ckpt", "merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")

    for layer in (0, 1):
        for part in ("attention.wq", "attention.wo", "attention.wk", "mlp.w_up", "mlp_norm.scale"):
            stacked, alone = f"blocks.{part}", f"blocks.{layer}.{part}"
            before, after = (
                of[stacked][layer] if scan else of[alone]
                for of in ({".".join(path): leaf for path, leaf in flat(params)}, merged)
            )
            want = np.asarray(before)
            if alone in pairs:
                a, b = pairs[alone]
                x = np.eye(8, dtype=np.float32)
                want = want + (10 / RANK * (x @ a.T) @ b.T).reshape(want.shape)
            if alone == "blocks.1.mlp_norm.scale":
                want = norm
            np.testing.assert_allclose(after, want, atol=1e-5, err_msg=alone)
    np.testing.assert_allclose(
        merged["embed"], np.asarray(params["embed"]) + 10 / RANK * table.T @ np.eye(RANK, 8), atol=1e-5
    )


def flat(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, part in tree.items():
        yield from flat(part, (*path, str(name))) if isinstance(part, dict) else [((*path, str(name)), part)]


def test_layers_that_the_base_does_not_have(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"params": {"blocks": {"up": jnp.ones((2, OUT, IN))}}}, block=True)
        base = checkpoints.model(1)
    pair = {"lora_A.weight": normal(RANK, IN), "lora_B.weight": normal(OUT, RANK)}
    names = ("blocks.2.up", "blocks.0.1.2.3.up", "blocks.up.1", "blocks.1.up")
    adapter = write_adapter(tmp_path / "adapter", {f"{n}.{side}": m for n in names for side, m in pair.items()})
    with pytest.raises(MismatchError) as caught:
        merge_adapter(base, read_adapter(adapter))
    assert "2 of 4 modules do not match" in str(caught.value)
    assert all(f"{name}: the base has no such weight" in str(caught.value) for name in names[:2])


def test_an_adapter_is_not_added_to_the_codes_of_a_quantized_base(tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "adapter", {"up.lora_A.weight": normal(RANK, 6), "up.lora_B.weight": normal(4, RANK)}
    )
    codes = normal(4, 6).astype(ml_dtypes.float8_e4m3fn)
    base = write_base(tmp_path / "base", {"up.weight": codes, "up.weight_scale_inv": normal(1, 1)})
    with pytest.raises(CheckpointError, match=r"quantized.*ckpt export RUN PLAIN.*\n.*up\.weight: float8_e4m3fn"):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
