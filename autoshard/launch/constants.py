"""Constants of the launchers."""

# Seconds that a process has to save and end after a signal, before it is killed. Source: chosen. In this time, a host
# writes 100 GB at 1 GB/s.
SAVE_S = 120
# Seconds that the other processes have to end by themselves after one has failed. Source: chosen. They notice a broken
# connection at once, and then need 5 s to tell each other which process is lost.
FAILED_S = 30
# Exit code of a Slurm task after an error. Source: srun returns the highest code of its tasks, and this is the highest
# possible one. So an error is seen even if other tasks were killed.
SLURM_ERROR = 255
# Limit of a JobSet's restarts. Source: chosen, too high to matter. The run itself gives up after several attempts that
# save no new step.
MAX_RESTARTS = 1000
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
# Names of TPUs in xpk, where they differ from the chip's name. Source: xpk's table of systems.
XPK_TPUS = {"v5e": "v5litepod"}
# TensorCores of a chip, for TPUs that SkyPilot counts by TensorCores. Source: its catalog, where tpu-v5p-8 has four
# chips.
SKYPILOT_TPU_CORES = {"v4": 2, "v5p": 2}
# Names of TPUs in SkyPilot, where they differ from the chip's name. Source: its catalog.
SKYPILOT_TPUS = {"v5e": "v5litepod"}
# Names of GPUs in SkyPilot, where they differ from the chip's name in upper case. Source: its catalog.
SKYPILOT_GPUS = {"a100-40": "A100", "a100-80": "A100-80GB"}
