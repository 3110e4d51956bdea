"""How long a recorded step takes on a machine, and how a prediction compares with a trace."""
