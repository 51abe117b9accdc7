"""Several hosts on one machine: Linux namespaces joined by a switch whose cables can be pulled.

A host is a process with namespaces of its own for network, mounts, System V and POSIX shared memory, the host name and
process ids; `Hosts.run` starts commands in it. Its only network card is one end of a veth pair, whose other end is a
port of a bridge in one more namespace, the switch. Both ends are limited to a rate by tbf, so that a cable carries that
much in each direction. Every host has a tmpfs of its own on /dev/shm. Processors and the disk are shared: the disk
stands for the network file system that the hosts of a cluster have.

Nothing stays behind. A host lives as long as the pipe to its first process, which ends with this program, however that
ends; the kernel then kills every process of the host, and its network goes with it.
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

NETWORK = "10.77.0"  # of a /24; it exists in the namespaces only
CARD = "eth0"
# A frame can be 64 KiB before the card segments it. More than one would let short messages pass faster than the rate.
BURST_BYTES = 70_000
LONGEST_WAIT = "20ms"  # in the queue of a port; what would wait longer is dropped, as by a switch
UNSHARE = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
PROBE = (
    "ip link add switch type bridge",
    "ip link add port type veth peer name card",
    f"tc qdisc add dev port root tbf rate 1gbit burst {BURST_BYTES} latency {LONGEST_WAIT}",
    "mount -t tmpfs tmpfs /dev/shm",
)
COMMANDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}


class HostsError(RuntimeError):
    """This machine cannot make hosts, or a command that makes them has failed; the message says why."""


def obstacle() -> str | None:
    """Why this machine cannot make hosts, or None if it can."""
    if platform.system() != "Linux":
        return f"hosts are made of Linux namespaces, and this is {platform.system()}"
    missing = [f"{command} (of {package})" for command, package in COMMANDS.items() if shutil.which(command) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces: run it with sudo"
    probe = subprocess.run([*UNSHARE, "sh", "-c", " && ".join(PROBE)], capture_output=True, text=True)
    if probe.returncode:
        return f"this root may not make namespaces with links ({probe.stderr.strip()}): a container needs --privileged"
    return None


class Hosts:
    """``count`` hosts of addresses 10.77.0.1 and on, named host0 and on, for a with statement.

    Args:
        count: 1 to 200.
        rate: of each cable, in each direction, as tc has it; default 1gbit.
        delay: of each cable, as netem has it (``"100us"``), where the kernel has netem; else `has_delay` is False and
            the cables have none but their own. Default none.

    Raises HostsError if this machine cannot make them.
    """

    def __init__(self, count: int = 4, *, rate: str = "1gbit", delay: str | None = None) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"hosts: expected a count of 1 to 200, got {count}")
        if (reason := obstacle()) is not None:
            raise HostsError(f"cannot make hosts: {reason}")
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
        # A socket of IPv6 that takes a connection of IPv4 knows the other side by the longer address.
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
        """Rate and delay of what leaves by a card."""
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
            raise HostsError(f"hosts: cannot make a namespace: {process.stderr.read().strip()}")
        return process

    @staticmethod
    def _checked(command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HostsError(f"hosts: {' '.join(command)} failed: {done.stderr.strip()}")

    def _in_switch(self, *command: str) -> None:
        # Its network only: to give a card away, ip has to find the process of a host by its id on this machine.
        self._checked(["nsenter", "--target", str(self._switch.pid), "--net", *command])

    def _call(self, host: int, *command: str) -> None:
        self._checked([*_enter(self._namespaces[1 + host]), *command])

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts ``command`` on a host; ``options`` are those of `subprocess.Popen`.

        What comes back is a process of this machine that waits for the one on the host, passes its exit status on, and
        does not pass signals on: use `kill`.
        """
        return subprocess.Popen([*_enter(self._namespaces[1 + host]), *command], **options)

    def handle(self, host: int, pid: int) -> int | None:
        """A file descriptor for a process by its id on its host (see `os.pidfd_open`); None if it has ended."""
        ids = os.readlink(f"/proc/{self._namespaces[1 + host].pid}/ns/pid_for_children")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns" / "pid") == ids and _innermost_id(process) == pid:
                    return os.pidfd_open(int(process.name))
            except OSError:  # it has ended since glob saw it
                continue
        return None

    def kill(self, host: int, pid: int, number: int = signal.SIGKILL) -> bool:
        """Sends a signal to a process by its id on its host; False if it had ended before."""
        handle = self.handle(host, pid)
        if handle is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
        os.close(handle)
        return True

    def cut(self, host: int) -> None:
        """Pulls the cable of a host out of the switch."""
        self._in_switch("ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plugs the cable of a host in again."""
        self._in_switch("ip", "link", "set", f"port{host}", "up")

    def close(self) -> None:
        """Ends every process of every host, and the hosts."""
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
    """The command that runs another one in the namespaces which a process of unshare has made."""
    pid = namespace.pid
    kinds = ("--net", "--mount", "--ipc", "--uts", f"--pid=/proc/{pid}/ns/pid_for_children")
    return ["nsenter", "--target", str(pid), *kinds]


def _innermost_id(process: Path) -> int:
    """The id of a process in the innermost namespace of process ids that it is in."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])
