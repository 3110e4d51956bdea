"""Four virtual ranks in one process: no MPI, one debugger, results in rank order.

python examples/virtual_ranks.py
"""

import numpy as np

from spmd_engine import Mesh, run_threads


def program():
    with Mesh(data=2, model=2) as mesh:
        mine = np.full(2, float(mesh.rank))
        return {
            "at": mesh.coordinates,
            "sum over data": mesh.all_reduce(mine, over="data").tolist(),
            "gathered over model": mesh.all_gather(mine, over="model").tolist(),
        }


def main():
    results = run_threads(program, ranks=4)
    for rank, result in enumerate(results):
        print(rank, result)
    return results


if __name__ == "__main__":
    main()
