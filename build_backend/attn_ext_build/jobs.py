"""How many compilers may run at once."""

import os
from pathlib import Path

GIB = 1 << 30
# The hungriest file (the AVX-512 kernels) takes 350 MiB in g++ 12; the rest is room for other compilers.
MEMORY_PER_JOB = GIB


def available_memory() -> int:
    """Bytes that may be used: the machine's available memory or the control group's limit, the lesser."""
    limits = [1 << 62]
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    group_limit = _text("/sys/fs/cgroup/memory.max").strip()  # "max" where there is none
    if group_limit.isdigit():
        limits.append(int(group_limit))
    return min(limits)


def default_jobs() -> int:
    """As many jobs as there are cores for this process, and no more than memory allows."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, available_memory() // MEMORY_PER_JOB))


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
