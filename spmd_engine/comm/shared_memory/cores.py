"""How many cores this process may use: those that it may run on, and no more than its control groups let it have.

A container with two of a node's 64 cores may mostly run on all 64, for two seconds of work each second. Threads beyond
its quota use it up in a part of each period (of 100 ms, if nobody says otherwise), and all rest until the next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

OWN = Path("/proc/self/cgroup")  #: which control groups this process is in: a line of number:controllers:path each
GROUPS = "/sys/fs/cgroup"  #: where they are mounted


def cores_here() -> float:
    """How many cores this process may use, above 0; a quota may be a part of one."""
    return min(float(len(os.sched_getaffinity(0))), quota_here()[1])


def cores_of(ranks: Sequence[tuple[Sequence[int], tuple[str, float]]]) -> int:
    """How many whole cores ranks of a node have between them, by the cores that each may run on, and its quota."""
    quotas = dict(quota for _, quota in ranks)  # those in one group share what it may have
    return int(min(len({core for cores, _ in ranks for core in cores}), sum(quotas.values())))


def quota_here() -> tuple[str, float]:
    """The control group that holds this process to least, and to how many cores; "" and inf: none does.

    Its own group may be held to less by those around it. A container that does not see these has its own as the root.
    """
    found = [("", inf)]
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                group = f"{GROUPS}/cpu" if controllers else GROUPS  # version 1 has a tree for each controller
                found.append((group, _quota_of(group)))
                for name in filter(None, path.split("/")):
                    group += f"/{name}"
                    found.append((group, _quota_of(group)))
    return min(found, key=lambda each: each[1])


def _quota_of(group: str) -> float:
    """In cores."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError):
            quota, period = " ".join([Path(group, name).read_text() for name in names]).split()
            return inf if quota in ("max", "-1") else int(quota) / int(period)
    return inf
