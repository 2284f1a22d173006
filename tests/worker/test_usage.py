"""How busy a node is: a container's share where there is a container, else the machine's."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward import kernel
from skyward.worker.usage import Gauge

NVML = """
#include <string.h>
extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(long)(index + 1);
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *load) {
    if ((long)handle == 2) return 3;  /* not supported, as for a part of a GPU */
    load[0] = 73;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = 80ull << 30, memory[1] = 60ull << 30, memory[2] = 20ull << 30;
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    strncpy(name, "NVIDIA H100", length);
    return 0;
}
}
"""


def make(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def version_2(folder: Path) -> Path:
    return make(
        folder,
        cpu_dot_stat="usage_usec 1000000\nuser_usec 1\n",
        cpu_dot_max="50000 100000\n",
        memory_dot_current="3000\n",
        memory_dot_max="8000\n",
        memory_dot_stat="anon 1\ninactive_file 1000\n",
    )


def version_1(folder: Path) -> Path:
    return make(
        folder,
        cpuacct__cpuacct_dot_usage="1000000000\n",
        cpu__cpu_dot_cfs_quota_us="50000\n",
        cpu__cpu_dot_cfs_period_us="100000\n",
        memory__memory_dot_usage_in_bytes="3000\n",
        memory__memory_dot_limit_in_bytes="8000\n",
        memory__memory_dot_stat="cache 1\ntotal_inactive_file 1000\n",
    )


@pytest.mark.parametrize("layout", [version_1, version_2])
def test_a_container_has_no_more_processors_than_its_share(
    layout: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "CGROUPS", str(layout(tmp_path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert kernel.processors() == 1, "half of one"

    make(tmp_path, cpu_dot_max="350000 100000", cpu__cpu_dot_cfs_quota_us="350000")
    assert kernel.processors() == 3

    make(tmp_path, cpu_dot_max="max 100000", cpu__cpu_dot_cfs_quota_us="-1")
    assert kernel.processors() == 64


@pytest.mark.parametrize("layout", [version_1, version_2])
def test_a_containers_share_is_read_from_its_cgroup(
    layout: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gauge = Gauge(layout(tmp_path))
    # In ten seconds, 2 of the 5 that half a processor has.
    now = 110.0
    make(tmp_path, cpu_dot_stat="usage_usec 3000000\n", cpuacct__cpuacct_dot_usage="3000000000\n")

    usage = gauge.read(7)

    assert (usage.number, usage.cpu_percent) == (7, 40.0)
    assert (usage.memory_used, usage.memory_total) == (2000, 8000)


def test_without_a_limit_the_machines_memory_is_the_containers(tmp_path: Path) -> None:
    make(version_2(tmp_path), memory_dot_max="max\n", cpu_dot_max="max 100000\n")

    usage = Gauge(tmp_path).read(1)

    assert (usage.memory_used, usage.memory_total) == (2000, psutil.virtual_memory().total)


def test_outside_a_container_the_machine_is_measured(tmp_path: Path) -> None:
    whole = make(version_1(tmp_path), memory__release_agent="")

    usage = Gauge(whole).read(1)

    assert usage.memory_total == psutil.virtual_memory().total
    assert Gauge(tmp_path / "none").read(1).memory_total == psutil.virtual_memory().total


def test_gpus_are_asked_of_the_drivers_library(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    library, source = tmp_path / "libnvml.so", tmp_path / "nvml.cpp"
    source.write_text(NVML)
    try:
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    except FileNotFoundError:
        pytest.skip("no compiler here")

    usage = Gauge(tmp_path, str(library)).read(1)

    assert usage.gpus == [
        ("NVIDIA H100", 73.0, 20 << 30, 80 << 30),
        ("NVIDIA H100", None, 20 << 30, 80 << 30),
    ]
    assert Gauge(tmp_path, "no-such-library.so").read(1).gpus == []


def test_a_pool_tells_how_busy_a_node_is_while_a_function_runs(nothing_left: None) -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        running = sky.Function(time.sleep)(30) > compute
        first, second = compute.usage(), compute.usage()
        running.cancel()
        assert compute.usage(node=5) is None

    for usage in (first, second):
        assert usage is not None
        assert 0.0 <= usage.cpu_percent <= 100.0
        assert 0 < usage.memory_used < usage.memory_total
