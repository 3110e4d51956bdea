"""Descriptions of other training systems, as models for the analysis and the planner."""
