"""XLA's flags in the tests and in the processes that they start: fast compilation rather than fast code."""

import importlib.metadata

# Tests spend most of their time in compilation. A small program compiles in fewer CPU seconds as one part than as parts
# for several threads. XLA's fusion emitters triple the time. From JAX 0.11 on, XLA does not know their flag, and it
# rejects unknown flags.
FAST = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    FAST.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(devices: int | None = None) -> str:
    """Returns the value of `XLA_FLAGS` for a process.

    Args:
        devices: the number of virtual CPU devices; None if the process sets it itself.
    """
    return " ".join([*FAST, *([] if devices is None else [f"--xla_force_host_platform_device_count={devices}"])])
