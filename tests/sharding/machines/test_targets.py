"""Targets by name, from files, from attached devices and from measurements."""

import math
from dataclasses import dataclass

import jax
import pytest

import autoshard
from autoshard.sharding.machines.calibration import MeasurementSizes, calibrate
from autoshard.sharding.machines.chips import CHIPS, chip_name
from autoshard.sharding.machines.targets import TargetError, find_target, target_for, write_target


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_figures_and_a_target(name):
    chip = CHIPS[name]
    shape = "x".join(["4"] * chip.torus) if chip.torus else "2x8"
    target = find_target(f"{name}:{shape}")
    assert target.devices == math.prod(map(int, shape.split("x"))) * chip.cores
    assert target.platform == chip.platform
    assert min(chip.flops, chip.flops_f32, chip.memory_bytes, chip.memory_bandwidth, chip.link_bandwidth) > 0
    assert 0 < chip.host_bandwidth <= chip.memory_bandwidth
    assert 0 < target.link_prices.flops_per_byte < 1e5


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("v5e:4x4", [("y", 4, False), ("x", 4, False)]),
        ("v5e:8x16", [("y", 16, True), ("x", 8, False)]),
        ("v6e:2x4", [("y", 4, False), ("x", 2, False)]),
        ("v6e:8x16", [("y", 16, True), ("x", 8, False)]),
        ("v6e:16x16*2", [("slice", 2, False), ("y", 16, True), ("x", 16, True)]),
        ("v5p:8x8x8", [("z", 8, True), ("y", 8, True), ("x", 8, True)]),
        ("tpu7x:4x8x8", [("z", 8, True), ("y", 8, True), ("x", 4, True), ("core", 2, False)]),
        ("h200:32x8", [("host", 32, False), ("gpu", 8, False)]),
        ("v5p:4x4x8", [("z", 8, True), ("y", 4, True), ("x", 4, True)]),
        ("v5p:2x2x1", [("z", 1, False), ("y", 2, False), ("x", 2, False)]),
        ("v5p:4x4x4*2", [("slice", 2, False), ("z", 4, True), ("y", 4, True), ("x", 4, True)]),
        ("tpu7x:2x2x4", [("z", 4, True), ("y", 2, False), ("x", 2, False), ("core", 2, False)]),
        ("h100:4x8", [("host", 4, False), ("gpu", 8, False)]),
        ("h100:8", [("gpu", 8, False)]),
        ("h100:8*2", [("host", 2, False), ("gpu", 8, False)]),
        ("gb200:72", [("gpu", 72, False)]),
        ("cpu:8", [("device", 8, False)]),
    ],
)
def test_the_dimensions_of_a_target(name, dims):
    assert [(d.name, d.size, d.wraps) for d in find_target(name).topology.dims] == dims


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("v7:3", "target 'v7:3': there is no chip 'v7'.*The chips are v4, v5e"),
        ("v5pp:4x4x4", "there is no chip 'v5pp'. Did you mean 'v5p:4x4x4'\\?"),
        ("h100:x", "target 'h100:x': 'x' is not a shape; write the number of GPUs, such as h100:8, or hosts x GPUs"),
        ("H100:4x", "'4x' is not a shape"),
        ("h100", "target 'h100' has no shape; write the number of GPUs"),
        ("v5p:4x4x4*y", r"'4x4x4\*y' is not a shape; write the sizes of the 3 dimensions of the torus, such as v5p"),
        ("v5litepod:", "' has no shape; .* such as v5e:4x4, or v5e:4x4\\*2 for 2 slices"),
        ("cpu:eight", "'eight' is not a shape; write the number of devices, such as cpu:8"),
        ("v5e:16", "torus of 2 dimensions; write v5e:4x4"),
        ("v5p:4x4", "torus of 3 dimensions"),
        ("v5e:0x4", "no devices"),
        ("h100:16", "one switch connects at most 8 h100; write h100:HOSTSx8"),
        ("h100:2x2x2", "write h100:HOSTSxGPUS"),
        ("missing.toml", "cannot be read: No such file"),
        ("v5e:256x256", r"larger than a pod of v5e, which is 16x16; .* such as v5e:16x16\*2"),
        ("v5e:17x17", "which is 16x16"),
        ("v5e:4x32", "which is 16x16"),
        ("v6e:32x32", "which is 16x16"),
        ("v4:16x16x20", "larger than a pod of v4, which is 4096 chips"),
        ("v5p:16x20x32", "which is 8960 chips"),
        ("tpu7x:16x24x28", "which is 9216 chips"),
        ("h100:99999999999999999x8", "more than 1048576 devices"),
        (5, "target is 5; write its name as text, such as 'v5p:4x4x4'"),
    ],
)
def test_a_target_that_does_not_exist_raises(name, match):
    with pytest.raises(TargetError, match=match):
        find_target(name)


def test_a_written_target_is_read_back(tmp_path):
    for name in ("h100:4x8", "v5e:8x16", "tpu7x:2x2x4", "cpu:8"):
        target = find_target(name)
        write_target(target, tmp_path / "mine.toml")
        reread = find_target(str(tmp_path / "mine.toml"))
        assert reread.topology.dims == target.topology.dims and reread.platform == target.platform
        assert reread.chip.host_bandwidth == target.chip.host_bandwidth
        assert reread.chip.peak(2) == target.chip.peak(2) and reread.chip.memory_bytes == target.chip.memory_bytes
        mesh = {"a": 2, "b": target.devices // 2}
        assert reread.assign(mesh).pieces == target.assign(mesh).pieces


def test_figures_that_a_file_omits_are_those_of_its_chip(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text('chip = "h100"\nmemory_bytes = 9e10\n'
                    'dims = [{name="gpu", size=4, kind="switch", bandwidth=1e11, latency_us=9}]')  # fmt: skip
    target = find_target(str(path))
    assert (target.devices, target.chip.memory_bytes, target.chip.link_bandwidth) == (4, 9e10, 1e11)
    assert target.chip.flops == CHIPS["h100"].flops


@pytest.mark.parametrize("name", ["v4:16x16x16", "v5e:16x16", "v5p:16x20x28", "v6e:16x16*3", "tpu7x:16x24x24"])
def test_a_whole_pod_is_a_target(name):
    assert find_target(name).devices % CHIPS[name.partition(":")[0]].pod == 0


DIM = {"name": '"gpu"', "size": "8", "kind": '"switch"', "bandwidth": "1e11", "latency_us": "5"}


def toml(*dims, **figures):
    rows = ", ".join("{" + ", ".join(f"{k} = {v}" for k, v in dim.items()) + "}" for dim in dims)
    return "\n".join(["chip = 'h100'", *(f"{k} = {v}" for k, v in figures.items()), f"dims = [{rows}]"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (toml(DIM, DIM), r"dims\[1\].name is 'gpu', which another dimension has too"),
        (toml(DIM | {"wraps": '"no"'}), r"dims\[0\].wraps is 'no'; it must be true or false"),
        (toml(DIM | {"size": "true"}), r"dims\[0\].size is True; it must be a whole number"),
        (toml(DIM | {"size": "0"}), r"dims\[0\].size is 0; it must be at least 1"),
        (toml(DIM | {"size": "9999999999999999"}), "more than 1048576 devices"),
        (toml(DIM | {"kind": '"torus"'}), r"dims\[0\].kind is 'torus'; it must be 'ring' or 'switch'"),
        (toml(DIM | {"bandwidth": "inf"}), r"dims\[0\].bandwidth is inf; it must be a finite number"),
        (toml(DIM | {"bandwidth": "0"}), r"dims\[0\].bandwidth is 0; it must be above 0"),
        (toml(DIM | {"latency_us": "nan"}), r"dims\[0\].latency_us is nan; it must be a finite number"),
        (toml(DIM | {"latency_us": "-1"}), r"dims\[0\].latency_us is -1; it must be at least 0"),
        (toml(DIM | {"hops": "1"}), r"dims\[0\]: there is no 'hops'; there are name, size, kind"),
        (toml({"name": '"gpu"'}), r"dims\[0\]: 'size' is missing"),
        ("chip = 'h100'\ndims = [5]", r"dims\[0\] is 5; it must be a table"),
        (toml(DIM).replace("'h100'", "['h100']"), r"unknown chip \['h100'\]"),
        (toml(DIM, flops="nan"), "flops is nan; it must be a finite number"),
        (toml(DIM, flops="1" + "0" * 400), "flops is 10.*; it must be a finite number"),
        (toml(DIM, flops="0"), "flops is 0; give a positive number"),
        (toml(DIM, tile="1.5"), "tile is 1.5; it must be a whole number"),
        (toml(DIM, platform='"tpus"'), "platform is 'tpus'; it must be 'tpu' or 'cuda' or 'cpu'"),
        (toml(DIM, flops="1" + "0" * 9999), "is not TOML"),
    ],
)
def test_a_mistake_in_a_file_is_reported(tmp_path, text, match):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TargetError, match=match):
        find_target(str(path))


def test_all_mistakes_in_a_file_are_reported_at_once(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('chip = "h101"\nflop = 3\nmemory_bytes = -1\ndims = [{name="gpu", size=0}]')
    with pytest.raises(TargetError, match=r"unknown key 'flop'.*unknown chip 'h101'.*memory_bytes is -1.*dims\[0\]"):
        find_target(str(path))
    path.write_text("a = [")
    with pytest.raises(TargetError, match="is not TOML"):
        find_target(str(path))
    path.write_text("flops = 1e12")
    with pytest.raises(TargetError, match="'platform' is missing.*'dims' is missing"):
        find_target(str(path))


@dataclass
class Device:
    platform: str
    device_kind: str
    process_index: int = 0
    coords: tuple[int, ...] | None = None


def test_the_target_of_attached_devices():
    pod = [Device("tpu", "TPU v5 lite", 0, (x, y, 0)) for y in range(4) for x in range(2)]
    assert target_for(pod, 8).name == "v5e:2x4"
    assert [d.size for d in target_for(pod, 8).topology.dims] == [4, 2]
    assert target_for(pod, 4).devices == 4  # a part of them: a line
    hosts = [Device("gpu", "NVIDIA H100 80GB HBM3", i // 8) for i in range(16)]
    assert target_for(hosts, 16).name == "h100:2x8" and target_for(hosts[:8], 8).name == "h100:8"
    assert target_for([Device("cpu", "cpu")] * 8, 8).name == "cpu:8"
    assert target_for([Device("gpu", "something new")], 1).chip == CHIPS["a100-80"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v4", "v4"), ("TPU7x", "tpu7x"),
     ("TPU v6 lite", "v6e"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100-80"),
     ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("cpu", None)],
)  # fmt: skip
def test_the_chip_of_a_device_kind(kind, name):
    assert chip_name(kind) == name


def test_a_calibrated_target_can_be_planned_for(tmp_path):
    small = MeasurementSizes(matrix=128, array_bytes=1 << 20, shard_bytes=1 << 16, runs=2)
    target = calibrate(effort=small)
    assert (target.devices, target.platform) == (8, "cpu") and target.name == "cpu:8"
    chip = target.chip
    assert chip.flops >= chip.flops_f32 > 1e8 and chip.memory_bandwidth > 1e7 and chip.link_bandwidth > 1e5
    write_target(target, tmp_path / "here.toml")
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 64), (512, 64))]
    plan = autoshard.plan(lambda w, x: x @ w, *shapes, target=str(tmp_path / "here.toml"))
    assert plan.mesh.size == 8 and plan.estimate.compute_us > 0
    one_device = calibrate(jax.devices()[:1], small)
    assert one_device.devices == 1 and one_device.chip.link_bandwidth == CHIPS["cpu"].link_bandwidth
