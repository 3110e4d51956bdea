"""A step run on shapes: what each rank would send, compute and keep."""
