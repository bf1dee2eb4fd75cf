"""Run a script at full speed for some minutes and see whether memory, files, processes and speed stay as they are.

    python benchmarks/soak.py dqn_snake.py 20
    python benchmarks/soak.py ppo_metta.py 20 --rnn none
    python benchmarks/soak.py dqn_snake_sb3_compat.py 20 --buffer-size 100000  # a replay that still fills grows
    taskset -c 0 python benchmarks/soak.py ppo_snake.py 20 --threads 1  # while another run uses another core

Exit code 1 if memory grew by more than 2 % after the first two minutes, if there are more files or processes at the end
than then, or if the last minute was slower than 95 % of the third. Machines become slower too: what counts is the speed
next to that of matrix products in this process, per second of its own time on a core.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SETTLED = 120  # seconds after which nothing may grow


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += processes_of(int(child))
    return found


def reading(pid: int) -> tuple[float, int, int]:
    """MiB of memory (what is shared is counted once), open files and processes."""
    kib = 0
    files = 0
    processes = processes_of(pid)
    for process in processes:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        kib += int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])
        files += len(list(Path(f"/proc/{process}/fd").iterdir()))
    return kib / 1024, files, len(processes)


def matmuls_per_second() -> float:
    """On one thread, per second that it had a core."""
    x = torch.ones(256, 256)
    start = time.process_time()
    for _ in range(100):
        torch.relu_(x @ x)
    return 100 / (time.process_time() - start)


def speeds(folder: Path) -> list[tuple[float, float]]:
    """Seconds since the first log, and steps per second, of every log."""
    from benchmarks.harness import read_scalars

    points = read_scalars(folder)["charts/SPS"]
    return [(point.wall_time - points[0].wall_time, point.value) for point in points]


def main(script: str, minutes: float, *flags: str) -> int:
    seconds = 60 * minutes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--max-seconds", str(seconds), "--run-dir", folder, "--run-name", "soak"]
        command += ["--eval-episodes", "10", "--no-video", *flags]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        readings = []
        start = time.monotonic()
        while run.poll() is None and time.monotonic() < start + seconds - 5:
            time.sleep(5)
            try:
                readings.append((time.monotonic() - start, *reading(run.pid), matmuls_per_second()))
            except OSError:  # a process that has just ended
                continue
        if run.wait() != 0:
            print(f"{script}: exit code {run.returncode}")
            return 1
        by_time = speeds(Path(folder) / "soak")
    settled = [each for each in readings if SETTLED <= each[0] < SETTLED + 60]
    last = [each for each in readings if each[0] >= readings[-1][0] - 60]
    before, after = ([statistics.median(column) for column in zip(*part)] for part in (settled, last))
    end = by_time[-1][0]
    third = statistics.median(sps for at, sps in by_time if 120 <= at < 180)
    final = statistics.median(sps for at, sps in by_time if at >= end - 60)
    print(f"{script} {' '.join(flags)}, {minutes:g} minutes")
    print(f"memory {before[1]:,.0f} -> {after[1]:,.0f} MiB ({after[1] / before[1] - 1:+.1%})")
    print(f"files {before[2]:g} -> {after[2]:g}, processes {before[3]:g} -> {after[3]:g}")
    machine = after[4] / before[4]
    print(f"steps/s in the third minute {third:,.0f}, in the last {final:,.0f} ({final / third:.0%})")
    print(f"matrix products per second {before[4]:,.0f} -> {after[4]:,.0f} ({machine:.0%})")
    same_memory = after[1] <= 1.02 * before[1]
    same_numbers = after[2] <= before[2] and after[3] <= before[3]
    same_speed = final >= 0.95 * machine * third
    holds = same_memory and same_numbers and same_speed
    print("holds" if holds else "does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:]))
