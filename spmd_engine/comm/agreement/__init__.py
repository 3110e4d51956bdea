"""What ranks agree on before data move: the call, and what only one rank can do or know."""
