"""Pipelines: layers in stages, and the execution of a schedule."""
