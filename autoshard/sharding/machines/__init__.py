"""Chips, how devices are joined, targets by name, meshes of devices, calibration."""
