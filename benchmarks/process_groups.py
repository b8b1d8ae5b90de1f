"""Start and end process groups many times, half of them next to busy processes: none may hang or abort.

    python benchmarks/process_groups.py
    python benchmarks/process_groups.py --end destroy --trains 0     # the former way: some of them hang

A *life* is two processes that join a gloo group, train a small network wrapped in DDP, gather and broadcast, and exit.
They are forks of this process, which has imported everything, but they exit like any Python process. A *train* is the
command `logitclip train --devices 2`. A process that hangs prints its stack and is ended after a time limit. The
outcomes go to benchmarks/results/; the exit code is 1 if any process hung or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import faulthandler
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logitclip import launch

LIMIT = 60.0  # time limit of a life in seconds; a train may take five times as long


def work(fabric: Any, end: str) -> None:
    """Use a group as methods do, briefly. The wrapper is freed after the last statement."""
    wrapper = fabric.setup(nn.Linear(8, 8))
    for _ in range(3):
        wrapper(torch.ones(4, 8)).sum().backward()
        fabric.broadcast({"epoch": 1})
        torch.distributed.all_gather([torch.zeros(3), torch.zeros(3)], torch.ones(3))
    if end == "destroy":
        torch.distributed.destroy_process_group()


def life(end: str) -> str:
    """Start the two processes of a group; return how they ended."""
    reading, writing = os.pipe()
    keeper = os.fork()
    if not keeper:  # the store has threads, so it must not live in the process that forks
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    port = int(os.read(reading, 10))
    children = []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            launch._in_process(rank, port, 2, {"accelerator": "cpu"}, work, (end,))
            sys.exit()
        children.append(child)
    codes = [exit_code(child) for child in children]
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    os.close(reading)
    os.close(writing)
    return "ended" if codes == [0, 0] else f"exit codes {codes}"


def exit_code(child: int) -> int:
    """Wait for a process and return its exit code; kill it if it outlives its own time limit."""
    for _ in range(int(200 * LIMIT)):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def training(folder: Path) -> str:
    """Run `logitclip train --devices 2`; return how it ended."""
    options = "--devices 2 --accelerator cpu --limit 200 --epochs 3 --model mlp:width=16,depth=1,norm=batch"
    command = [sys.executable, "-m", "logitclip", "train", *options.split(), "--runs", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=5 * LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each process writes its stack
        print(process.communicate()[1].decode())
        return "hung"
    if process.returncode:
        print(errors.decode())
    return "ended" if not process.returncode else f"exit code {process.returncode}"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy loops, each in its own process."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(kind: str, beside: int, call: Callable[[Any], str], argument: Any) -> dict[str, Any]:
    start = time.monotonic()
    outcome = call(argument)
    seconds, load = round(time.monotonic() - start, 2), round(os.getloadavg()[0], 1)
    return {"kind": kind, "busy": beside, "outcome": outcome, "seconds": seconds, "load": load}


def summary(rows: list[dict[str, Any]]) -> None:
    """Print the outcomes of rows of one kind."""
    if rows:
        loads = [row["load"] for row in rows]
        print(
            f"{rows[0]['kind']}, {rows[0]['busy']} busy processes: {dict(Counter(row['outcome'] for row in rows))}, "
            f"longest {max(row['seconds'] for row in rows)} s, load average {min(loads):.1f} to {max(loads):.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=300)
    parser.add_argument("--trains", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="trains at the same time")
    parser.add_argument("--busy", type=int, default=4, help="busy processes during the second half")
    parser.add_argument(
        "--end",
        choices=["leave", "destroy"],
        default="leave",
        help="how a life ends: without destructors, or with destroy_process_group",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    launch.make_fabric(accelerator="cpu")  # imported once, before any fork
    if args.end == "destroy":
        launch.without_destructors = contextlib.nullcontext
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for beside in (0, args.busy):
            with busy(beside):
                lives = [measured("life", beside, life, args.end) for _ in range(args.lives // 2)]
                summary(lives)
                folders = [Path(folder) / f"{beside}-{i}" for i in range(args.trains // 2)]
                with ThreadPoolExecutor(args.jobs) as pool:  # its threads only wait for processes
                    trains = list(pool.map(partial(measured, "train", beside, training), folders))
                summary(trains)
                rows += lives + trains
    if args.end == "leave":
        name = f"process_groups-cpu-{platform.machine()}-torch{torch.__version__}.csv"
        with (args.out / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    sys.exit(any(row["outcome"] != "ended" for row in rows))


if __name__ == "__main__":
    main()
