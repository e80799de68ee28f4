"""Makes a plan from a traced function and a machine, binds existing plans, and prices changes of a plan."""
