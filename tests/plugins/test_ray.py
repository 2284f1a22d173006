"""Ray on a pool's nodes: programs of Ray run on machines that Skyward started.

They run in the environment of Ray's own, which has what Skyward needs and finds its sources.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.plugins.frameworks import ray_keeper

from ..conftest import Eventually, only_in_all
from ..providers.ray_cluster import PYTHON, skip_if_absent

SOURCE = str(Path(sky.__file__).parents[1])
_POOL = """
import json, os, sys
import skyward as sky

plugin = sky.plugins.ray(extras={extras!r}, num_cpus=2, object_store_memory=80_000_000)
{code}
with sky.Compute(nodes=2, plugins=[plugin], options=sky.Options(console=False)) as compute:
    found = program() >> compute
with open("found.json", "w") as file:
    json.dump(found, file)
"""
TASKS = """
@sky.function
def program():
    import ray

    @ray.remote(num_cpus=2)
    def where():
        import time
        time.sleep(1)
        return ray.get_runtime_context().get_node_id()

    nodes = ray.get([where.remote(), where.remote()])
    return {"nodes": len(set(nodes)), "alive": sum(each["Alive"] for each in ray.nodes()),
            "cpus": ray.cluster_resources()["CPU"]}
"""
TRAINING = """
@sky.function
def program():
    import os, ray
    from ray import train, tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    folder = os.getcwd()

    def loop():
        me = train.get_context()
        open(f"{folder}/rank-{me.get_world_rank()}-of-{me.get_world_size()}", "w").close()

    trainer = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder + "/train"),
    )
    trainer.fit()
    ranks = sorted(name for name in os.listdir(folder) if name.startswith("rank-"))
    tuned = tune.Tuner(
        lambda config: tune.report({"score": config["x"] ** 2}),
        param_space={"x": tune.grid_search([1, 2, 3])},
        run_config=tune.RunConfig(storage_path=folder + "/tune"),
    ).fit()
    return {"ranks": ranks, "best": tuned.get_best_result("score", "max").metrics["score"]}
"""


def run(code: str, folder: Path, extras: tuple[str, ...] = ("default",)) -> Any:
    """What a program of Ray returns on a pool of two nodes."""
    skip_if_absent()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [str(PYTHON), "-c", _POOL.format(code=code, extras=extras)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment | {"PYTHONPATH": SOURCE},
    )
    if "No module named 'msgspec'" in done.stderr:
        pytest.skip("Ray's environment lacks what Skyward needs; .ci/run makes one that has it")
    assert done.returncode == 0, done.stderr[-3000:]
    # Not from its output: Ray writes to that when it likes.
    return json.loads((folder / "found.json").read_text())


def left() -> list[str]:
    """Processes and folders of Ray on any pool's nodes."""
    found = [str(each) for each in Path("/tmp").glob("skyray-*-*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if ray_keeper.MARK in process.environ():
                found.append(f"{process.pid} {process.cmdline()}")
    return found


@only_in_all
def test_tasks_of_ray_run_on_all_nodes_and_nothing_is_left(tmp_path: Path) -> None:
    assert run(TASKS, tmp_path) == {"nodes": 2, "alive": 2, "cpus": 4}
    assert left() == []


@only_in_all
def test_ray_train_and_tune_run_on_the_pool(tmp_path: Path) -> None:
    skip_if_absent()
    has = subprocess.run([str(PYTHON), "-c", "import ray.train, ray.tune"], capture_output=True)
    if has.returncode != 0:
        pytest.skip("Ray's environment has no ray[train,tune]")
    found = run(TRAINING, tmp_path, ("train", "tune"))
    assert found == {"ranks": ["rank-0-of-2", "rank-1-of-2"], "best": 9}
    assert left() == []


def test_the_image_gets_ray() -> None:
    from skyward.plugins.plugin import Cluster, ClusterSpec

    plugin = sky.plugins.ray("2.49.1", extras=["train"])
    spec = ClusterSpec(sky.Nodes(1), None, sky.Worker(), sky.Options())
    assert plugin.transform is not None
    image = plugin.transform(sky.Image(), Cluster("c", spec))
    assert list(image.pip) == ["ray[train]==2.49.1"]


def test_the_token_is_not_shown() -> None:
    assert repr(sky.plugins.ray()) == "<sky plugin 'ray': transform, around_process>"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"extras": "train"}, "give a list, such as"),
        ({"num_cpus": "2"}, "give a number, such as 2"),
        ({"version": "new"}, "give 'latest', a version"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.plugins.ray(**given)


@pytest.mark.parametrize(
    ("said", "tries"),
    [
        ("The current node timed out during startup.", 2),
        ("no head at 10.0.0.1", 1),
        # It hangs, and the worker that wanted it ends.
        ("", 1),
    ],
)
def test_ray_is_started_again_if_it_did_not_wait_for_itself(
    tmp_path: Path, eventually: Eventually, said: str, tries: int
) -> None:
    """On a busy machine; what fails otherwise would fail again."""
    stand_in = tmp_path / "ray" / "scripts" / "scripts.py"
    stand_in.parent.mkdir(parents=True)
    # Without those, a Ray that is installed would be found before it.
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "scripts" / "__init__.py").touch()
    stand_in.write_text(
        "import os, sys, time\n"
        "def main():\n"
        "    tried = os.path.exists('tried')\n"
        "    open('tries', 'a').write('x')\n"
        "    open('tried', 'w').close()\n"
        f"    time.sleep(0 if {said!r} else 600)\n"
        f"    sys.exit(0 if tried else {said!r})\n"
    )
    keeper = subprocess.Popen(
        [sys.executable, "-m", ray_keeper.__name__, str(tmp_path / "node"), "--head"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{SOURCE}"},
    )
    with keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if not said:
            eventually((tmp_path / "tried").exists)
            keeper.stdin.close()
        started = keeper.stdout.readline()
        keeper.stdin.close()
        shown = keeper.stderr.read()
    assert keeper.returncode == 0, shown
    assert shown.strip() == said
    assert (tmp_path / "tries").read_text() == "x" * tries
    assert started == ("started\n" if tries > 1 else "")
    assert not (tmp_path / "node").exists()
