"""Check rules by execution: run on shards and compare with the whole."""
