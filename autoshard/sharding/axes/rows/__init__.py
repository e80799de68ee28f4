"""Finds axes that count rows of the data: the batch, nodes and edges of a graph, and further batches."""
