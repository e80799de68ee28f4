"""The training loop and what watches over it: metrics, throughput, interrupts, watchdog, processes."""
