"""Predicts the time of a recorded step on a machine, and compares predictions with traces."""
