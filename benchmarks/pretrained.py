"""Measure the import of a pretrained folder: its rate beside plain reading of the same files, and its memory.

python benchmarks/pretrained.py
python benchmarks/pretrained.py --undisturbed      readings take precedence over other work

The folder of about 1 GB is random. It is made in the folder of temporary files, and removed. Its files are evicted from
the page cache before each reading. Each reading runs in a process of its own; all kinds take turns. The peak of memory
is that of the process during the import, above what it has before; it includes the shards of all its devices.

Plain reading keeps the tensors, as the import does. A reading that frees each tensor is measured too: it uses the same
memory again and again. On a virtual machine, memory that is used for the first time costs more than reading does.

With `--undisturbed`, the readings have real-time priority, which needs Linux and its permission (`CAP_SYS_NICE`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def make_folder(folder: Path) -> tuple[int, int]:
    """Write the folder. Return the bytes of its tensors, and those of the largest."""
    from autoshard.ckpt.exchange.safetensors import Tensor, write
    from autoshard.models.pretrained.folder import Folder
    from autoshard.models.pretrained.load import Described

    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    sources = Described.of(Folder.open(folder), None, {}).sources.values()
    shapes = {name: source.tensor_shape for source in sources for name in source.names.values()}

    def random(shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 2**14, shape, np.uint16).view("bfloat16")

    tensors = [
        Tensor(name, shape, "bfloat16", lambda shape=shape: random(shape)) for name, shape in sorted(shapes.items())
    ]
    write(folder, tensors, shard_bytes=400_000_000, metadata={"format": "pt"})
    os.sync()
    return sum(one.nbytes for one in tensors), max(one.nbytes for one in tensors)


def evict(folder: Path) -> None:
    """Remove a folder's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def prepare(folder: Path, *, undisturbed: bool) -> None:
    """Evict a folder's files. If `undisturbed`, then give this process real-time priority."""
    evict(folder)
    if undisturbed:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def read_plainly(folder: Path, *, keep: bool, undisturbed: bool) -> dict[str, float]:
    """Read all tensors with the library of safetensors, and keep them or free each."""
    import ml_dtypes  # noqa: F401  for bfloat16
    from safetensors import safe_open

    prepare(folder, undisturbed=undisturbed)
    kept = []
    started, cpu = time.perf_counter(), time.process_time()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                if keep:
                    kept.append(tensor)
    return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}


def read_onto_shards(folder: Path, devices: int, *, undisturbed: bool) -> dict[str, float]:
    """Import the folder, planned for some devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    from autoshard.models import load_pretrained, plan_pretrained

    made = plan_pretrained(folder, batch=(8, 256), plan=f"fsdp:{devices}")
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    prepare(folder, undisturbed=undisturbed)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    started, cpu = time.perf_counter(), time.process_time()
    model = load_pretrained(folder, plan=made)
    jax.block_until_ready(jax.tree.leaves(model))
    used = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    return {**used, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before}


def in_process(kind: str, folder: Path, devices: int = 1, *, undisturbed: bool = False) -> dict[str, float]:
    """Run one reading in a process of its own."""
    command = [sys.executable, __file__, "--read", kind, "--folder", str(folder), "--devices", str(devices)]
    command += ["--undisturbed"] if undisturbed else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main(*, undisturbed: bool) -> None:
    """Measure and report."""
    from common import Row, report

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        nbytes, largest = make_folder(folder)
        plain, freed, ours = [], [], []
        for _ in range(ROUNDS):
            for kind, found in (("freed", freed), ("plain", plain), ("shards", ours)):
                found.append(in_process(kind, folder, undisturbed=undisturbed))
        several = in_process("shards", folder, 4)
    ratios = [
        float(np.median([a["seconds"] / b["seconds"] for a, b in zip(ours, others, strict=True)]))
        for others in (plain, freed)
    ]
    note = f"GB/s: plain {_rates(plain, nbytes)}, import {_rates(ours, nbytes)}"
    cpu = f"processor seconds: plain {_text(plain)}, freed {_text(freed)}, import {_text(ours)}"
    processor, peak = float(np.median([one["cpu"] for one in ours])), max(one["peak"] for one in ours)
    rows = [
        Row("import: time over plain reading", ratios[0], "", 1 / 0.8, note=note),
        Row("import: time over reading that frees each tensor", ratios[1], "", note=f"GB/s: {_rates(freed, nbytes)}"),
        Row("import: processor time a GB", processor / nbytes * 1e9, "s", note=cpu),
        Row("peak above the shards, over the largest tensor", (peak - nbytes) / largest, "", 1.1,
            note=f"1 device; shards {nbytes:,} bytes, largest tensor {largest:,}"),
        Row("the same, 4 devices in one process", (several["peak"] - nbytes) / largest, "", 1.1),
    ]  # fmt: skip
    report("pretrained", rows, bytes=nbytes, config=CONFIG, undisturbed=undisturbed)


def _rates(read: list[dict[str, float]], nbytes: int) -> str:
    return " ".join(f"{nbytes / one['seconds'] / 1e9:.2f}" for one in read)


def _text(read: list[dict[str, float]]) -> str:
    return " ".join(f"{one['cpu']:.1f}" for one in read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", choices=["plain", "freed", "shards"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--undisturbed", action="store_true")
    given = parser.parse_args()
    alone = given.undisturbed
    if given.read is None:
        main(undisturbed=alone)
    elif given.read != "shards":
        print(json.dumps(read_plainly(given.folder, keep=given.read == "plain", undisturbed=alone)))
    else:
        print(json.dumps(read_onto_shards(given.folder, given.devices, undisturbed=alone)))
