"""ZeRO: parameters, gradients and optimizer state in shards over the data axes, and what moves between them."""
