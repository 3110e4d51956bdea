"""What ``doctor`` concludes from facts: a pure function of them, so that tests need no broken machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from typing import Any

from spmd_engine.observability.facts import EXTRAS
from spmd_engine.runtime.launchers import MPI_MIXED, NOT_MIXED
from spmd_engine.units import readable_bytes

GOOD, WARNING, ERROR = "good", "warning", "error"
SLOW_RANK = 0.7  #: a rank whose products are slower than this part of the median is named
SLOW_LINK = 3.0  #: a pair whose latency or time for a byte exceeds that of quick pairs so many times
LEAST_BANDWIDTH = 5e7  #: bytes/s between nodes: half of what gigabit Ethernet gives
SLOW_SYNC = 1.0  #: seconds to write and sync a file of 4 MiB
SLOW_DISK = 4.0  #: a node whose file takes longer than the median by this factor, and a tenth of SLOW_SYNC
LEAST_SHARED = 16 << 20  #: bytes a rank in /dev/shm, which MPI libraries use; the engine's own memory is not there
NO_SHARED = 2 << 20  #: bytes in /dev/shm with which no rank starts
LEAST_FILES = 256
LOCKED = 1 << 30  #: bytes of locked memory, which drivers of fabrics need
UNLIMITED = 1 << 64  #: resource.RLIM_INFINITY is -1
LEAST_DISK = 1 << 30  #: bytes that are free for runs
LISTED = 6  #: how many of the slowest are listed
LARGEST_SHIFT = 2.0  #: seconds between the clocks of two nodes


Facts = Mapping[str, Any]  #: by name; what could not be observed is a text that begins with "error: "
Ranks = Sequence[Facts]


@dataclass(frozen=True)
class CheckResult:
    """The state of one thing, and what to do about it."""

    state: str  #: GOOD, WARNING or ERROR
    name: str
    text: str
    remedy: str = ""


#: A check that found nothing wrong; what may slow a job down or surprise its user; and what makes a job fail.
good, warning, error = (partial(CheckResult, state) for state in (GOOD, WARNING, ERROR))


def diagnose(ranks: Ranks, together: Facts, world_error: str = "") -> list[CheckResult]:
    """The findings from the facts of each rank and of all ``together``; ``world_error``: why ranks cannot join."""
    findings = [*_launch(ranks, world_error), *_equal(ranks), *_cores(ranks), *_memory(ranks)]
    findings += _folder(ranks, together)
    if together:
        findings += [*_communication(ranks, together), *_links(together), *_speeds(ranks, together)]
    return [*findings, *_extras(ranks), *_gpus(ranks, together), *_failed(ranks)]


def slowest(ranks: Ranks, together: Facts) -> list[CheckResult]:
    """Cores, links and disks by their speed, the slowest first."""
    names = [f"rank {n} ({_host(facts)})" for n, facts in enumerate(ranks)]
    tables = {
        "cores, GFLOP/s": [(facts["speed"][0] / 1e9, name) for facts, name in zip(together.get("ranks", []), names)],
        "links, GB/s": [
            (bandwidth / 1e9, f"ranks {pair.replace(' ', ', ')}")
            for pair, (_, bandwidth) in together.get("links", {}).items()
        ],
        "disks, MB/s": [(4.2 / seconds, node) for node, seconds in _seconds_of_disks(ranks).items()],
    }
    return [
        good(f"slowest {what}", "; ".join(f"{name} {speed:.3g}" for speed, name in sorted(table)[:LISTED]))
        for what, table in tables.items()
        if table
    ]


def _known(facts: Facts, name: str, default: Any) -> Any:
    value = facts.get(name, default)
    return default if isinstance(value, str) and value.startswith("error: ") else value


def _host(facts: Facts) -> str:
    return _known(facts, "environment", {}).get("host", "")


def _failed(ranks: Ranks) -> Iterator[CheckResult]:
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        where = [n for n, facts in enumerate(ranks) if str(facts.get(name)).startswith("error: ")]
        if where and name not in ("folder", "shared_memory"):
            text = str(ranks[where[0]][name]).removeprefix("error: ")
            text = f"could not be examined on {_ranks(where)}: {text}"
            yield warning(name.replace("_", " "), text, "nothing is known about it: examine it by hand")


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _launch(ranks: Ranks, world_error: str) -> Iterator[CheckResult]:
    first = ranks[0]
    mpi, launcher = _known(first, "mpi", {}), _known(first, "launcher", "")
    system, tasks, nodes = _known(first, "allocation", ("", 1, 1))
    library = mpi.get("library", "no MPI library is loaded")
    hosts = len({_host(facts) for facts in ranks})
    mpiexec = " ".join(_known(first, "mpiexec", None) or ("the mpiexec of its MPI library",))
    if world_error:
        text = world_error.removesuffix(NOT_MIXED).removesuffix("; 'doctor' says more")
        remedy = f"start it with {mpiexec}; under Slurm with MPICH, also srun --mpi=pmi2"
        yield error("ranks", text, remedy if MPI_MIXED in text else "remove the cause, then run this again")
    elif not launcher and len(ranks) == 1 and tasks > 1:
        text = f"plain python in an allocation of {tasks} tasks by {system}: this is one process"
        yield error("ranks", text, f"start it with srun or mpiexec: {mpiexec} -n {tasks} python -m ...")
    elif hosts < nodes or len(ranks) < tasks:
        text = f"{len(ranks)} on {hosts} node(s), but {system} has allocated {tasks} tasks on {nodes} node(s)"
        remedy = f"give mpiexec the nodes and the number of ranks (-hosts, -n {tasks}), or use srun"
        yield warning("ranks", text, remedy)
    else:
        by = f", started by {launcher}" if launcher else ""
        more = "" if len(ranks) > 1 else "; 'mpiexec -n N python -m spmd_engine doctor' examines communication, too"
        yield good("ranks", f"{len(ranks)}{by}{more}")
    threads = mpi.get("threads")
    if threads and threads != "multiple":
        yield warning(
            "MPI library",
            f"{library}; its thread level is {threads}: data between nodes move only while ranks wait",
            "use an MPI library that was built with MPI_THREAD_MULTIPLE",
        )
    else:
        yield good("MPI library", library)


def _equal(ranks: Ranks) -> Iterator[CheckResult]:
    """What must be equal on all ranks."""
    usual = Counter(_known(facts, "package", "") for facts in ranks).most_common(1)[0][0]
    others = [n for n, facts in enumerate(ranks) if _known(facts, "package", "") != usual]
    if others:
        yield error(
            "package",
            f"{_ranks(others)} of {len(ranks)} run other files of spmd_engine than the others",
            "install the same version on every node",
        )
    else:
        version = _known(ranks[0], "environment", {}).get("spmd_engine", "from its folder")
        yield good("package", f"spmd_engine {version}, the same files on all ranks" if len(ranks) > 1 else version)
    names = dict.fromkeys(name for facts in ranks for name in _known(facts, "environment", {}))
    for name in names:
        if name in ("command", "host", "cores", "processor", "system", "spmd_engine") or name.isupper():
            continue
        by_value = defaultdict(list)
        for n, facts in enumerate(ranks):
            by_value[_known(facts, "environment", {}).get(name, "absent")].append(n)
        if len(by_value) > 1:
            text = "; ".join(f"{value} on {_ranks(where)}" for value, where in by_value.items())
            yield warning(name, text, "install the same version on every node")


def _cores(ranks: Ranks) -> Iterator[CheckResult]:
    by_node = defaultdict(list)
    for n, facts in enumerate(ranks):
        by_node[_host(facts)].append(n)
    for node, members in by_node.items():
        sets = {n: set(_known(ranks[n], "cores", [])) for n in members}
        usable = set().union(*sets.values())
        name = f"cores of {node}" if len(by_node) > 1 else "cores"
        available = usable.union(*(_known(ranks[n], "launcher_cores", []) for n in members))
        quotas = [_known(ranks[n], "quota", inf) for n in members]
        #: sets of cores with more ranks than cores
        crowded = {
            frozenset(cores): where
            for cores in sets.values()
            if len(where := [n for n in members if sets[n] <= cores]) > len(cores) and cores < available
        }
        if crowded:
            cores, where = min(crowded.items(), key=lambda item: len(item[0]))
            yield error(
                name,
                f"{_ranks(where)} are bound to core {', '.join(map(str, sorted(cores)))}; {len(available)} are there",
                "bind each rank to a core of its own: mpiexec -bind-to core, or srun --cpu-bind=cores",
            )
        elif len(members) > min(len(usable), min(quotas)):
            limit = f"{min(quotas):g} cores (a quota)" if min(quotas) < len(usable) else f"{len(usable)} cores"
            yield warning(name, f"{len(members)} ranks on {limit}: they take turns", "start at most one rank a core")
        else:
            yield good(name, f"{len(usable)} for {len(members)} rank(s)")
        asked = _known(ranks[members[0]], "thread_variables", {})
        wanted = [int(value) for value in asked.values() if value.isdecimal()]
        threads = max([_known(ranks[n], "threads", 1) for n in members] + wanted)
        share = max(1, len(usable) // len(members))
        if threads > share:
            setting = ", ".join(f"{key}={value}" for key, value in asked.items()) or "by default"
            yield CheckResult(
                ERROR if threads >= 4 * share else WARNING,
                "threads",
                f"{threads} BLAS threads a rank, {len(members)} rank(s) on {len(usable)} cores ({setting})",
                f"unset {' and '.join(asked) or 'what sets the threads'}, or set it to {share}",
            )
        else:
            products = ", ".join(_known(ranks[members[0]], "blas", []))
            yield good("threads", f"{threads} BLAS thread(s) a rank; {products}")
    kinds = defaultdict(list)
    for n, facts in enumerate(ranks):
        instructions = ", ".join(_known(facts, "simd", [])) or "no AVX2"
        kinds[f"{_known(facts, 'environment', {}).get('processor', '')} ({instructions})"].append(n)
    if len(kinds) > 1:
        text = "; ".join(f"{kind} on {_ranks(where)}" for kind, where in kinds.items())
        remedy = "use nodes of one kind, or compare replicas no more: --check-replicas-every 0"
        yield warning("processor", text, remedy)
    else:
        yield good("processor", *kinds)


def _memory(ranks: Ranks) -> Iterator[CheckResult]:
    local = Counter(_host(facts) for facts in ranks)
    rooms = [_known(facts, "shared_memory", {"free": -1})["free"] / local[_host(facts)] for facts in ranks]
    n = min(range(len(ranks)), key=lambda n: rooms[n])
    room, on = ranks[n]["shared_memory"], f" on {_host(ranks[n])}" if len(local) > 1 else ""
    if not isinstance(room, Mapping):
        text = f"/dev/shm{on}: {str(room).removeprefix('error: ')}"
        yield error("shared memory", text, "mount it as tmpfs")
    elif rooms[n] < LEAST_SHARED:
        yield CheckResult(
            ERROR if room["free"] < NO_SHARED else WARNING,
            "shared memory",
            f"/dev/shm{on} has {readable_bytes(room['free'])} free for {local[_host(ranks[n])]} rank(s)",
            "enlarge it (docker run --shm-size=4g), or remove files of ended jobs from it",
        )
    else:
        yield good("shared memory", f"/dev/shm{on} has {readable_bytes(room['free'])} free")
    memory = [_known(facts, "memory", {"limit": inf, "installed": inf}) for facts in ranks]
    limited = [n for n, sizes in enumerate(memory) if sizes["limit"] < 0.95 * sizes["installed"]]
    if limited:
        n = min(limited, key=lambda n: memory[n]["limit"])
        share = memory[n]["limit"] // local[_host(ranks[n])]
        yield warning(
            "memory",
            f"{_host(ranks[n])} may use {readable_bytes(memory[n]['limit'])} for all its ranks, by a control group",
            f"raise the job's limit, or plan for it: plan --memory {readable_bytes(share)}",
        )
    limits = [_known(facts, "limits", {}) for facts in ranks]
    locked = LOCKED if any(_known(facts, "fabrics", []) for facts in ranks) else 0
    for name, at_least, option, what in (
        ("address space", min(sizes["installed"] for sizes in memory), "v unlimited", "bytes of memory"),
        ("files", LEAST_FILES, "n 1024", "open files"),
        ("locked memory", locked, "l unlimited", "locked bytes"),
    ):
        least, n = min((limit.get(name, -1) % UNLIMITED, n) for n, limit in enumerate(limits))
        if least < at_least:
            text = f"at most {least} {what} a process, on rank {n}"
            remedy = f"raise the limit on every node: ulimit -{option}, in the job's script too"
            yield warning(name, text, remedy)


def _seconds_of_disks(ranks: Ranks) -> dict[str, float]:
    """Seconds to write a file on each node, by its quickest rank, as ranks of a node write at the same time."""
    seconds: dict[str, float] = {}
    for facts in ranks:
        node, disk = _host(facts), _known(facts, "folder", {"write": inf})
        seconds[node] = min(seconds.get(node, inf), disk["write"])
    return seconds


def _folder(ranks: Ranks, together: Facts) -> Iterator[CheckResult]:
    for n, facts in enumerate(ranks):
        if not isinstance(facts.get("folder"), Mapping):
            text = str(facts.get("folder")).removeprefix("error: ")
            yield error(
                "run folder", f"rank {n} cannot write there: {text}", "choose another folder with --folder, and --run"
            )
            return
    disks = [facts["folder"] for facts in ranks]
    seconds_by_node = _seconds_of_disks(ranks)
    seconds, usual = max(seconds_by_node.values()), median(seconds_by_node.values())
    text, least = f"4 MiB are on the disk in {seconds:.2f} s", min(disk["free"] for disk in disks)
    sees = [facts["sees_folder"] for facts in together.get("ranks", [])]
    blind = [n for n, there in enumerate(sees) if not there and sees[0]]
    if blind:
        text = f"what rank 0 writes there is not there on {_ranks(blind)} ({_host(ranks[blind[0]])})"
        remedy = "write runs to a file system that all nodes share: --folder, and --run"
        yield error("run folder", text, remedy)
    elif seconds > SLOW_SYNC or seconds > max(SLOW_SYNC / 10, SLOW_DISK * usual):
        node = max(seconds_by_node, key=lambda node: seconds_by_node[node])
        others = f"; the median of nodes is {usual:.2f} s" if len(seconds_by_node) > 1 else ""
        text = f"{text} on {node}{others}"
        yield warning("run folder", text, "save to a quicker file system, or less often")
    elif least < LEAST_DISK:
        yield warning("run folder", f"{readable_bytes(least)} are free", "free space, or write elsewhere")
    elif not all(disk["locks"] for disk in disks):
        text = f"{text}, but files cannot be locked: two jobs that write to one run are detected late"
        yield warning("run folder", text, "start a run once at a time, or mount the file system with locks")
    else:
        yield good("run folder", f"{text}, and a rename is atomic")


def _communication(ranks: Ranks, together: Facts) -> Iterator[CheckResult]:
    by_rank, nodes = together["ranks"], together["nodes"]
    wrong = [name for name in by_rank[0]["right"] if not all(facts["right"][name] for facts in by_rank)]
    seconds = {name: max(facts["seconds"][name] for facts in by_rank) for name in by_rank[0]["seconds"]}
    if wrong:
        yield error("collectives", f"wrong results: {', '.join(wrong)}", "report this with the output of doctor --json")
    else:
        times = [f"{name.split()[0]} {1e3 * value:.1f}" for name, value in seconds.items() if not name.endswith(" 8")]
        text = f"{len(by_rank[0]['right'])} are right; all_reduce of 8 bytes {1e6 * seconds['all_reduce 8']:.0f} us"
        yield good("collectives", f"{text}; ms of 1 MiB: {', '.join(times)}")
    several, count = len(set(nodes)) < len(nodes), len(set(nodes))
    network = next((facts["network"] for facts in by_rank if facts["network"]), "") if count > 1 else ""
    fabrics = sorted({device for facts in ranks for device in _known(facts, "fabrics", [])})
    within = "shared memory within a node" if several else "one rank a node"
    between = f"; MPI between {count} nodes{f' by TCP over {network}' if network else ''}" if count > 1 else ""
    if several and not all(facts["memory"] for facts in by_rank):
        text = "ranks of a node cannot map each other's memory: they send messages"
        remedy = "run the ranks of a node in one container and as one user, and limit no address space (ulimit -v)"
        yield warning("transport", text, remedy)
    elif several and not all(facts["reads"] for facts in by_rank):
        text = f"{within}{between}, but ranks cannot read each other's memory: each large array is copied once more"
        yield warning("transport", text, "allow ptrace: docker run --cap-add SYS_PTRACE")
    elif network and fabrics:
        text = f"{within}{between}, although there is a fabric: {', '.join(fabrics)}"
        remedy = "load the cluster's MPI module, whose library has a driver for it, or name it (UCX_NET_DEVICES)"
        yield warning("transport", text, remedy)
    else:
        yield good("transport", within + between)
    clocks = [facts["clock"] for facts in by_rank]
    if max(clocks) - min(clocks) > LARGEST_SHIFT:
        n = max(range(len(clocks)), key=lambda n: abs(clocks[n] - median(clocks)))
        text = f"rank {n} ({nodes[n]}) differs by {clocks[n] - median(clocks):+.0f} s"
        yield warning("clocks", text, "synchronize them with NTP: logs and events of a run mix them")


def _links(together: Facts) -> Iterator[CheckResult]:
    nodes = together["nodes"]
    crowded = any(facts["crowded"] for facts in together["ranks"])
    kinds: dict[bool, dict[str, tuple[float, float]]] = defaultdict(dict)
    for pair, link in together["links"].items():
        a, b = map(int, pair.split())
        kinds[nodes[a] == nodes[b]][pair] = link
    for same, links in kinds.items():
        # A slow one of three nodes has two of three links, so the quickest quarter is what the others should reach.
        latency, bandwidth = (sorted(link[column] for link in links.values()) for column in (0, 1))
        latency, bandwidth = latency[len(links) // 4], bandwidth[-1 - len(links) // 4]
        usual = f"{1e6 * latency:.0f} us, {bandwidth / 1e9:.3g} GB/s (quickest quarter of {len(links)} pairs)"
        slow = {
            pair: link
            for pair, link in links.items()
            if link[1] * SLOW_LINK < bandwidth or (link[0] > SLOW_LINK * latency + 1e-4 and not crowded)
        }
        name = "links within nodes" if same else "links between nodes"
        if slow and len(links) > 2 and not (same and crowded):
            pair, (late, wide) = min(slow.items(), key=lambda item: item[1][1])
            a, b = pair.split()
            ends = Counter(rank if same else nodes[int(rank)] for other in slow for rank in other.split())
            end, count = ends.most_common(1)[0]
            shared = count > 1 and count >= len(slow) - 1
            part = f"{'the core of rank' if same else 'the network device of'} {end}, which all slow links share"
            text = (
                f"rank {a} ({nodes[int(a)]}) to rank {b} ({nodes[int(b)]}): {1e6 * late:.0f} us, {wide / 1e9:.3g} GB/s"
            )
            remedy = f"examine {part if shared else 'this link'}"
            yield warning(name, f"{text}; others: {usual}", remedy)
        elif not same and bandwidth < LEAST_BANDWIDTH:
            remedy = (
                "choose a quicker network device (UCX_NET_DEVICES), or examine it (ethtool); plan for it: calibrate"
            )
            yield warning(name, f"{usual}: slower than gigabit Ethernet", remedy)
        else:
            yield good(name, usual)


def _speeds(ranks: Ranks, together: Facts) -> Iterator[CheckResult]:
    crowded = any(facts["crowded"] for facts in together["ranks"])
    elapsed, processor = zip(*(facts["speed"] for facts in together["ranks"]), strict=True)
    speeds = processor if crowded else elapsed  # ranks that take turns: only processor time is their own
    usual = median(speeds)
    worst = min(range(len(speeds)), key=lambda n: speeds[n])
    if speeds[worst] < SLOW_RANK * usual:
        cores = ", ".join(map(str, _known(ranks[worst], "cores", [])))
        shares = processor[worst] >= SLOW_RANK * median(processor)
        yield warning(
            "speed",
            f"rank {worst} on {_host(ranks[worst])} computes {speeds[worst] / 1e9:.1f} GFLOP/s; the median is "
            f"{usual / 1e9:.1f}",
            f"end the other program on cores {cores}, or exclude the node"
            if shares
            else f"the clock of cores {cores} is lower: look for heat or a power limit, or exclude the node",
        )
    else:
        yield good("speed", f"{usual / 1e9:.1f} GFLOP/s a core in float32, alike on all ranks")


def _extras(ranks: Ranks) -> Iterator[CheckResult]:
    lacking = defaultdict(list)
    for name in EXTRAS:
        for n, facts in enumerate(ranks):
            if name not in _known(facts, "extras", []):
                lacking[name].append(n)
    compiled = [_known(facts, "compiled_loops", {"loaded": True, "cached": True}) for facts in ranks]
    uncached = [n for n, loops in enumerate(compiled) if not loops["cached"]]
    broken = [n for n, loops in enumerate(compiled) if not loops["loaded"] and n not in lacking["numba"]]
    for name, where in lacking.items():
        if where and len(where) < len(ranks):
            yield error(name, f"absent on {_ranks(where)}, present on the others", "install it on every node")
    if 0 < len(broken) < len(ranks) - len(lacking["numba"]):
        text = f"{_ranks(broken)} cannot use them and compute with NumPy: ranks differ in the last bits"
        yield error("compiled loops", text, "install the same numba and llvmlite on every node; SPMD_FAST=0")
    elif broken:
        text = "they are switched off (SPMD_FAST=0), or numba cannot be used: see the message above"
        yield warning("compiled loops", text, "unset SPMD_FAST, or install a numba for this numpy")
    elif uncached:
        yield warning(
            "compiled loops",
            f"{_ranks(uncached)} cannot write them to a cache, and compile them at each start",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    absent = [name for name, where in lacking.items() if len(where) == len(ranks)]
    texts = [f"{name} ({EXTRAS[name][1]}: pip install 'spmd_engine[{EXTRAS[name][0]}]')" for name in absent]
    yield good("extras", f"not installed: {'; '.join(texts)}" if texts else "all are installed")


def _gpus(ranks: Ranks, together: Facts) -> Iterator[CheckResult]:
    without = [n for n, facts in enumerate(ranks) if not _known(facts, "gpus", [])]
    sums = [facts["gpu"] for facts in together.get("ranks", []) if facts["gpu"]]
    if len(without) == len(ranks):
        return
    text = f"{len(ranks[0]['gpus'])} on rank 0: {ranks[0]['gpus'][0]}" if 0 not in without else "none on rank 0"
    if without:
        remedy = "give every node GPUs, install cupy and the driver there, and look at CUDA_VISIBLE_DEVICES"
        yield error("GPUs", f"{text}; none that CuPy can use on {_ranks(without)}", remedy)
    elif not all(total["right"] for total in sums):
        yield error("GPUs", f"{text}; a sum of their arrays is wrong", "train --transport staged")
    elif sums:
        seconds = max(total["seconds"] for total in sums)
        yield good("GPUs", f"{text}; all_reduce of 1 MiB {1e3 * seconds:.2f} ms; {sums[0]['path']}")
    else:
        yield good("GPUs", text)
