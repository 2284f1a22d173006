"""A Kubernetes cluster for measurements: the testbed's, or the one of SKYWARD_KUBECONFIG."""

from __future__ import annotations

import contextlib
import importlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from testbed import NoTestbedError

import skyward as sky
from skyward.providers.kubernetes.access import Access, resolve

HERE = Path(__file__).parent
# Whoever looks here first for the official client would find kubernetes.py.
sys.path.sort(key=lambda folder: Path(folder).absolute() == HERE.absolute())
NAMESPACE = "bench"


@dataclass(frozen=True)
class Cluster:
    """Where the cluster is, and its own command line."""

    kubeconfig: str
    kubectl: str

    def provider(self, **options: Any) -> sky.Kubernetes:
        """Pods in which this very environment is ready."""
        given: sky.Kubernetes = _tests().provider(self.kubeconfig, namespace=NAMESPACE, **options)
        return given

    def access(self) -> Access:
        return Access(resolve(self.kubeconfig, None, NAMESPACE))

    def command(self, *arguments: str) -> list[str]:
        """A command line of kubectl."""
        return [self.kubectl, "--kubeconfig", self.kubeconfig, "-n", NAMESPACE, *arguments]

    @contextlib.contextmanager
    def forwarding(self, pod: str, port: int) -> Iterator[int]:
        """The port of this machine that `kubectl port-forward` leads to a port of the pod."""
        process = subprocess.Popen(
            self.command("port-forward", f"pod/{pod}", f":{port}"),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", said)
            assert found is not None, f"kubectl said {said!r}"
            yield int(found[1])
        finally:
            process.terminate()
            process.communicate()


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster with two nodes; one that is started here is taken down afterwards."""
    tests = _tests()
    try:
        tests.skip_if_absent()
        kubeconfig = tests.start()
    except pytest.skip.Exception as problem:
        raise NoTestbedError(str(problem)) from problem
    try:
        found = Cluster(kubeconfig, _kubectl())
        subprocess.run(found.command("create", "namespace", NAMESPACE), capture_output=True)
        yield found
    finally:
        tests.stop()


def _kubectl() -> str:
    cached = Path.home() / ".cache" / "skyward-testbed" / f"k8s-1.20.2-{platform.machine()}"
    if found := shutil.which("kubectl", path=f"{cached}") or shutil.which("kubectl"):
        return found
    raise NoTestbedError("there is no kubectl to compare with")


def _tests() -> Any:
    """The module of the tests that starts the cluster, and knows what its pods must mount."""
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    return importlib.import_module("tests.providers.kube")
