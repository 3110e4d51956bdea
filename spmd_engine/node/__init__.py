"""What the processes of one node have in common: memory that all can read and write, and a way to wake each other.

It knows of ranks only which process each of them is; what they write there, and when, is ``comm``'s.
"""
