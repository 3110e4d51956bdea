"""Runs an MPI program on two emulated hosts of one machine, with a slow link between them.

    python benchmarks/two_hosts.py -n 4 --rate 1gbit -- python -m spmd_engine train --model gpt-nano

A host is a network namespace with its own host name and half of the cores; the link is a pair of virtual network
devices whose rate ``tc`` limits. Ranks are assigned in blocks: of four, the first two are on the first host. It needs
Linux, root, iproute2 (ip, tc), util-linux (unshare, taskset) and MPICH's mpiexec. The hosts and their processes are
always removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

TOOLS = ("ip", "tc", "unshare", "taskset", "mpiexec")
QUEUE = "50ms"  # how long the link may delay data before it drops them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks, an even number (default 2)")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in tc's notation (default 1gbit; 0: no limit)"
    )
    parser.add_argument("--delay", default="0ms", help="delay of each packet, in tc's notation (default 0ms)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of every rank")
    options = parser.parse_args()
    command = options.command[options.command[:1] == ["--"] :]
    if missing := why_not():
        print(f"two_hosts: {missing}", file=sys.stderr)
        return 2
    if options.n < 2 or options.n % 2 or not command:
        parser.error("give an even number of ranks, and a command")
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with two_hosts(options.rate, options.delay) as hosts:
        return run(hosts, options.n, command)


def why_not() -> str | None:
    """The tools or rights that are missing to emulate hosts, in one line; None if there are none."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux, and to be root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(missing)} in PATH" if missing else None


@contextmanager
def two_hosts(rate: str, delay: str):
    """A context with the hosts; yields the names of their namespaces by address."""
    names = [f"spmd{os.getpid()}{letter}" for letter in "ab"]
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    addresses = [f"{net}.{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "name", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
            slow_down(name, rate, delay)
        wait_until_up(names)
        yield dict(zip(addresses, names, strict=True))
    finally:
        for name in names:
            take_down(name)


def wait_until_up(names: list[str]) -> None:
    """Wait until the link is up, up to a second after its creation; UCX ignores a device that is down."""
    show = [["ip", "-n", name, "-brief", "link", "show", "dev", "wire"] for name in names]
    deadline = time.monotonic() + 10
    while any(" UP " not in subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout for command in show):
        if time.monotonic() > deadline:
            raise SystemExit("two_hosts: the link does not come up")
        time.sleep(0.05)


def slow_down(name: str, rate: str, delay: str) -> None:
    def discipline(*words: str) -> None:
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "wire", *words], check=True)

    place = ["root", "handle", "1:"]
    if rate != "0":
        discipline(*place, "tbf", "rate", rate, "burst", "128kb", "latency", QUEUE)
        place = ["parent", "1:"]
    if delay != "0ms":
        discipline(*place, "netem", "delay", delay, "limit", "100000")


def take_down(name: str) -> None:
    """End the processes of a host, and remove it with its device."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for process in pids.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def run(hosts: dict[str, str], ranks: int, command: list[str]) -> int:
    """Run ``command`` on ``ranks`` ranks; returns the exit code of mpiexec, which runs on the first host."""
    cores = sorted(os.sched_getaffinity(0))
    halves = cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]
    enter = {address: enter_host(name, half) for (address, name), half in zip(hosts.items(), halves, strict=True)}
    first, *_ = hosts
    places = ",".join(f"{address}:{ranks // 2}" for address in hosts)
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "launcher")
        launcher.write_text(launcher_script(enter))
        launcher.chmod(0o700)
        start = ["mpiexec", "-launcher", "ssh", "-launcher-exec", str(launcher), "-localhost", first]
        start += ["-hosts", places, "-n", str(ranks), *command]
        environment = dict(os.environ, UCX_TLS="tcp,self", UCX_NET_DEVICES="wire,lo")
        return subprocess.run([*enter[first], *start], env=environment).returncode


def enter_host(name: str, cores: list[int]) -> list[str]:
    """The prefix of a command that runs on a host."""
    with_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
    return ["ip", "netns", "exec", name, *with_name, "taskset", "-c", ",".join(map(str, cores))]


def launcher_script(enter: dict[str, list[str]]) -> str:
    """A stand-in for ssh: it is called as ``ssh -x HOST COMMAND...``, and a shell interprets COMMAND."""
    cases = "\n".join(f'{address}) exec {shlex.join(words)} sh -c "$*" ;;' for address, words in enter.items())
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in
{cases}
esac
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
