"""What layers take from positions: rotary angles, factors of the queries, and chunks of attention."""
