"""Launch `autoshard train` on several hosts: processes here, hosts over SSH, Slurm, GKE and SkyPilot.

A launcher writes what its scheduler needs and submits it; it knows no plan. The training run itself decides what a
restart means: it continues from its newest checkpoint, plans for the devices that are there, and ends attempts that
save nothing new. Exit code 75 asks for a restart.
"""
