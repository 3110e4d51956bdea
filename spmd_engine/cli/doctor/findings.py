"""What ``doctor`` concludes from facts: a pure function of them, so that tests need no broken machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from spmd_engine.cli.doctor.facts import EXTRAS
from spmd_engine.units import readable_bytes

GOOD, WARNING, ERROR = "good", "warning", "error"
SLOW_RANK = 0.7  #: a rank whose products are slower than this part of the median is named
SLOW_LINK = 3.0  #: a pair whose latency or time for a byte exceeds that of the median so many times
SLOW_SYNC = 1.0  #: seconds to write and sync a file of 4 MiB
LEAST_SHARED = 64 << 20  #: bytes of shared memory a rank
LEAST_FILES = 256


@dataclass(frozen=True)
class CheckResult:
    """The state of one thing, and what to do about it."""

    name: str
    state: str  #: GOOD, WARNING or ERROR
    text: str
    remedy: str = ""


def diagnose(
    ranks: Sequence[Mapping[str, Any]], together: Mapping[str, Any], world_error: str = ""
) -> list[CheckResult]:
    """The findings from the facts of each rank and of all ``together``; ``world_error``: why ranks cannot join."""
    findings = [*_launch(ranks, world_error), *_equal(ranks), *_cores(ranks), *_memory(ranks), *_folder(ranks)]
    if together:
        findings += [*_communication(together), *_speeds(ranks, together)]
    return [*findings, *_extras(ranks), *_failed(ranks)]


def _known(facts: Mapping[str, Any], name: str, default: Any) -> Any:
    value = facts.get(name, default)
    return default if isinstance(value, str) and value.startswith("error: ") else value


def _host(facts: Mapping[str, Any]) -> str:
    return _known(facts, "environment", {}).get("host", "")


def _failed(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        where = [n for n, facts in enumerate(ranks) if str(facts.get(name)).startswith("error: ")]
        if where and name not in ("folder", "shared_memory"):
            text = str(ranks[where[0]][name]).removeprefix("error: ")
            yield CheckResult(name.replace("_", " "), WARNING, f"could not be examined on {_ranks(where)}: {text}")


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _launch(ranks: Sequence[Mapping[str, Any]], world_error: str) -> Iterator[CheckResult]:
    first = ranks[0]
    mpi, size = _known(first, "mpi", {}), _known(first, "launcher_size", 1)
    library = mpi.get("library", "no MPI library is loaded")
    if world_error:
        yield CheckResult(
            "ranks", ERROR, world_error, "use the mpiexec of the environment that has mpi4py: 'which mpiexec'"
        )
    elif size > 1 and mpi.get("size", 1) != size:
        yield CheckResult(
            "ranks",
            ERROR,
            f"the launcher started {size} processes, but MPI sees {mpi.get('size', 1)}",
            "the launcher belongs to another MPI library: use the mpiexec of this environment",
        )
    elif size == 1 and _known(first, "allocation", 1) > 1:
        yield CheckResult(
            "ranks",
            ERROR,
            f"plain python in a Slurm allocation of {first['allocation']} tasks: this is one process",
            "start it with srun or mpiexec",
        )
    else:
        more = "" if len(ranks) > 1 else "; 'mpiexec -n N python -m spmd_engine doctor' examines communication, too"
        yield CheckResult("ranks", GOOD, f"{len(ranks)}{more}")
    threads = mpi.get("threads")
    if threads and threads != "multiple":
        yield CheckResult(
            "MPI library",
            WARNING,
            f"{library}; its thread level is {threads}: data between nodes move only while ranks wait",
            "use an MPI library that was built with MPI_THREAD_MULTIPLE",
        )
    else:
        yield CheckResult("MPI library", GOOD, library)


def _equal(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """What must be equal on all ranks."""
    digests = Counter(_known(facts, "package", "") for facts in ranks)
    usual = digests.most_common(1)[0][0]
    others = [n for n, facts in enumerate(ranks) if _known(facts, "package", "") != usual]
    if others:
        yield CheckResult(
            "package",
            ERROR,
            f"{_ranks(others)} of {len(ranks)} run other files of spmd_engine than the others",
            "install the same version on every node",
        )
    else:
        version = _known(ranks[0], "environment", {}).get("spmd_engine", "from its folder")
        yield CheckResult(
            "package", GOOD, f"spmd_engine {version}, the same files on all ranks" if len(ranks) > 1 else version
        )
    names = dict.fromkeys(name for facts in ranks for name in _known(facts, "environment", {}))
    for name in names:
        if name in ("command", "host", "cores", "processor", "system", "spmd_engine") or name.isupper():
            continue
        found = defaultdict(list)
        for n, facts in enumerate(ranks):
            found[_known(facts, "environment", {}).get(name, "absent")].append(n)
        if len(found) > 1:
            text = "; ".join(f"{value} on {_ranks(where)}" for value, where in found.items())
            yield CheckResult(name, WARNING, text, "install the same version on every node")


def _cores(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    by_node = defaultdict(list)
    for n, facts in enumerate(ranks):
        by_node[_host(facts)].append(n)
    for node, members in by_node.items():
        sets = {n: set(_known(ranks[n], "cores", [])) for n in members}
        usable = set().union(*sets.values())
        name = f"cores of {node}" if len(by_node) > 1 else "cores"
        shared = Counter(core for cores in sets.values() for core in cores)
        bound = all(len(cores) == 1 for cores in sets.values())
        crowded = {core: count for core, count in shared.items() if bound and count > 1}
        quotas = [_known(ranks[n], "quota", inf) for n in members]
        if crowded and len(usable) < len(members):
            core, count = max(crowded.items(), key=lambda pair: pair[1])
            where = [n for n in members if core in sets[n]]
            yield CheckResult(
                name,
                ERROR,
                f"{_ranks(where)} are bound to core {core}",
                "bind each rank to a core of its own: mpiexec -bind-to core, or srun --cpu-bind=cores",
            )
        elif len(members) > min(len(usable), min(quotas)):
            limit = f"{min(quotas):g} by a quota" if min(quotas) < len(usable) else len(usable)
            yield CheckResult(
                name,
                WARNING,
                f"{len(members)} ranks on {limit} cores: they take turns",
                "start at most one rank a core",
            )
        else:
            yield CheckResult(name, GOOD, f"{len(usable)} for {len(members)} rank(s)")
        asked = _known(ranks[members[0]], "thread_variables", {})
        wanted = [int(value) for value in asked.values() if value.isdecimal()]
        threads = max([_known(ranks[n], "threads", 1) for n in members] + wanted)
        share = max(1, len(usable) // len(members))
        if threads > share:
            setting = ", ".join(f"{key}={value}" for key, value in asked.items()) or "by default"
            yield CheckResult(
                "threads",
                ERROR if threads >= 4 * share else WARNING,
                f"{threads} BLAS threads a rank, {len(members)} rank(s) on {len(usable)} cores ({setting})",
                f"unset {' and '.join(asked) or 'what sets the threads'}, or set it to {share}",
            )
        else:
            products = ", ".join(_known(ranks[members[0]], "blas", []))
            yield CheckResult("threads", GOOD, f"{threads} BLAS thread(s) a rank; {products}")
    simd = Counter(tuple(_known(facts, "simd", [])) for facts in ranks)
    processor = _known(ranks[0], "environment", {}).get("processor", "")
    yield CheckResult("processor", GOOD, f"{processor} ({', '.join(simd.most_common(1)[0][0]) or 'no AVX2'})")


def _memory(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    local = sum(
        _known(facts, "environment", {}).get("host") == _known(ranks[0], "environment", {}).get("host")
        for facts in ranks
    )
    room = ranks[0].get("shared_memory")
    if not isinstance(room, Mapping):
        yield CheckResult("shared memory", ERROR, f"/dev/shm: {str(room).removeprefix('error: ')}", "mount it as tmpfs")
    elif room["free"] < LEAST_SHARED * local:
        yield CheckResult(
            "shared memory",
            ERROR if room["free"] < LEAST_SHARED else WARNING,
            f"/dev/shm has {readable_bytes(room['free'])} free for {local} rank(s)",
            "enlarge it (docker run --shm-size=4g), or remove files of ended jobs from it",
        )
    else:
        yield CheckResult("shared memory", GOOD, f"/dev/shm has {readable_bytes(room['free'])} free")
    memory = [_known(facts, "memory", {"limit": inf, "installed": inf}) for facts in ranks]
    limited = [n for n, sizes in enumerate(memory) if sizes["limit"] < 0.95 * sizes["installed"]]
    if limited:
        n = min(limited, key=lambda n: memory[n]["limit"])
        yield CheckResult(
            "memory",
            WARNING,
            f"{_host(ranks[n])} may use {readable_bytes(memory[n]['limit'])} for all its ranks, by a control group",
            f"raise the job's limit, or plan for it: plan --memory {readable_bytes(memory[n]['limit'] // local)}",
        )
    least = min(_known(facts, "files", LEAST_FILES) for facts in ranks)
    if 0 <= least < LEAST_FILES:
        yield CheckResult("open files", WARNING, f"at most {least} a process", "raise the limit: ulimit -n 1024")


def _folder(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    for n, facts in enumerate(ranks):
        if not isinstance(facts.get("folder"), Mapping):
            text = str(facts.get("folder")).removeprefix("error: ")
            yield CheckResult(
                "run folder",
                ERROR,
                f"rank {n} cannot write there: {text}",
                "choose another folder with --folder, and --run",
            )
            return
    slowest = max(range(len(ranks)), key=lambda n: ranks[n]["folder"]["write"])
    speed = ranks[slowest]["folder"]
    text = f"4 MiB are on the disk in {speed['write']:.2f} s"
    if speed["write"] > SLOW_SYNC:
        yield CheckResult(
            "run folder", WARNING, f"{text} on rank {slowest}", "save to a quicker file system, or less often"
        )
    else:
        yield CheckResult("run folder", GOOD, f"{text}, and a rename is atomic")


def _communication(together: Mapping[str, Any]) -> Iterator[CheckResult]:
    wrong = [name for name, right in together["collectives"].items() if not right]
    if wrong:
        yield CheckResult(
            "collectives", ERROR, f"wrong results: {', '.join(wrong)}", "report this with the output of doctor --json"
        )
    else:
        small, large = (together["all_reduce"][size] for size in ("8", "1048576"))
        times = f"all_reduce of 8 bytes {1e6 * small:.0f} us, of 1 MiB {1e3 * large:.2f} ms"
        yield CheckResult("collectives", GOOD, f"5 operations in 3 dtypes are right; {times}")
    several = len(set(together["nodes"])) < len(together["nodes"])
    if several and not together["shares_memory"]:
        yield CheckResult(
            "transport",
            WARNING,
            "ranks of a node do not read each other's memory: they send messages",
            "allow ptrace between processes of a user, or give the container /dev/shm",
        )
    else:
        count = len(set(together["nodes"]))
        within = "shared memory within a node" if several else "one rank a node"
        yield CheckResult("transport", GOOD, within + (f"; MPI between {count} nodes" if count > 1 else ""))
    yield from _links(together)


def _links(together: Mapping[str, Any]) -> Iterator[CheckResult]:
    nodes = together["nodes"]
    crowded = together["crowded"]
    kinds: dict[bool, dict[str, tuple[float, float]]] = defaultdict(dict)
    for pair, link in together["links"].items():
        a, b = map(int, pair.split())
        kinds[nodes[a] == nodes[b]][pair] = link
    for same, links in kinds.items():
        latency, bandwidth = (median(link[column] for link in links.values()) for column in (0, 1))
        slow = {
            pair: link
            for pair, link in links.items()
            if link[0] > SLOW_LINK * latency + 1e-4 or link[1] * SLOW_LINK < bandwidth
        }
        name = "links within nodes" if same else "links between nodes"
        if slow and len(links) > 2 and not (same and crowded):
            pair, (late, wide) = min(slow.items(), key=lambda item: item[1][1])
            a, b = pair.split()
            ends = Counter(rank for other in slow for rank in other.split())
            rank, count = ends.most_common(1)[0]
            if count > 1 and count >= len(slow) - 1:
                a, b = rank, next(other for other in pair.split() if other != rank)
            yield CheckResult(
                name,
                WARNING,
                f"rank {a} ({nodes[int(a)]}) to rank {b} ({nodes[int(b)]}): {1e6 * late:.0f} us and {wide / 1e9:.2f} "
                f"GB/s, where the median is {1e6 * latency:.0f} us and {bandwidth / 1e9:.2f} GB/s",
                f"examine the link or the processor of rank {a}",
            )
        else:
            yield CheckResult(
                name, GOOD, f"{1e6 * latency:.0f} us, {bandwidth / 1e9:.2f} GB/s (median of {len(links)} pairs)"
            )


def _speeds(ranks: Sequence[Mapping[str, Any]], together: Mapping[str, Any]) -> Iterator[CheckResult]:
    speeds = together["speeds"]
    usual = median(speeds)
    slow = [n for n, speed in enumerate(speeds) if speed < SLOW_RANK * usual]
    if slow:
        worst = min(slow, key=lambda n: speeds[n])
        yield CheckResult(
            "speed",
            WARNING,
            f"rank {worst} on {_host(ranks[worst])} computes {speeds[worst] / 1e9:.1f} GFLOP/s; the median is "
            f"{usual / 1e9:.1f}",
            f"look for another program on cores {_known(ranks[worst], 'cores', [])}, a lower clock or a quota",
        )
    else:
        yield CheckResult("speed", GOOD, f"{usual / 1e9:.1f} GFLOP/s a core in float32, alike on all ranks")


def _extras(ranks: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    lacking = defaultdict(list)
    for name in EXTRAS:
        for n, facts in enumerate(ranks):
            if name not in _known(facts, "extras", []):
                lacking[name].append(n)
    compiled = [_known(facts, "compiled_loops", True) for facts in ranks]
    loops = [n for n, there in enumerate(compiled) if not there and n not in lacking["numba"]]
    for name, where in lacking.items():
        if where and len(where) < len(ranks):
            yield CheckResult(
                name, ERROR, f"absent on {_ranks(where)}, present on the others", "install it on every node"
            )
    if loops:
        yield CheckResult(
            "compiled loops",
            WARNING,
            f"{_ranks(loops)} cannot write them to a cache, and compile them at each start",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    absent = [name for name, where in lacking.items() if len(where) == len(ranks)]
    texts = [f"{name} ({EXTRAS[name][1]}: pip install 'spmd_engine[{EXTRAS[name][0]}]')" for name in absent]
    yield CheckResult("extras", GOOD, f"not installed: {'; '.join(texts)}" if texts else "all are installed")
    gpus = _known(ranks[0], "gpus", [])
    if gpus:
        yield CheckResult("GPUs", GOOD, f"{len(gpus)} on rank 0: {gpus[0]}")
