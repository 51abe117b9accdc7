"""Hosts simulated with network namespaces (tools/hosts.py), and a training run on them with faults."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import four_hosts
import host_network
import hosts as hosts_module
from four_hosts import Fault, Outcome, Report, parse_arguments, schedule
from hosts import Hosts, HostsError, obstacle

KINDS = set(four_hosts.DEFAULT_KINDS)
OBSTACLE = obstacle()
needs_hosts = pytest.mark.skipif(OBSTACLE is not None, reason=f"no hosts here: {OBSTACLE}")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2, rate="100mbit") as hosts:
        yield hosts


def output(hosts: Hosts, host: int, *command: str) -> str:
    process = hosts.run(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process.communicate(timeout=60)[0]


def hears(hosts: Hosts, seconds: float) -> bool:
    """Whether host 1 receives a message from host 0 in time."""
    code = "import socket; s = socket.create_server(('host1', 5000)); s.settimeout(%f); print(s.accept()[0].recv(9))"
    server = hosts.run(
        1, [sys.executable, "-c", code % seconds], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    word = f"""
import socket, time
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    try:
        socket.create_connection(("host1", 5000), {seconds}).send(b"word")
        break
    except OSError:
        time.sleep(0.05)
"""
    hosts.run(0, [sys.executable, "-c", word]).wait()
    return server.communicate()[0] == "b'word'\n"


@needs_hosts
def test_hosts_share_only_the_network(two_hosts: Hosts) -> None:
    assert [output(two_hosts, host, "hostname") for host in range(2)] == ["host0\n", "host1\n"]
    name = f"shared-{random.getrandbits(64):x}"
    make = f"from multiprocessing.shared_memory import SharedMemory as M; M({name!r}, create=True, size=64); "
    owner = two_hosts.run(0, [sys.executable, "-c", make + "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    assert owner.stdout.readline() == b"1\n"
    find = (sys.executable, "-c", f"from multiprocessing.shared_memory import SharedMemory as M; M({name!r})")
    assert "FileNotFoundError" in output(two_hosts, 1, *find)
    assert name in output(two_hosts, 0, "ls", "/dev/shm")
    assert not (Path("/dev/shm") / name).exists()
    owner.communicate(b"\n")
    cards = output(two_hosts, 1, "ip", "-brief", "link").splitlines()
    assert [card.split("@")[0].split()[0] for card in cards] == ["lo", "eth0"]
    assert output(two_hosts, 1, "ps", "-e").count("\n") < 5  # only its own processes


@pytest.mark.sampled
@needs_hosts
def test_a_cut_link_carries_nothing_until_it_is_repaired(two_hosts: Hosts) -> None:
    assert hears(two_hosts, 10.0)
    two_hosts.cut(1)
    assert not hears(two_hosts, 1.0)
    two_hosts.mend(1)
    assert hears(two_hosts, 10.0)


@needs_hosts
def test_links_have_the_rate(two_hosts: Hosts) -> None:
    """8 MB at 100 Mbit/s take 0.64 s; without a limit they take milliseconds."""
    code = "import socket; s = socket.create_server(('host1', 5001)); print(1, flush=True); c = s.accept()[0]\n"
    code += "n = 0\nwhile data := c.recv(1 << 20): n += len(data)\nprint(n)"
    server = two_hosts.run(1, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "1\n"
    send = "import socket; socket.create_connection(('host1', 5001)).sendall(bytes(8_000_000))"
    start = time.monotonic()
    two_hosts.run(0, [sys.executable, "-c", send]).wait()
    assert server.communicate()[0] == "8000000\n"
    assert time.monotonic() - start > 0.6


@needs_hosts
def test_a_process_is_killed_by_its_id_on_its_host(two_hosts: Hosts) -> None:
    process = two_hosts.run(1, ["sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert two_hosts.handle(0, pid) is None, "the other host does not know it"
    assert two_hosts.kill(1, pid)
    assert process.wait(10) == -signal.SIGKILL
    assert not two_hosts.kill(1, pid)


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(number: int, tmp_path: Path) -> None:
    """Even if the program that created the hosts is killed."""
    mark = f"600.{random.getrandbits(32)}"  # seconds: an argument that no other process has
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell runs the tests in the background
sys.path.insert(0, {str(ROOT / "tools")!r})
from hosts import Hosts
with Hosts(2) as hosts:
    hosts.run(1, ["sleep", {mark!r}])
    print([process.pid for process in hosts._namespaces], flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    holders = json.loads(process.stdout.readline())
    assert mark in commands()
    process.send_signal(number)
    process.wait(20)
    deadline = time.monotonic() + 20
    while mark in commands() or any(Path(f"/proc/{pid}/ns").exists() for pid in holders):
        assert time.monotonic() < deadline, "a process of a host is still there"
        time.sleep(0.05)


def commands() -> str:
    """The arguments of all processes that are not zombies."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.sampled
@needs_hosts
def test_training_survives_a_kill_and_a_cut(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every survivor reports in time, and the losses are those of a run without faults. Without --full a run has only
    one of the two faults."""
    kinds = KINDS if pytestconfig.getoption("--full") else {random.choice(sorted(KINDS))}
    seed = next(
        seed
        for seed in itertools.count(random.randrange(2**16))
        if {fault.kind for fault in schedule(len(kinds), four_hosts.DEFAULT_KINDS, 2, seed)} == kinds
    )
    tool = [sys.executable, str(ROOT / "tools" / "four_hosts.py"), "train", "--hosts", "2"]
    tool += ["--faults", str(len(kinds))]
    done = subprocess.run(
        [*tool, "--seed", str(seed), "--timeout", "6", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "faults.json").read_text())
    assert values["same_end"]
    assert [fault["losses_equal"] for fault in values["faults"]] == [True] * len(kinds)
    for fault in values["faults"]:
        killed = {fault["fault"]["host"]} if fault["fault"]["kind"] == "kill" else set()
        assert {report["host"] for report in fault["reports"]} == set(range(2)) - killed
        assert all(report["said"] for report in fault["reports"])
        assert fault["silent"] == []
        assert fault["resumed_at"] % four_hosts.SAVE_EVERY == 0
    assert "losses equal" in done.stdout


# without hosts


def test_the_same_seed_gives_the_same_faults() -> None:
    seed = random.getrandbits(31)
    faults = schedule(40, four_hosts.DEFAULT_KINDS, 4, seed)
    assert faults == schedule(40, four_hosts.DEFAULT_KINDS, 4, seed)
    assert faults != schedule(40, four_hosts.DEFAULT_KINDS, 4, seed + 1)
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert {fault.host for fault in faults} == set(range(4))
    assert {fault.kind for fault in faults} == KINDS
    assert {fault.kind for fault in schedule(9, ("cut",), 4, seed)} == {"cut"}
    longer = schedule(41, four_hosts.DEFAULT_KINDS, 4, seed)
    assert longer[:40] == faults, "more faults only come after"


def test_a_seed_gives_the_same_faults_on_every_machine() -> None:
    assert schedule(3, four_hosts.DEFAULT_KINDS, 4, seed=0) == [
        Fault(26, 0.1516, "cut", 0),
        Fault(34, 0.1931, "cut", 3),
        Fault(44, 0.1936, "cut", 1),
    ]


def test_report_counts_faults_handled_wrongly(tmp_path: Path) -> None:
    good = Outcome(Fault(21, 0.05, "kill", 2), [Report(0, 0.1, "RuntimeError: a")], resumed_at=20, seconds=9.0)
    good.losses_equal = True
    assert good.ok
    assert "worker of host 2 killed; 1 reported within 0.10 s; on from step 20" in four_hosts.sentence(good)
    for wrong in ({"silent": [1]}, {"resumed_at": None}, {"losses_equal": False}):
        bad = Outcome(**{**vars(good), **wrong})
        assert not bad.ok
    said = [Report(0, 0.1, "closed by peer [10.77.0.2]:123"), Report(1, 0.1, "closed by peer [10.77.0.3]:45")]
    good.reports = said
    arguments = parse_arguments(["train", "--out", str(tmp_path)])
    four_hosts.write_report(arguments, [good, bad], False, 12.0)
    text = (tmp_path / "faults.md").read_text()
    assert "| 1 | 21 + 50 ms | kill | 2 | 0.10, 0.10 | 20 | 9.0 | equal |" in text
    assert "DIFFER" in text
    assert "kill, 2 times: closed by peer [address]" in text
    values = json.loads((tmp_path / "faults.json").read_text())
    assert [fault["ok"] for fault in values["faults"]] == [True, False]
    assert not values["same_end"]


def test_one_wrong_loss_is_noticed() -> None:
    expected = {step: (1.0 / step).hex() for step in range(1, 31)}
    losses = [(host, step, expected[step]) for step in range(1, 31) for host in range(2)]
    outcomes = [Outcome(Fault(n, 0.0, "cut", 0), first_loss=first) for n, first in enumerate((10, 30, 50))]
    four_hosts.compare(outcomes, losses, expected)
    assert [outcome.losses_equal for outcome in outcomes] == [True, True, True]
    for wrong, equal in ((10, [False, True, True]), (49, [True, False, True]), (59, [True, True, False])):
        host, step, loss = losses[wrong]
        other = math.nextafter(float.fromhex(loss), 9.0).hex()
        four_hosts.compare(outcomes, [*losses[:wrong], (host, step, other), *losses[wrong + 1 :]], expected)
        assert [outcome.losses_equal for outcome in outcomes] == equal
    four_hosts.compare(outcomes, losses[:50], expected)
    assert outcomes[-1].losses_equal is False, "nothing is no proof"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "--faults", "-1"], "--faults: expected at least 0, got -1"),
        (["train", "--hosts", "1"], "--hosts: expected 2 to 200, got 1"),
        (["train", "--timeout", "0.5"], "--timeout: expected at least 1 s, got 0.5"),
        (["train", "--cut-seconds", "10"], "--cut-seconds: expected more than --timeout, got 10"),
        (["train", "--kinds", "flood"], "invalid choice: 'flood'"),
        (["measure", "--bucket-cap-mb", "0"], "--bucket-cap-mb above 0"),
        (["measure", "--repeats", "2"], "--repeats of at least 3"),
        ([], "command"),
    ],
)
def test_wrong_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(options)
    assert message in capsys.readouterr().err


def test_machines_that_cannot_create_hosts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        patch.setattr(hosts_module.shutil, "which", lambda command: f"/bin/{command}")
        assert obstacle() == "only root may create network namespaces: run it with sudo"
        with pytest.raises(HostsError, match="cannot create hosts: only root may"):
            Hosts(2)
        assert four_hosts.main(["train"]) == 2
        assert capsys.readouterr().err == f"four_hosts: error: {obstacle()}\n"
    with monkeypatch.context() as patch:
        patch.setattr(hosts_module.shutil, "which", lambda command: None if command in ("ip", "tc") else command)
        assert obstacle() == "not installed: ip (of iproute2), tc (of iproute2)"
    monkeypatch.setattr(hosts_module.platform, "system", lambda: "Darwin")
    assert obstacle() == "hosts are made of Linux namespaces, and this is Darwin"


@pytest.mark.parametrize("count", [0, 201, -3])
def test_wrong_numbers_of_hosts(count: int) -> None:
    with pytest.raises(ValueError, match=f"expected a count of 1 to 200, got {count}"):
        Hosts(count)


def test_gradients_of_the_measured_model_arrive_over_time() -> None:
    local = host_network.Local()
    local.step()
    gaps = [later - earlier for earlier, later in zip([0.0, *local.arrivals[0]], local.arrivals[0])]
    assert len(gaps) == host_network.LAYERS
    assert min(gaps) >= host_network.LAYER_SECONDS


@pytest.mark.sampled
@needs_hosts
def test_the_network_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", "--hosts", "2", "--repeats", "3", "--bucket-cap-mb", "2", "--out", str(tmp_path)]
    assert four_hosts.main(arguments) == 0
    found = json.loads((tmp_path / "network.json").read_text())
    assert [point["bytes"] for point in found["sums"]] == list(host_network.SIZES)
    assert 0 < found["fit"]["bytes_per_second"] < 125e6  # 1 Gbit/s
    assert 0 < found["fit"]["hides"] <= 1 and found["pack_bytes_per_second"] > 1e8
    (step,) = found["steps"]
    assert step["predicted_exposed_seconds"] > 0
    assert found["alone"]["seconds"] >= host_network.LAYERS * host_network.LAYER_SECONDS
    assert "bucket_cap_mb=2: " in capfd.readouterr().out
