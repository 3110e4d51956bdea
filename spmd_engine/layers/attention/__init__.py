"""Self-attention, its variants for a sharded sequence, rotary positions, and the KV cache."""
