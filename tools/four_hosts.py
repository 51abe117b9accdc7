"""Trains on hosts simulated with network namespaces, with faults at random moments, and measures their network.

    sudo python tools/four_hosts.py train                  # without faults, for the expected losses
    sudo python tools/four_hosts.py train --faults 50      # the same losses despite 50 faults
    sudo python tools/four_hosts.py measure                # all-reduce and exposed communication, for the simulator

It needs Linux, root, iproute2 and util-linux, and leaves nothing behind (see `hosts.py`). docs/faults.md explains it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from hosts import CARD, Hosts, HostsError, obstacle  # noqa: E402

PORT = 29400
KINDS = {  # descriptions of faults
    "kill": "worker of host {} killed",
    "cut": "link of host {} cut",
    "hang": "worker of host {} stopped",
}
DEFAULT_KINDS = ("kill", "cut")
SMALL_MODEL = ("--layers", "2", "--features", "32", "--hidden-features", "48", "--context", "32", "--lr", "1e-2")
STEPS_AROUND = 20  # before the first fault and after the last one
STEPS_PER_FAULT = 10
SAVE_EVERY = 5
CUT_BEYOND = 2.0  # default of --cut-seconds minus --timeout: shorter cuts need not be noticed
SLACK = 2.0  # seconds for the step that ran during the fault, and for CPUs shared by eight processes
RESTART_LIMIT = 300.0  # seconds without a step after which a job has failed


@dataclass(frozen=True)
class Fault:
    """A fault of a host, ``delay`` seconds after step ``step``."""

    step: int
    delay: float
    kind: str
    host: int


def schedule(count: int, kinds: Sequence[str], hosts: int, seed: int) -> list[Fault]:
    """Faults at random moments, on random hosts; reproducible on every machine."""
    draw = random.Random(seed)
    faults = []
    for number in range(count):
        step = STEPS_AROUND + number * STEPS_PER_FAULT + draw.randrange(STEPS_PER_FAULT)
        faults.append(Fault(step, round(draw.uniform(0.0, 0.2), 4), draw.choice(kinds), draw.randrange(hosts)))
    return faults


@dataclass
class Report:
    """How a worker that survived a fault noticed it."""

    host: int
    seconds: float  # since the fault
    said: str


@dataclass
class Outcome:
    fault: Fault
    reports: list[Report] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  # hosts that did not report in time
    resumed_at: int | None = None  # the step of the checkpoint, if the job continued
    seconds: float | None = None  # from the fault to the next step
    starts: int = 0  # of workers; the number of hosts, unless a restart had to be repeated
    agents_restarted: int = 0
    first_loss: int = 0  # index in `Job.losses` of the first loss after the restart
    losses_equal: bool | None = None

    @property
    def ok(self) -> bool:
        return not self.silent and self.resumed_at is not None and self.losses_equal is True


@dataclass
class Worker:
    """A training process; ``handle`` becomes readable when it ends."""

    pid: int
    handle: int
    ready: bool = False
    error: tuple[float, str] | None = None  # time and text of the exception it raised

    def ended(self) -> bool:
        return self.handle < 0 or bool(select.select([self.handle], [], [], 0)[0])

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class JobError(RuntimeError):
    """The job does not behave as expected; the message says how, and where its log is."""


class Job:
    """A training run with one torchrun agent per host, and its state according to the events that workers log."""

    def __init__(self, hosts: Hosts, out: Path, steps: int, timeout: float, cut_seconds: float) -> None:
        self.hosts, self.out, self.steps, self.timeout, self.cut_seconds = hosts, out, steps, timeout, cut_seconds
        self.workers: dict[int, Worker] = {}  # the newest worker of each host
        self.losses: list[tuple[int, int, str]] = []  # host, step, loss in hexadecimal, in order of arrival
        self.digests: dict[int, str] = {}
        self.resumed: dict[int, int] = {}  # first step of the newest worker of each host
        self.done_steps = 0  # by the newest worker of host 0
        self.starts = self.agents_restarted = 0
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self._events = out / "events.jsonl"
        self._events.touch()
        self._read = 0  # bytes of it
        self._agents = [self._start_agent(host) for host in range(len(hosts.addresses))]

    def _start_agent(self, host: int) -> subprocess.Popen[Any]:
        rendezvous = f"is_host={int(host == 0)},join_timeout=300,read_timeout=60"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.hosts.addresses))]
        command += ["--nproc-per-node", "1", "--max-restarts", "1000", "--monitor-interval", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host0:{PORT}", "--rdzv-id", "four-hosts"]
        command += ["--rdzv-conf", rendezvous, "--local-addr", self.hosts.addresses[host]]
        command += [str(ROOT / "tools" / "host_worker.py"), "--device", "cpu", *SMALL_MODEL, "--sample-bytes", "1"]
        command += ["--batch", str(len(self.hosts.addresses)), "--steps", str(self.steps)]
        command += ["--save-every", str(SAVE_EVERY), "--eval-every", str(self.steps)]
        command += ["--out", str(self.out), "--auto-resume", "--timeout", str(self.timeout)]
        noted = {"HOST_NUMBER": str(host), "HOST_EVENTS": str(self._events)}
        # A new store for each start: the store of the agents would contain addresses of dead workers.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.log(host), "a") as log:
            environment = {**environment_of_host(), **own_store, **noted}
            return self.hosts.run(host, command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def log(self, host: int) -> Path:
        return self.out / f"host{host}.log"

    @property
    def finished(self) -> bool:
        return all(agent.poll() == 0 for agent in self._agents)

    def poll(self) -> None:
        """Reads new events, and restarts agents that have failed, as a service manager would."""
        with open(self._events, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete
                    break
                self._read += len(line)
                self._take(json.loads(line))
        for host, agent in enumerate(self._agents):
            if agent.poll():
                self.agents_restarted += 1
                self._agents[host] = self._start_agent(host)

    def _take(self, event: dict[str, Any]) -> None:
        host, kind = event["host"], event["event"]
        if kind == "start":
            self.starts += 1
            if host in self.workers:
                self.workers.pop(host).close()
            handle = self.hosts.handle(host, event["pid"])
            self.workers[host] = Worker(event["pid"], -1 if handle is None else handle)
            return
        worker = self.workers.get(host)
        if worker is None or worker.pid != event["pid"]:
            return
        if kind == "ready":
            worker.ready, self.resumed[host] = True, event["step"]
        elif kind == "step":
            self.losses.append((host, event["step"], event["loss"]))
            if host == 0:
                self.done_steps = event["step"]
        elif kind == "trained":
            self.digests[host] = event["digest"]
        elif kind == "error" and worker.error is None:
            worker.error = (event["time"], event["text"])

    def wait(self, what: str, condition: Callable[[], bool], limit: float) -> None:
        """Waits until ``condition`` holds; raises JobError after ``limit`` seconds."""
        if not self.holds(condition, limit):
            raise JobError(f"expected {what} within {limit:.0f} s; see {self.log(0)} and the other logs there")

    def holds(self, condition: Callable[[], bool], limit: float) -> bool:
        """Whether ``condition`` holds within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while True:
            self.poll()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)

    def all_ready(self) -> bool:
        healthy = [worker for worker in self.workers.values() if worker.ready and worker.error is None]
        return len(healthy) == len(self.hosts.addresses)

    def strike(self, fault: Fault) -> Outcome:
        """Causes a fault, and follows the job until it continues."""
        self.wait(f"step {fault.step}", lambda: self.all_ready() and self.done_steps >= fault.step, RESTART_LIMIT)
        time.sleep(fault.delay)
        self.poll()
        outcome = Outcome(fault)
        before, starts, agents = dict(self.workers), self.starts, self.agents_restarted
        survivors = {host: worker for host, worker in before.items() if fault.kind == "cut" or host != fault.host}
        struck = time.time()
        if fault.kind == "cut":
            self.hosts.cut(fault.host)
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            self.hosts.kill(fault.host, before[fault.host].pid, number)
        reported: dict[int, Report] = {}

        def all_reported() -> bool:
            for host, worker in survivors.items():
                if host in reported:
                    continue
                if worker.error is not None:
                    when, text = worker.error
                    reported[host] = Report(host, when - struck, text)
                elif worker.ended():
                    reported[host] = Report(host, time.time() - struck, "ended by its agent")
            return len(reported) == len(survivors)

        in_time = self.timeout + SLACK
        if fault.kind == "cut":
            self.holds(all_reported, self.cut_seconds)
            self.holds(lambda: False, max(struck + self.cut_seconds - time.time(), 0.0))
            self.hosts.mend(fault.host)
        self.holds(all_reported, in_time)
        outcome.reports = [reported[host] for host in sorted(reported)]
        outcome.silent = [host for host in survivors if host not in reported or reported[host].seconds > in_time]

        def goes_on() -> bool:
            renewed = all(self.workers.get(host) is not worker for host, worker in before.items())
            return renewed and self.all_ready() and self.done_steps > self.resumed[0]

        self.done_steps, outcome.first_loss = 0, len(self.losses)
        self.wait(f"a restart after {fault}", goes_on, RESTART_LIMIT)
        outcome.seconds, outcome.resumed_at = time.time() - struck, self.resumed[0]
        outcome.starts, outcome.agents_restarted = self.starts - starts, self.agents_restarted - agents
        return outcome


def environment_of_host() -> dict[str, str]:
    """Variables for processes that use the network card of their host and share two CPUs with all others."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": CARD,
        "TP_SOCKET_IFNAME": CARD,
    }


def say(text: str) -> None:
    print(text, flush=True)


def run_to_the_end(job: Job) -> None:
    shown = time.monotonic()
    done = -1
    while not job.holds(lambda: job.finished, 10.0):
        if job.done_steps == done and time.monotonic() - shown > RESTART_LIMIT:
            raise JobError(f"no step since {RESTART_LIMIT:.0f} s; see {job.log(0)} and the other logs there")
        if job.done_steps != done:
            done, shown = job.done_steps, time.monotonic()
            say(f"  step {done} of {job.steps}")


def train(arguments: argparse.Namespace, hosts: Hosts) -> int:
    faults = schedule(arguments.faults, arguments.kinds, arguments.hosts, arguments.seed)
    steps = 2 * STEPS_AROUND + STEPS_PER_FAULT * arguments.faults
    start = time.monotonic()
    say(f"{arguments.hosts} hosts, {arguments.rate} per link; {steps} steps without faults")
    calm = Job(hosts, arguments.out / "calm", steps, arguments.timeout, arguments.cut_seconds)
    run_to_the_end(calm)
    expected = {step: loss for host, step, loss in calm.losses if host == 0}
    if len(expected) != steps or len(set(calm.digests.values())) != 1:
        raise JobError(f"expected {steps} losses and the same parameters on all hosts; see {calm.log(0)}")
    say(f"  done in {time.monotonic() - start:.0f} s, last loss {float.fromhex(expected[steps]):.6f}")
    if not faults:
        return 0

    say(f"{len(faults)} faults in {steps} steps (seed {arguments.seed}), timeout {arguments.timeout:g} s")
    job = Job(hosts, arguments.out / "faults", steps, arguments.timeout, arguments.cut_seconds)
    outcomes: list[Outcome] = []

    for fault in faults:
        outcomes.append(job.strike(fault))
        compare(outcomes, job.losses, expected)
        say(f"{len(outcomes):3}/{len(faults)} {sentence(outcomes[-1])} ({time.monotonic() - start:.0f} s)")
    run_to_the_end(job)
    compare(outcomes, job.losses, expected)
    same_end = job.digests == calm.digests
    ok = same_end and all(outcome.ok for outcome in outcomes)
    seconds = time.monotonic() - start
    write_report(arguments, outcomes, same_end, seconds)
    say(
        f"{sum(outcome.ok for outcome in outcomes)} of {len(outcomes)} faults handled as expected; parameters and "
        f"optimiser state at the end {'equal, bit for bit' if same_end else 'DIFFER'}; {seconds:.0f} s; "
        f"see {arguments.out / 'faults.md'}"
    )
    return 0 if ok else 1


def compare(outcomes: Sequence[Outcome], losses: Sequence[tuple[int, int, str]], expected: dict[int, str]) -> None:
    """Marks restarts that changed a loss; state lost in a restart may show in any loss until the next restart."""
    ends = [*(outcome.first_loss for outcome in outcomes[1:]), len(losses)]
    for outcome, end in zip(outcomes, ends, strict=True):
        since = losses[outcome.first_loss : end]
        outcome.losses_equal = bool(since) and all(loss == expected[step] for _, step, loss in since)


def sentence(outcome: Outcome) -> str:
    fault = outcome.fault
    what = KINDS[fault.kind].format(fault.host)
    slowest = max((report.seconds for report in outcome.reports), default=0.0)
    heard = f"{len(outcome.reports)} reported within {slowest:.2f} s"
    if outcome.agents_restarted:
        heard += f"; torchrun restarted {outcome.agents_restarted} times"
    if outcome.silent:
        heard += f", NOT IN TIME: hosts {outcome.silent}"
    return (
        f"after step {fault.step}: {what}; {heard}; on from step {outcome.resumed_at} after {outcome.seconds:.1f} s; "
        f"losses {'equal' if outcome.losses_equal else 'DIFFER'}"
    )


def write_report(arguments: argparse.Namespace, outcomes: Sequence[Outcome], same_end: bool, seconds: float) -> None:
    """Writes faults.json, with everything, and faults.md, with a row per fault."""
    settings = {name: getattr(arguments, name) for name in ("hosts", "rate", "timeout", "cut_seconds", "seed")}
    values = {
        **settings,
        "seconds": seconds,
        "same_end": same_end,
        "faults": [asdict(o) | {"ok": o.ok} for o in outcomes],
    }
    (arguments.out / "faults.json").write_text(json.dumps(values, indent=1) + "\n")
    lines = ["| | after step | what | host | survivors reported after, s | on from step | after, s | losses |"]
    lines.append("|" + "---|" * 8)
    for number, outcome in enumerate(outcomes, start=1):
        fault = outcome.fault
        reported = ", ".join(f"{report.seconds:.2f}" for report in outcome.reports)
        when = f"{fault.step} + {fault.delay * 1e3:.0f} ms"
        row: tuple[object, ...] = (number, when, fault.kind, fault.host, reported)
        row += (outcome.resumed_at, f"{outcome.seconds:.1f}", "equal" if outcome.losses_equal else "DIFFER")
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "What they said:", ""]
    said = Counter(
        (outcome.fault.kind, re.sub(r"\[[\d.]+\]:\d+", "[address]", report.said))
        for outcome in outcomes
        for report in outcome.reports
    )
    lines += [f"- {kind}, {times} times: {text}" for (kind, text), times in said.most_common()]
    (arguments.out / "faults.md").write_text("\n".join(lines) + "\n")


def measure(arguments: argparse.Namespace, hosts: Hosts) -> int:
    out = arguments.out / "network.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    ranks = len(hosts.addresses)
    processes = []
    for host in range(ranks):
        place = {"RANK": str(host), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "host0", "MASTER_PORT": str(PORT)}
        command = [sys.executable, str(ROOT / "tools" / "host_network.py"), "--repeats", str(arguments.repeats)]
        command += ["--bucket-cap-mb", *map(str, arguments.bucket_cap_mb), "--rate", arguments.rate, "--out", str(out)]
        command += ["--algorithm", arguments.algorithm]
        processes.append(hosts.run(host, command, env={**environment_of_host(), **place}))
    codes = [process.wait() for process in processes]
    return max(abs(code) for code in codes)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.add_argument("--hosts", type=int, default=4, metavar="N", help="how many (default: 4)")
        added.add_argument("--rate", default="1gbit", help="rate of each link in each direction (default: 1gbit)")
        added.add_argument(
            "--delay", metavar="TIME", help="delay of each link, such as 100us, if the kernel has netem (default: none)"
        )
        added.add_argument(
            "--out",
            type=Path,
            default=ROOT / "runs" / "hosts",
            metavar="DIR",
            help="folder for results and logs (%(default)s)",
        )
        return added

    training = command("train", "Trains the demo's model with torchrun, one worker per host, and causes faults.")
    training.add_argument("--faults", type=int, default=0, metavar="N", help="number of random faults (default: 0)")
    training.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=DEFAULT_KINDS,
        help="kill a worker, cut a link, let a worker hang (default: kill cut)",
    )
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of moments, kinds and hosts (default: 0)")
    training.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="timeout of collectives, in seconds (default: 10)"
    )
    training.add_argument(
        "--cut-seconds",
        type=float,
        metavar="S",
        help="duration of a cut; above 60, torchrun's own timeout expires too (default: --timeout plus 2)",
    )

    measuring = command("measure", "Measures all-reduce, and how much of it does not overlap with backward, as JSON.")
    measuring.add_argument(
        "--algorithm", choices=("auto", "all_reduce", "float32"), default="auto", help="the wrapper's (default: auto)"
    )
    measuring.add_argument("--repeats", type=int, default=30, metavar="N", help="repetitions (default: 30)")
    measuring.add_argument(
        "--bucket-cap-mb", type=float, nargs="+", default=[1.0, 4.0, 16.0], metavar="MB", help="(default: 1 4 16)"
    )

    arguments = parser.parse_args(argv)
    if not 2 <= arguments.hosts <= 200:
        parser.error(f"--hosts: expected 2 to 200, got {arguments.hosts}")
    if arguments.command == "train":
        if arguments.faults < 0:
            parser.error(f"--faults: expected at least 0, got {arguments.faults}")
        if not arguments.timeout >= 1:
            parser.error(f"--timeout: expected at least 1 s, got {arguments.timeout:g}")
        if arguments.cut_seconds is None:
            arguments.cut_seconds = arguments.timeout + CUT_BEYOND
        if not arguments.cut_seconds > arguments.timeout:
            parser.error(f"--cut-seconds: expected more than --timeout, got {arguments.cut_seconds:g}")
    elif arguments.repeats < 3 or not min(arguments.bucket_cap_mb) > 0:
        parser.error("expected --repeats of at least 3 and --bucket-cap-mb above 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.out = arguments.out.resolve()
    if (reason := obstacle()) is not None:
        print(f"four_hosts: error: {reason}", file=sys.stderr)
        return 2
    try:
        with Hosts(arguments.hosts, rate=arguments.rate, delay=arguments.delay) as hosts:
            if arguments.delay is not None and not hosts.has_delay:
                say("this kernel has no netem: links have no additional delay")
            return {"train": train, "measure": measure}[arguments.command](arguments, hosts)
    except (HostsError, JobError) as error:
        print(f"four_hosts: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("four_hosts: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
