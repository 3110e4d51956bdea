"""The dry run of a step, on shapes: what each rank computes, sends and holds."""
