"""The rule of an operator, the placement of an array on a mesh, and how one operator is sharded."""
