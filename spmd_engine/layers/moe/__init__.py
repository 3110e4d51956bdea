"""Mixtures of experts: router, capacity, dispatch, experts."""
