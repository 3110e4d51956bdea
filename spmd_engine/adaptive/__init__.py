"""Adaptation of a running job: what its steps show, and whether and how it changes its shape."""
