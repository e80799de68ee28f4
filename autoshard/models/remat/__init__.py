"""What a layer does with the values that its backward pass needs: keep, move to the host, or recompute."""
