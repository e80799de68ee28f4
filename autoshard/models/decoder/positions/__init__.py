"""The parts of a layer that depend on positions: rotary angles, factors of the queries, and chunks of attention."""
