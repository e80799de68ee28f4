"""From rules to a partitioned program: mesh, targets, logical axes, cost, search, lowering, audit."""

if __name__ != "autoshard.sharding":  # through the link at the root, which would load a second copy
    raise ImportError("'sharding' at the root is only a link: import autoshard.sharding instead")
