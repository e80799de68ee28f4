"""A state as named leaves: digests, packing, snapshots, target shardings."""
