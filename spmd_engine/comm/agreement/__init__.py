"""Agreement of ranks: on calls before data move, and on the outcome of work by one rank."""
