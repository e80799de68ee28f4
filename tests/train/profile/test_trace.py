"""Reading traces of TPUs, GPUs and CPUs. The planes have the documented structure, with made-up events."""

import pytest
from jax.profiler import ProfileData

from autoshard.errors import ConfigError
from autoshard.train.profile.trace import OpEvent, Trace, read_trace, trace_of
from tests.train.profile.planes import HOST_ONLY, cpu, gpu, planes_of, tpu


def test_a_tpu_has_a_plane_for_each_core():
    trace = trace_of(planes_of(tpu(0), tpu(1)))
    assert trace.platform == "TPU" and trace.devices == 2
    first = trace.of("jit_train_step")
    ops = [event.op for event in first if event.device == 1]
    assert ops == ["fusion.1", "all-gather-start.2", "all-gather-done.2"] * 2
    assert first[0] == OpEvent(0, "fusion.1", "77", 1000.0, 30.0)
    assert [event.op for event in trace.of("jit_eval_step")] == ["fusion.9"] * 2
    assert trace.of("jit_unknown") == []


def test_a_gpu_has_kernels_with_statistics_on_its_streams():
    trace = trace_of(planes_of(gpu(3)))
    assert trace.platform == "GPU" and trace.devices == 1
    assert [(event.device, event.op, event.duration_ns) for event in trace.of("jit_train_step")] == [
        (3, "fusion.1", 30.0), (3, "all-gather-start.2", 20.0)
    ]  # fmt: skip  # copies between host and device have no instruction


def test_on_a_cpu_threads_run_the_devices():
    trace = trace_of(planes_of(cpu()))
    assert trace.platform == "CPU" and trace.devices == 2
    assert {(event.device, event.op, event.program) for event in trace.of("jit_train_step")} == {
        (0, "fusion.1", "8"), (1, "fusion.1", "8"), (0, "all-gather.2", "8"), (1, "all-gather.2", "8")
    }  # fmt: skip


def test_devices_take_precedence_over_the_host():
    assert trace_of(planes_of(cpu(), gpu(0))).platform == "GPU"


def test_a_trace_of_the_host_alone_has_no_events():
    assert trace_of(planes_of(HOST_ONLY)) == Trace()
    assert trace_of(planes_of('planes { name: "/device:TPU:0" }')) == Trace()


def test_a_folder_without_a_trace_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no file ends in .xplane.pb"):
        read_trace(tmp_path)


def test_the_files_of_all_hosts_are_read(tmp_path):
    for host in (0, 1):
        data = ProfileData.text_proto_to_serialized_xspace(tpu(host))
        (tmp_path / f"host{host}.xplane.pb").write_bytes(data)
    assert read_trace(tmp_path).devices == 2
