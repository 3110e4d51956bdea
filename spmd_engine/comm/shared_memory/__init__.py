"""What the processes of a node share: memory, and futexes to wake each other."""
