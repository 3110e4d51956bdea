"""Machines: their speeds and links, from files or from measurements."""
