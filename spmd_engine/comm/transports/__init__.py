"""Ways for data to get from rank to rank: one file each, with all operations that may go that way."""
