"""The public API: `auto_shard`, `plan`, `Plan` and planned Flax classes."""
