"""Records the pictures of the page: a real pool, looked at with Chromium.

Needs Chromium. Run it after changing the page: `.venv/bin/python docs/images/record_page.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import skyward as sky
from skyward.page.hub import Hub
from skyward.page.server import PageServer

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))
from tests.page.chromium import Chromium  # noqa: E402

SECONDS = 42.0
SIZE = 1280, 1480


@sky.function
def fit(first: int, count: int) -> None:
    """Some steps of something like a training run."""
    node = sky.instance_info().node
    for step in range(first, first + count):
        noise = random.gauss(0, 0.03)
        loss = 2.3 * math.exp(-step / 70) + 0.25 + 0.12 * node + noise
        sky.log(loss=loss, accuracy=1 - 0.9 * math.exp(-step / 80) - abs(noise) / 2, step=step)
        if step % 40 == 0:
            print(f"step {step}  loss {loss:.4f}")
        time.sleep(0.1)


@sky.function
def evaluate(number: int) -> float:
    """A short call; one of them fails."""
    time.sleep(random.uniform(0.3, 1.5))
    if number == 12:
        raise ValueError("the validation set is empty")
    return number / 10


def train_here(compute: sky.Compute, ended: threading.Event) -> None:
    """A plain PyTorch loop on the device of a node."""
    device = compute.device("cpu")
    model = torch.nn.Linear(64, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(256, 64).to(device), torch.randn(256, 10).to(device)
    step = 0
    while not ended.wait(0.05):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            sky.log({"device/loss": loss}, step=step)
        step += 1


def use(compute: sky.Compute, node: int, ended: threading.Event) -> None:
    """The calls of one node."""
    step = number = 0
    while not ended.is_set():
        count = random.randrange(10, 35)
        compute.run(fit(step, count), on=node)
        step, number = step + count, number + 1
        with contextlib.suppress(ValueError):
            compute.run(evaluate(3 * node + number), on=node)


def record() -> None:
    ended = threading.Event()
    with sky.Compute(nodes=4, name="train", options=sky.Options(console=False)) as compute:
        threads = [threading.Thread(target=train_here, args=(compute, ended))]
        threads += [threading.Thread(target=use, args=(compute, n, ended)) for n in range(4)]
        with Chromium() as browser:
            browser.show(*SIZE)
            browser.open(compute.ui())
            browser.value("document.querySelector('[data-span=\"30\"]').click()")
            for thread in threads:
                thread.start()
            time.sleep(SECONDS)
            for name, dark in (("page-light.png", False), ("page-dark.png", True)):
                browser.show(*SIZE, dark=dark)
                time.sleep(1.5)
                browser.picture(FOLDER / name)
            assert not browser.problems, browser.problems
        ended.set()
        for thread in threads:
            thread.join()


EMBED = """
import random, time
import skyward as sky

@sky.function
def embed(number):
    time.sleep(random.uniform(0.2, 1.2))
    if number == 40:
        raise ValueError("text 7 is no UTF-8")
    print(f"{random.randrange(3, 60)} texts")

with sky.attach("train") as compute:
    for number in range(1000):
        try:
            embed(number) @ compute
        except sky.BroadcastError:
            pass
"""
SWEEP = """
import time
for trial in range(1000):
    print("trial", trial, flush=True)
    time.sleep(1)
"""


def record_kept() -> None:
    """A kept pool, with two clients, a script and a call by name."""
    folder = Path(tempfile.mkdtemp(prefix="page-"))
    os.environ["SKYWARD_STATE"] = str(folder / "state")
    for name, text in (("embed_run", EMBED), ("tokenize_run", EMBED), ("sweep", SWEEP)):
        (folder / f"{name}.py").write_text(text.replace("embed", name.partition("_")[0]))
    with sky.Compute(nodes=2, name="train", keep=True, options=sky.Options(console=False)) as pool:
        pool.submit(fit(0, 10_000), name="run-7")

    def start(user: str, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=os.environ | {"LOGNAME": user},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    start("ann", "-m", "skyward", "run", "--on", "train", "--detach", "sweep.py").wait()
    clients = [start("ann", "embed_run.py"), start("bob", "tokenize_run.py")]
    server = PageServer(Hub(["train"]))
    try:
        with Chromium() as browser:
            browser.show(*SIZE)
            browser.open(server.url)
            browser.value("document.querySelector('[data-span=\"30\"]').click()")
            time.sleep(SECONDS)
            browser.picture(FOLDER / "page-kept.png")
            assert not browser.problems, browser.problems
    finally:
        server.close()
        for client in clients:
            client.terminate()
            client.wait()
        sky.attach("train").down(force=True)


if __name__ == "__main__":
    record()
    record_kept()
