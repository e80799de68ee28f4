"""The memory traffic of compiled decode steps beside the least that a step needs.

    python benchmarks/decode_bytes.py                    # every case
    python benchmarks/decode_bytes.py llama3-8b --target v5e:2x4

A decode step reads the weights and the cache once: that is the ideal. Of an embedding that is not the head, too, it
reads a few rows, which do not count. Of a mixture of experts, it reads one expert for each choice of a row, and at most
all of its experts. So if all rows together make fewer choices than there are experts, the ideal counts the matrices of
that many experts, divided evenly among the devices; else it counts all experts of a device, although a few of them may
not be chosen. The step of `autoshard.serve` is planned and compiled for TPUs that are not there;
nothing runs. Its traffic is what the referee of `estimate.py` counts in the compiled program: bytes of one device
between its memory and its compute units. The cache is full, so all of it must be read. Results are stored in
`results/decode_bytes.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, Console, Table
from flax import nnx
from judged_steps import compiled, estimated

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardWarning
from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.kinds import ExpertsConfig
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.published import DECODERS
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.parameter_paths import by_path, parameters_of
from autoshard.models.pretrained.quantized.fp8_blocks import Fp8Blocks
from autoshard.models.pretrained.quantized.kept_codes import kept_weights, put_codes
from autoshard.models.pretrained.quantized.mxfp4 import Mxfp4
from autoshard.models.pretrained.tables import sources_of
from autoshard.serve.steps import Steps

PATH = RESULTS / "decode_bytes.json"
BAR = 1.15
TARGETS = ("v5e:2x4", "v6e:2x4")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its rows and the positions of its cache.

    If `codes` names an architecture, its matrices are codes and scales: MXFP4 for gpt-oss, fp8 for the others.
    """

    config: DecoderConfig
    rows: int
    length: int
    codes: str = ""


def _llama3_8b() -> DecoderConfig:
    """Llama 3 8B (table 3 of arXiv:2407.21783)."""
    kinds = (LayerKind(rotary=Rotary(500_000.0)),) * 32
    return DecoderConfig(128_256, 4096, kinds, heads=32, kv_heads=8, head_dim=128, ffn=14_336, context=8192)


def _mixtral_8x7b() -> DecoderConfig:
    """Mixtral 8x7B (table 1 of arXiv:2401.04088)."""
    kinds = (LayerKind(rotary=Rotary(1_000_000.0), experts=True),) * 32
    experts = ExpertsConfig(8, 2, 14_336)
    return DecoderConfig(
        32_000, 4096, kinds, heads=32, kv_heads=8, head_dim=128, ffn=14_336, context=32_768, experts=experts
    )


CASES: Mapping[str, Case] = {
    "llama3-8b": Case(_llama3_8b(), rows=16, length=2048),
    "llama3-8b in fp8": Case(_llama3_8b(), rows=16, length=2048, codes="LlamaForCausalLM"),
    "gemma3-4b": Case(DECODERS["gemma3-4b"], rows=16, length=4096),
    "qwen3-30b-a3b": Case(DECODERS["qwen3-30b-a3b"], rows=32, length=2048),
    "qwen3-30b-a3b in fp8": Case(DECODERS["qwen3-30b-a3b"], rows=32, length=2048, codes="Qwen3MoeForCausalLM"),
    "qwen3-30b-a3b, 2 rows": Case(DECODERS["qwen3-30b-a3b"], rows=2, length=2048),
    "qwen3-30b-a3b, 1 row": Case(DECODERS["qwen3-30b-a3b"], rows=1, length=2048),
    "gpt-oss-20b": Case(DECODERS["gpt-oss-20b"], rows=32, length=2048),
    "gpt-oss-20b in mxfp4": Case(DECODERS["gpt-oss-20b"], rows=32, length=2048, codes="GptOssForCausalLM"),
    "mixtral-8x7b, 1 row": Case(_mixtral_8x7b(), rows=1, length=2048),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A compiled decode step. Bytes are of one device.

    Attributes:
        case, target, words: the model, the machine and the plan's strategy.
        kind: the compiler's result.
        weight_bytes, cache_bytes: the shards of the weights that the rows choose, without rows of the embedding, and of
            the cache.
        moved_bytes: the traffic of the compiled step; None if it was not compiled.
        seconds: the step by the roofline.
    """

    case: str
    target: str
    words: str
    kind: str
    weight_bytes: int
    cache_bytes: int
    moved_bytes: float | None
    seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Traffic over the ideal."""
        return self.moved_bytes and self.moved_bytes / (self.weight_bytes + self.cache_bytes)


def row_of(name: str, target: str) -> Row:
    """Plan and compile the decode step of a case."""
    case = CASES[name]
    config = dataclasses.replace(case.config, dtype="bfloat16", param_dtype="bfloat16", remat="none")
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    if case.codes:
        _put_codes(model, config, case.codes)
    graph, params = nnx.split(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        steps = Steps(graph, nnx.to_pure_dict(params), case.rows, case.length, {"target": target})
    made = steps.plan
    weights, state, _ = made.in_shardings()
    shapes, of_state = steps.decode_shapes()
    result = compiled(made, target)
    judged = estimated(result, target) if result.kind == "ok" else None
    return Row(
        case=name,
        target=target,
        words=made.chosen,
        kind=result.kind,
        weight_bytes=_chosen_bytes(shapes, weights, config, case.rows),
        cache_bytes=shard_bytes(of_state.cache, state.cache),
        moved_bytes=judged and judged.hbm_bytes,
        seconds=judged and judged.step["roofline"],
    )


def _put_codes(model: Decoder, config: DecoderConfig, architecture: str) -> None:
    """Replace matrices by codes and scales of their blocks, as `keep_codes` does."""
    family = known_families()[architecture]
    shapes = {path: leaf.shape for path, leaf in parameters_of(model).items()}
    sources = sources_of(family.stacks(config), family.table(config), shapes)

    scheme, coded = (Mxfp4(), "_proj") if architecture.startswith("GptOss") else (Fp8Blocks(), "_proj.weight")

    def stored(name: str) -> Tensor:
        """Return a tensor without values: `kept_weights` reads its name and its dtype alone."""
        name, dtype = (name + scheme.codes, scheme.code_dtype) if name.endswith(coded) else (name, config.param_dtype)
        return Tensor(name, (), dtype, lambda: np.empty((), dtype))

    tensors = {one.name: one for source in sources.values() for one in map(stored, source.names.values())}
    put_codes(model, kept_weights(sources, tensors, scheme, "the benchmark"), scheme)


def _chosen_bytes(shapes: Any, shardings: Any, config: DecoderConfig, rows: int) -> int:
    """Return the bytes of one device's weights that a step for some rows reads."""
    shapes, shardings = by_path(shapes), by_path(shardings)
    counted = {path for path in shapes if path != "embed" or config.tie_head}
    of_experts = {path for path in counted if fnmatch(path, "*/experts/[wb]_*") and not path.endswith("_router")}
    experts, others = (
        shard_bytes([shapes[path] for path in paths], [shardings[path] for path in paths])
        for paths in (sorted(of_experts), sorted(counted - of_experts))
    )
    if config.experts is None:
        return others
    chosen = sum(math.prod(shapes[path].shape) * _itemsize(shapes[path].dtype) for path in of_experts)
    chosen *= rows * config.experts.top_k / config.experts.experts / len(next(iter(shardings.values())).device_set)
    return others + min(experts, round(chosen))


def shard_bytes(shapes: Any, shardings: Any) -> int:
    """Return the bytes of one device's shards of a tree of arrays."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return round(sum(math.prod(sharding.shard_shape(one.shape)) * _itemsize(one.dtype) for one, sharding in pairs))


def _itemsize(dtype: Any) -> float:
    """Return the bytes of an element on TPUs, where two codes of 4 bits share a byte."""
    return 0.5 if dtype == jnp.float4_e2m1fn else dtype.itemsize


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    table = Table("model", "target", "plan", "weights MB", "cache MB", "moved MB", f"moved / ideal (bar {BAR})", "ms")
    for row in rows:
        moved = "-" if row.moved_bytes is None else f"{row.moved_bytes / 1e6:.0f}"
        ratio = row.kind if row.ratio is None else f"{row.ratio:.3f}"
        ms = "-" if row.seconds is None else f"{row.seconds * 1e3:.2f}"
        sizes = (f"{each / 1e6:.0f}" for each in (row.weight_bytes, row.cache_bytes))
        table.add_row(row.case, row.target, row.words, *sizes, moved, ratio, ms)
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--target", nargs="*", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    rows = {(row["case"], row["target"]): Row(**row) for row in stored()}
    for name in given.cases or CASES:
        for target in given.target:
            rows[name, target] = row_of(name, target)
            show([rows[name, target]])
    head = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "jax": jax.__version__}
    PATH.write_text(json.dumps(head | {"rows": [dataclasses.asdict(row) for row in rows.values()]}, indent=1) + "\n")


def stored() -> list[dict[str, Any]]:
    """Read the stored rows."""
    return json.loads(PATH.read_text())["rows"] if PATH.exists() else []


if __name__ == "__main__":
    main()
