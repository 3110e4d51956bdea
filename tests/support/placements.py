"""The best placement of tasks on nodes, by trying all."""

from itertools import product


def exact(tasks):
    fitting = filter(tasks.fits, product(range(tasks.nodes), repeat=tasks.count))
    return min(fitting, key=tasks.cost)
