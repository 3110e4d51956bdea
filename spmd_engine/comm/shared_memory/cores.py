"""The number of cores that this process may use: its CPU affinity, limited by the quotas of its control groups.

A container with two of a node's 64 cores can often run on all 64, for two seconds of work each second. More threads
exhaust the quota early in each period (100 ms by default); the system then stops all until the next period.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

OWN = Path("/proc/self/cgroup")  #: this process's control groups: lines of number:controllers:path
GROUPS = "/sys/fs/cgroup"  #: the mount point of control groups


def cores_here() -> float:
    """The number of cores that this process may use, more than 0; a quota may be a fraction of a core."""
    return min(float(len(os.sched_getaffinity(0))), quota_here()[1])


def cores_of(ranks: Sequence[tuple[Sequence[int], tuple[str, float]]]) -> int:
    """The number of whole cores of a node's ranks together. ``ranks``: affinity and quota of each."""
    quotas = dict(quota for _, quota in ranks)  # ranks in one control group share its quota
    return int(min(len({core for cores, _ in ranks for core in cores}), sum(quotas.values())))


def quota_here() -> tuple[str, float]:
    """The control group with the smallest quota for this process, and the quota in cores; "" and inf if none."""
    return min([("", inf), *((group, _quota_of(group)) for group in control_groups("cpu"))], key=lambda quota: quota[1])


def control_groups(controller: str) -> list[str]:
    """The folders of this process's control groups of a controller, from the root to its own.

    Parent groups may have smaller limits. A container that cannot see them sees its own group as the root.
    """
    groups = []
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                group = f"{GROUPS}/{controller}" if controllers else GROUPS  # version 1: a tree for each controller
                groups.append(group)
                for name in filter(None, path.split("/")):
                    group += f"/{name}"
                    groups.append(group)
    return groups


def _quota_of(group: str) -> float:
    """The quota of a control group in cores."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError):
            quota, period = " ".join([Path(group, name).read_text() for name in names]).split()
            return inf if quota in ("max", "-1") else int(quota) / int(period)
    return inf
