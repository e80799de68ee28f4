"""What the cloud says about the machine: whether it belongs to a TPU slice, and whether it will be stopped."""
