"""Several hosts on one machine: Linux namespaces connected by a switch whose cables can be unplugged.

A host is a process with separate namespaces for network, mounts, System V and POSIX shared memory, host name and
process ids; `Hosts.run` starts commands in it. Its only network card is one end of a veth pair; the other end is a port
of a bridge in another namespace, the switch. tbf limits both ends, so that a cable has that rate in each direction.
Every host has its own tmpfs on /dev/shm. CPUs and the disk are shared; the disk represents the network file system of a
cluster.

Nothing is left behind. A host lives as long as the pipe to its first process, which closes when this program ends, even
if it is killed; the kernel then kills every process of the host and removes its network.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"  # a /24 that exists only in the namespaces
CARD = "eth0"
# A frame can be 64 KiB before the card segments it. More than one would let short messages pass faster than the rate.
BURST_BYTES = 70_000
LONGEST_WAIT = "20ms"  # in the queue of a port; packets that would wait longer are dropped, as by a switch
UNSHARE = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
PROBE = (
    "ip link add switch type bridge",
    "ip link add port type veth peer name card",
    f"tc qdisc add dev port root tbf rate 1gbit burst {BURST_BYTES} latency {LONGEST_WAIT}",
    "mount -t tmpfs tmpfs /dev/shm",
)
COMMANDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}


class HostsError(RuntimeError):
    """This machine cannot create hosts, or a command failed; the message says why."""


def obstacle() -> str | None:
    """Why this machine cannot create hosts; None if it can."""
    if platform.system() != "Linux":
        return f"hosts are made of Linux namespaces, and this is {platform.system()}"
    missing = [f"{command} (of {package})" for command, package in COMMANDS.items() if shutil.which(command) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may create network namespaces: run it with sudo"
    probe = subprocess.run([*UNSHARE, "sh", "-c", " && ".join(PROBE)], capture_output=True, text=True)
    if probe.returncode:
        return f"cannot create namespaces with links here ({probe.stderr.strip()}); a container needs --privileged"
    return None


class Hosts:
    """``count`` hosts with addresses from 10.77.0.1 and names from host0; a context manager.

    Args:
        count: 1 to 200.
        rate: rate of each cable in each direction, in tc's syntax; default 1gbit.
        delay: delay of each cable in netem's syntax (``"100us"``); default none. If the kernel lacks netem,
            `has_delay` is False and no delay is added.

    Raises HostsError if this machine cannot create them.
    """

    def __init__(self, count: int = 4, *, rate: str = "1gbit", delay: str | None = None) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"hosts: expected a count of 1 to 200, got {count}")
        if (reason := obstacle()) is not None:
            raise HostsError(f"cannot create hosts: {reason}")
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self.has_delay = delay is not None
        self._namespaces: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")
        try:
            self._make(rate, delay)
        except BaseException:
            self.close()
            raise

    def _make(self, rate: str, delay: str | None) -> None:
        names = Path(self._folder.name) / "hosts"
        # An IPv6 socket that accepts an IPv4 connection sees the peer under its IPv4-mapped address.
        known = [f"{prefix}{address} host{n}" for n, address in enumerate(self.addresses) for prefix in ("", "::ffff:")]
        names.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self._switch = self._namespace("true")
        self._in_switch("ip", "link", "add", "switch", "type", "bridge")
        self._in_switch("ip", "link", "set", "switch", "up")
        for number, address in enumerate(self.addresses):
            host = self._namespace(
                f"hostname host{number} && mount --bind {names} /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
            )
            port, peer = f"port{number}", ("peer", "name", CARD, "netns", str(host.pid))
            self._in_switch("ip", "link", "add", port, "type", "veth", *peer)
            self._in_switch("ip", "link", "set", port, "master", "switch", "up")
            self._call(number, "ip", "address", "add", f"{address}/24", "dev", CARD)
            for card in ("lo", CARD):
                self._call(number, "ip", "link", "set", card, "up")
            for place, card in ((self._switch, port), (host, CARD)):
                self._limit(place, card, rate, delay)

    def _limit(self, place: subprocess.Popen[str], card: str, rate: str, delay: str | None) -> None:
        """Commands that limit the rate and delay of a card's outgoing packets."""
        add = ("tc", "qdisc", "add", "dev", card)
        limits = ("rate", rate, "burst", str(BURST_BYTES), "latency", LONGEST_WAIT)
        self._checked([*_enter(place), *add, "root", "handle", "1:", "tbf", *limits])
        if self.has_delay:
            command = [*_enter(place), *add, "parent", "1:1", "handle", "2:", "netem", "delay", str(delay)]
            done = subprocess.run(command, capture_output=True, text=True)
            self.has_delay = "qdisc kind is unknown" not in done.stderr
            if done.returncode and self.has_delay:
                raise HostsError(f"hosts: {' '.join(command)} failed: {done.stderr.strip()}")

    def _namespace(self, setup: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*UNSHARE, "sh", "-c", f"{setup} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._namespaces.append(process)
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise HostsError(f"hosts: cannot create a namespace: {process.stderr.read().strip()}")
        return process

    @staticmethod
    def _checked(command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HostsError(f"hosts: {' '.join(command)} failed: {done.stderr.strip()}")

    def _in_switch(self, *command: str) -> None:
        # Only the network namespace: to move a card, ip has to find a host's process by its id on this machine.
        self._checked(["nsenter", "--target", str(self._switch.pid), "--net", *command])

    def _call(self, host: int, *command: str) -> None:
        self._checked([*_enter(self._namespaces[1 + host]), *command])

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts ``command`` on a host; ``options`` are those of `subprocess.Popen`.

        Returns a local process that waits for the one on the host and returns its exit status. It does not forward
        signals: use `kill`.
        """
        return subprocess.Popen([*_enter(self._namespaces[1 + host]), *command], **options)

    def handle(self, host: int, pid: int) -> int | None:
        """A file descriptor for a process by its id on its host (see `os.pidfd_open`); None if it has ended."""
        ids = os.readlink(f"/proc/{self._namespaces[1 + host].pid}/ns/pid_for_children")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns" / "pid") == ids and _innermost_id(process) == pid:
                    return os.pidfd_open(int(process.name))
            except OSError:  # it ended after glob saw it
                continue
        return None

    def kill(self, host: int, pid: int, number: int = signal.SIGKILL) -> bool:
        """Sends a signal to a process by its id on its host; False if it has ended."""
        handle = self.handle(host, pid)
        if handle is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
        os.close(handle)
        return True

    def cut(self, host: int) -> None:
        """Unplugs the cable of a host."""
        self._in_switch("ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plugs in the cable of a host."""
        self._in_switch("ip", "link", "set", f"port{host}", "up")

    def close(self) -> None:
        """Kills all processes of all hosts, and removes the hosts."""
        for process in self._namespaces:
            process.kill()
        for process in self._namespaces:
            process.communicate()
        self._namespaces.clear()
        self._folder.cleanup()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _enter(namespace: subprocess.Popen[str]) -> list[str]:
    """The command that runs another one in the namespaces of an unshare process."""
    pid = namespace.pid
    kinds = ("--net", "--mount", "--ipc", "--uts", f"--pid=/proc/{pid}/ns/pid_for_children")
    return ["nsenter", "--target", str(pid), *kinds]


def _innermost_id(process: Path) -> int:
    """The id of a process in its innermost pid namespace."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])
