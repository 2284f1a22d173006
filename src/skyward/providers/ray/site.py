"""What a driver finds in a Ray cluster: its resources, whether it grows, and how to be let in.

Ray's own Python runs this file, beside the driver's, so it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

# What resources are called.


def amount(name: str, value: float) -> str:
    """A number of a resource, for people."""
    if name == "memory" or name == "object_store_memory":
        return f"{value / 2**30:.3g} GiB"
    return f"{value:g}"


def shown(bundle: dict[str, float]) -> str:
    """A bundle for people: "2 CPU and 1 GPU"."""
    parts = [
        name.partition(":")[2]
        if name.startswith("accelerator_type")
        else f"{amount(name, n)} {name}"
        for name, n in bundle.items()
    ]
    return " and ".join(parts)


def listed(nodes: list[dict[str, float]], bundle: dict[str, float]) -> str:
    """What the nodes of a cluster have of what a bundle needs, equal nodes together."""
    kinds: dict[str, int] = {}
    for each in nodes:
        names = [name for name in ("CPU", "GPU", *bundle) if name in each]
        names += [name for name in each if name.startswith("accelerator_type")]
        kind = shown({name: each[name] for name in names}) or "nothing of it"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "nothing"


def fits(bundle: dict[str, float], node: dict[str, float]) -> int:
    """How often a bundle fits into a node that is empty."""
    return min(int(node.get(name, 0) // value) for name, value in bundle.items() if value)


# What the cluster has.


def alive(ray: Any) -> list[dict[str, float]]:
    """The resources of each node of the cluster."""
    return [each["Resources"] for each in ray.nodes() if each["Alive"]]


def knows(nodes: list[dict[str, float]], model: str) -> bool:
    """Whether a node of the cluster says that it has GPUs of a model."""
    return any(f"accelerator_type:{model}" in each for each in nodes)


def typed(bundle: dict[str, float], model: str, nodes: list[dict[str, float]]) -> dict[str, float]:
    """The bundle with the GPU's model, if the cluster knows the models of its GPUs."""
    untyped = any(
        each.get("GPU") and not any(name.startswith("accelerator_type") for name in each)
        for each in nodes
    )
    if not model or (untyped and not knows(nodes, model)):
        return bundle
    return {**bundle, f"accelerator_type:{model}": 0.001}


def impossible(
    count: int, bundle: dict[str, float], strategy: str, nodes: list[dict[str, float]]
) -> str:
    """Why a cluster of these nodes can never have so many bundles; empty if it may."""
    room = [fits(bundle, each) for each in nodes]
    most = {
        "STRICT_SPREAD": sum(1 for each in room if each),
        "STRICT_PACK": max(room, default=0),
    }
    if most.get(strategy, sum(room)) >= count:
        return ""
    where = {"STRICT_SPREAD": ", each on a node of its own", "STRICT_PACK": ", all on one node"}
    return (
        f"the Ray cluster can never have {count} x {shown(bundle)}{where.get(strategy, '')}; it "
        f"does not grow by itself, and its nodes have {listed(nodes, bundle)}; ask for less, or "
        "add nodes"
    )


def waiting(ray: Any, bundle: dict[str, float]) -> str:
    """What a placement group waits for, in terms of the cluster's resources."""
    has, free = ray.cluster_resources(), ray.available_resources()
    parts = []
    for name in bundle:
        if not name.startswith("accelerator_type"):
            there = amount(name, has.get(name, 0))
            parts.append(f"{amount(name, free.get(name, 0))} of {there} {name} free")
    return f"waiting for Ray to reserve {shown(bundle)}: {', '.join(parts)}"


# Who the driver is.


def new_identity() -> str:
    """A key and a certificate of its own, in PEM; the key leaves this cluster never."""
    if program := shutil.which("openssl"):
        made = subprocess.run(
            [
                *(program, "req", "-x509", "-nodes", "-days", "400", "-subj", "/CN=skyward-driver"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
                *("-keyout", "-", "-out", "-"),
            ],
            capture_output=True,
            text=True,
        )
        if made.returncode == 0 and "PRIVATE KEY" in made.stdout:
            return made.stdout
    return identity_without_openssl()


def identity_without_openssl() -> str:
    """The same, with the package cryptography, which most of Ray's environments have."""
    import datetime

    try:
        x509: Any = importlib.import_module("cryptography.x509")
        hazmat = "cryptography.hazmat.primitives"
        ec: Any = importlib.import_module(f"{hazmat}.asymmetric.ec")
        hashes: Any = importlib.import_module(f"{hazmat}.hashes")
        serialization: Any = importlib.import_module(f"{hazmat}.serialization")
    except ImportError:
        raise RuntimeError(
            f"neither the program openssl nor the package cryptography is on "
            f"{socket.gethostname()}; install one of them there"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyward-driver")])
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=400))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return str(plain.decode() + certificate.public_bytes(pem).decode())


def certificate_of(identity: str) -> str:
    """The certificate in a PEM text that has the key, too."""
    found = re.search(
        r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", identity, re.DOTALL
    )
    assert found is not None
    return found[0]


# The cluster.


def grows(ray: Any) -> bool:
    """Whether the cluster adds nodes by itself: its autoscaler knows kinds of nodes to add.

    Without an autoscaler, Ray reports every node as a kind of its own, called node_ and its id.
    """
    kinds: set[str] = set()
    with contextlib.suppress(Exception):
        kv = importlib.import_module("ray.experimental.internal_kv")
        told = json.loads(kv._internal_kv_get("__autoscaling_status") or "{}")
        report = told.get("autoscaler_report") or {}
        kinds = {*(report.get("active_nodes") or {})}
        kinds |= set((report.get("node_type_mapping") or {}).values())
    if not kinds:
        with contextlib.suppress(Exception):
            sdk = importlib.import_module("ray.autoscaler.v2.sdk")
            status = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
            there = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes]
            kinds = {each.ray_node_type_name for each in there}
    return any(not re.fullmatch(r"node_[0-9a-f]{20,}", kind) for kind in kinds)


def follow_authentication() -> None:
    """Have Ray authenticate as the raylet of this host does.

    Otherwise a program decides by whether the user has a token: if the cluster decided differently,
    the cluster's answers are refused, and its actors count as forgotten.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not (folder / "cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet"):
                continue
            found = re.search(rb"(?:^|\0)RAY_AUTH_MODE=([^\0]*)", (folder / "environ").read_bytes())
            os.environ.setdefault("RAY_AUTH_MODE", found[1].decode() if found else "disabled")
            return
