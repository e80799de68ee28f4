"""Planes of traces as text protos, in the structure that XLA's profilers write."""

from jax.profiler import ProfileData


def planes_of(*texts):
    data = ProfileData.text_proto_to_serialized_xspace("\n".join(texts))
    return list(ProfileData.from_serialized_xspace(data).planes)


def plane(name, lines, stats=()):
    """A plane; `lines` is line name -> (event name, start in ns, duration in ns, statistics)."""
    names = list(dict.fromkeys(event[0] for events in lines.values() for event in events))
    keys = list(dict.fromkeys(key for events in lines.values() for event in events for key in event[3]))
    text = "".join(
        f"event_metadata {{ key: {n} value {{ id: {n} name: '{each}' }} }} " for n, each in enumerate(names, 1)
    )
    text += "".join(f"stat_metadata {{ key: {n} value {{ id: {n} name: '{key}' }} }} " for n, key in enumerate(keys, 1))
    for number, (line, events) in enumerate(lines.items(), 1):
        inner = ""
        for event, start, duration, values in events:
            found = "".join(
                f"stats {{ metadata_id: {keys.index(key) + 1} "
                + (f"int64_value: {value} }} " if isinstance(value, int) else f"str_value: '{value}' }} ")
                for key, value in values.items()
            )
            inner += (f"events {{ metadata_id: {names.index(event) + 1} offset_ps: {1000 * start} "
                      f"duration_ps: {1000 * duration} {found}}} ")  # fmt: skip
        text += f"lines {{ id: {number} name: '{line}' timestamp_ns: 0 {inner}}} "
    return f"planes {{ name: '{name}' {text}}}"


def tpu(core, slow=0):
    """Two steps with a fusion and an asynchronous gather, then a step of evaluation."""
    ops, modules = [], []
    for begin in (1000, 2000):
        modules.append(("jit_train_step(77)", begin, 200, {}))
        ops += [
            ("%fusion.1 = f32[8]{0} fusion(%p), kind=kLoop", begin, 30, {}),
            ("all-gather-start.2", begin + 30, 2, {}),
            ("%all-gather-done.2 = f32[8]{0} all-gather-done(%all-gather-start.2)", begin + 100, 10 + slow, {}),
        ]
    ops.append(("copy.4", 2500, 5, {}))  # between two runs
    modules.append(("jit_eval_step(78)", 3000, 50, {}))
    ops.append(("fusion.9", 3010, 5, {}))
    steps = [("1", 1000, 200, {}), ("2", 2000, 200, {})]
    return plane(f"/device:TPU:{core}", {"Steps": steps, "XLA Modules": modules, "XLA Ops": ops})


def gpu(device):
    """Two kernels of a step on two streams, and a copy."""
    step = {"hlo_module": "jit_train_step", "program_id": 5}
    return plane(f"/device:GPU:{device}", {
        "Stream #13(Compute)": [("loop_fusion_1", 100, 30, step | {"hlo_op": "fusion.1"}), ("MemcpyH2D", 140, 5, {})],
        "Stream #20(NCCL)": [("ncclDevKernel_AllGather", 130, 20, step | {"hlo_op": "all-gather-start.2"})],
    })  # fmt: skip


def cpu(programs=(8,), steps=1):
    """Two devices on two threads; the second one begins the gather later, so the first one waits in it."""
    lines = {}
    for device in (0, 1):
        events = []
        for n in range(steps):
            for program in programs:
                step = {"hlo_module": "jit_train_step", "program_id": program, "device_ordinal": device}
                begin = 10_000 * n + 100
                fusion, gather = (1000, 4000) if device == 0 else (3000, 2000)
                events += [
                    ("fusion.1", begin, fusion, step | {"hlo_op": "fusion.1"}),
                    ("all-gather.2", begin + fusion, gather, step | {"hlo_op": "all-gather.2"}),
                    ("end: all-gather.2", begin + 5000, 1, {}),
                ]
        lines[f"tf_XLAEigen/{device}"] = events
    return plane("/host:CPU", lines | {"python": [("train", 0, 50, {"step_num": 1})]})


HOST_ONLY = plane("/host:CPU", {"python": [("train", 0, 50, {"step_num": 1})]})
