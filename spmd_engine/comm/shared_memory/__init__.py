"""What the processes of a node share: memory that all can read and write, and ways to wake each other."""
