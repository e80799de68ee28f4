"""From a traced function and a machine to a plan, and every later question about it."""
