"""A rank's part of a model: assignment, placement and buffers, and their move to another mesh."""
