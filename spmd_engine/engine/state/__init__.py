"""What a rank holds of a model: assignment, placement, buffers, and how they move to another mesh."""
