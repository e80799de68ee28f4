"""Chips, topologies, targets by name, device meshes, calibration."""
