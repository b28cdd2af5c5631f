"""The memory of this process, and the memory nodes of its processors and of the machine's GPUs."""

from __future__ import annotations

import os
from pathlib import Path


def find_host_bytes() -> int | None:
    """The smaller of the machine's memory and the limit of the container around this process."""
    sizes = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes, default=None)


def find_gpu_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """The memory node (NUMA) of each NVIDIA GPU of the machine; none where the system does not say all.

    Args:
      root: the folder with `proc` and `sys`.
    """
    gpus = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    files = [root / "sys/bus/pci/devices" / gpu.lower() / "numa_node" for gpu in gpus]
    nodes = [int(file.read_text()) for file in files if file.is_file()]
    known = len(nodes) == len(gpus) and all(node >= 0 for node in nodes)  # -1 in most virtual machines
    return tuple(nodes) if known else ()


def find_processor_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """The memory nodes of the processors that this process may run on, in order.

    Args:
      root: the folder with `sys`.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    mine = os.sched_getaffinity(0)
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = (int(node.name.removeprefix("node")) for node in nodes if mine & _read_list(node / "cpulist"))
    return tuple(sorted(found))


def _read_list(file: Path) -> set[int]:
    """The numbers of a list of ranges, such as "0-3,8"."""
    ends = [part.split("-") for part in file.read_text().strip().split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}
