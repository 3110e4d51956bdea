"""Descriptions of other training systems, as models that the analysis and the planner take like any other."""
