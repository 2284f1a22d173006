"""MPS and MIG on nodes whose NVIDIA programs are stand-ins that keep their state in a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.plugin import entered

QUIET = sky.Options(console=False)

MPS_CONTROL = """#!/bin/sh
# In the foreground: serve until told to quit. Otherwise: pass a command to the one that serves.
echo "$CUDA_MPS_PIPE_DIRECTORY $*" >> "$STATE/started"
if [ "$1" = -f ]; then
    [ -z "$BROKEN" ] || { echo "no device supports MPS" >&2; exit 3; }
    mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
    while :; do
        read command < "$CUDA_MPS_PIPE_DIRECTORY/control" || continue
        [ "$command" = quit ] && break
    done
    rm "$CUDA_MPS_PIPE_DIRECTORY/control"
    exit 0
fi
read command
[ -p "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
[ "$command" = quit ] && echo quit > "$CUDA_MPS_PIPE_DIRECTORY/control"
exit 0
"""

SMI = """#!/bin/sh
# One GPU with room for two slices; each slice is a file.
echo "$*" >> "$STATE/calls"
case "$*" in
-L)
    echo "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6)"
    for slice in "$STATE"/slice-*; do
        [ -e "$slice" ] || continue
        number=${slice##*-}
        echo "  MIG 3g.40gb     Device  $number: (UUID: MIG-0000-$number)"
    done ;;
*query-gpu*) [ -e "$STATE/on" ] && echo Enabled || echo Disabled ;;
*"-mig 1") : > "$STATE/on" ;;
*"-mig 0") rm "$STATE/on" ;;
*-cgi*)
    for number in 1 2; do
        [ -e "$STATE/slice-$number" ] && continue
        : > "$STATE/slice-$number"
        echo "Successfully created GPU instance ID  $number on GPU  0 using profile 3g.40gb"
        exit 0
    done
    echo "Failed to create GPU instances: Insufficient Resources" >&2
    exit 19 ;;
*-dgi*) for last in "$@"; do :; done; rm "$STATE/slice-$last" ;;
*-dci*) : ;;
*) exit 2 ;;
esac
"""

Standing = Callable[[str, str], Path]


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """Puts a stand-in on PATH; returns the folder of its state."""

    def put(name: str, script: str) -> Path:
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(script)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("STATE", str(state))
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "SKYWARD_MIG_DEVICES"):
            # The hooks set them for the processes to come; here, they end with the test.
            monkeypatch.setenv(name, "")
        return state

    return put


@sky.function
def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


class TestMps:
    def test_the_daemon_runs_while_the_pool_is_open(self, standing: Standing) -> None:
        standing("nvidia-cuda-mps-control", MPS_CONTROL)
        plugin = sky.plugins.mps(active_thread_percentage=50, pinned_memory_limit="2G")

        with sky.Compute(plugins=[plugin], options=QUIET) as compute:
            pipes, share, limit = (
                variables(
                    "CUDA_MPS_PIPE_DIRECTORY",
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                )
                >> compute
            )
            assert pipes is not None
            assert (Path(pipes) / "control").exists()

        assert (share, limit) == ("50", "0=2G")
        assert not Path(pipes).exists()

    def test_a_daemon_that_ends_at_once_says_why(
        self, standing: Standing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        standing("nvidia-cuda-mps-control", MPS_CONTROL)
        monkeypatch.setenv("BROKEN", "1")
        plugin = sky.plugins.mps()
        assert plugin.around_app is not None

        with (
            pytest.raises(RuntimeError, match=r"status 3: no device supports MPS; run it"),
            entered(plugin.around_app, InstanceInfo()),
        ):
            raise AssertionError("entered")

    def test_a_node_without_it_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        plugin = sky.plugins.mps()
        assert plugin.around_app is not None

        with (
            pytest.raises(FileNotFoundError, match="gpu1 has no nvidia-cuda-mps-control"),
            entered(plugin.around_app, InstanceInfo(hostname="gpu1")),
        ):
            raise AssertionError("entered")

    @pytest.mark.parametrize("share", [0, 101, True, "50"])
    def test_a_share_that_is_no_percentage_is_refused(self, share: object) -> None:
        with pytest.raises(ConfigurationError, match="from 1 to 100"):
            sky.plugins.mps(active_thread_percentage=share)  # type: ignore[arg-type]

    def test_a_limit_with_blanks_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="such as '0=4G,1=4G'"):
            sky.plugins.mps(pinned_memory_limit="4 G")


class TestMig:
    def test_each_worker_has_a_slice_and_the_gpu_is_left_as_it_was(
        self, standing: Standing
    ) -> None:
        state = standing("nvidia-smi", SMI)
        worker = sky.Worker(per_node=2)

        with sky.Compute(
            worker=worker, plugins=[sky.plugins.mig("3g.40gb")], options=QUIET
        ) as compute:
            seen = variables("CUDA_VISIBLE_DEVICES") @ compute

        assert seen == [["MIG-0000-1"], ["MIG-0000-2"]]
        assert not list(state.glob("slice-*"))
        assert not (state / "on").exists()

    def test_slices_that_are_there_are_used_and_stay(self, standing: Standing) -> None:
        state = standing("nvidia-smi", SMI)
        for name in ("on", "slice-1"):
            (state / name).touch()
        plugin = sky.plugins.mig("3g.40gb")
        assert plugin.around_app is not None

        with entered(plugin.around_app, InstanceInfo(workers_per_node=1)):
            assert os.environ["SKYWARD_MIG_DEVICES"] == "MIG-0000-1"

        assert (state / "slice-1").exists()
        assert "-cgi" not in (state / "calls").read_text()

    def test_too_many_workers_are_refused_and_nothing_is_left(self, standing: Standing) -> None:
        state = standing("nvidia-smi", SMI)
        plugin = sky.plugins.mig("3g.40gb")
        assert plugin.around_app is not None

        with (
            pytest.raises(
                RuntimeError, match=r"2 of 3 slices 3g\.40gb.*Insufficient Resources; use a smaller"
            ),
            entered(plugin.around_app, InstanceInfo(workers_per_node=3)),
        ):
            raise AssertionError("entered")

        assert not list(state.glob("slice-*"))
        assert not (state / "on").exists()

    def test_processes_that_share_a_worker_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"write Worker\(per_node=2\)"):
            sky.Compute(worker=sky.Worker(concurrency=2), plugins=[sky.plugins.mig("1g.10gb")])

    @pytest.mark.parametrize("profile", ["", "half", "3g", 3])
    def test_a_profile_that_is_none_is_refused(self, profile: object) -> None:
        with pytest.raises(ConfigurationError, match=r"such as '3g\.40gb'"):
            sky.plugins.mig(profile)  # type: ignore[arg-type]
