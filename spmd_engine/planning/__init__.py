"""Foresight: what every rank computes, sends and holds in a step, before a rank is started."""
