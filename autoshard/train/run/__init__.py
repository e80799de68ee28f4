"""The training loop, its metrics and throughput, and the handling of signals and of several processes."""
