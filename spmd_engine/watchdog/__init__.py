"""What each rank is doing, where others can read it, and who is told when one waits for too long.

Nothing here sends or receives what a program computes. ``comm`` writes down what it calls and waits for, other floors
what they do meanwhile (``Activity.phase``), and a thread of each process looks whether somebody waits without end.
"""
