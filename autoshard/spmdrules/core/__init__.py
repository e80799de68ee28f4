"""What a rule is, where an array is on a mesh, and how one operator is sharded."""
