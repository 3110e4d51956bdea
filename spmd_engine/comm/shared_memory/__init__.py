"""Memory that the processes of a node share, and futexes with which they wake each other."""
