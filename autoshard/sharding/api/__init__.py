"""What users touch: `auto_shard`, `plan`, `Plan`, Flax classes."""
