"""Constants of the launchers."""

# Seconds that a process has to save and end after a signal, before it is killed. Source: chosen; enough to write 100 GB
# a host at 1 GB/s.
SAVE_S = 120
# Seconds that the other processes have to end by themselves once one has failed. Source: chosen. They notice a broken
# connection at once, and wait 5 s to tell each other which process is lost.
FAILED_S = 30
# Exit code of a Slurm task after an error. Source: the highest code, so that no killed task has a higher one.
SLURM_ERROR = 255
# Restarts of a JobSet. Source: chosen, as no limit: the run itself ends attempts that save nothing new.
MAX_RESTARTS = 1000
# Port of the process that coordinates the others, where each host has one process. Source: JAX's own default on TPUs.
PORT = 8476
# Chips of a TPU host that is part of a larger slice. Source: the machine types of GKE whose names end in -4t.
CHIPS_PER_HOST = 4
# Values of the node label cloud.google.com/gke-tpu-accelerator, by chip. Source: GKE's table of TPU machine types.
GKE_TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
# Values of the node label cloud.google.com/gke-accelerator, by chip. Source: GKE's table of GPU machine types.
GKE_GPUS = {
    "a100-40": "nvidia-tesla-a100",
    "a100-80": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
    "gb200": "nvidia-gb200",
}
# What xpk calls a TPU, before the topology. Source: its table of systems.
XPK_TPUS = {"v5e": "v5litepod"}
# TensorCores by which SkyPilot counts a TPU, by chip. Source: its catalog of TPUs, tpu-v5p-8 being four chips.
SKYPILOT_TPU_CORES = {"v4": 2, "v5p": 2}
# What SkyPilot calls a TPU. Source: its catalog.
SKYPILOT_TPUS = {"v5e": "v5litepod"}
# What SkyPilot calls a GPU, where that is not the chip's name. Source: its catalog.
SKYPILOT_GPUS = {"a100-40": "A100", "a100-80": "A100-80GB"}
