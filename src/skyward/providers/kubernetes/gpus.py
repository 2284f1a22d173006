"""GPUs of a cluster: the resource that a vendor's plugin offers, and the labels of its nodes."""

from __future__ import annotations

import re
from typing import Any

from skyward.accelerators import Accelerator

NVIDIA = "nvidia.com/gpu"
_VENDORS = (
    (re.compile(r"^MI\d", re.IGNORECASE), "amd.com/gpu"),
    (re.compile(r"^Gaudi", re.IGNORECASE), "habana.ai/gaudi"),
    (re.compile(r"^(Trainium|Inferentia|trn|inf)", re.IGNORECASE), "aws.amazon.com/neuron"),
    (re.compile(r"^TPU", re.IGNORECASE), "google.com/tpu"),
    (re.compile(r"^(Max|Flex|Arc)", re.IGNORECASE), "gpu.intel.com/i915"),
)
_PRODUCTS = {
    "K80": ["Tesla-K80"],
    "P100": ["Tesla-P100-SXM2-16GB", "Tesla-P100-PCIE-16GB", "Tesla-P100-PCIE-12GB"],
    "T4": ["Tesla-T4"],
    "L4": ["NVIDIA-L4"],
    "L40": ["NVIDIA-L40"],
    "L40S": ["NVIDIA-L40S"],
    "A10": ["NVIDIA-A10"],
    "A10G": ["NVIDIA-A10G"],
    "A40": ["NVIDIA-A40"],
    "V100-16GB": ["Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"],
    "V100-32GB": ["Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-32GB", "Tesla-V100-SXM3-32GB"],
    "A100-40GB": ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"],
    "A100-80GB": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
    "H100-80GB": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"],
    "H100-94GB": ["NVIDIA-H100-NVL"],
    "H200": ["NVIDIA-H200", "NVIDIA-H200-NVL"],
    "GH200": ["NVIDIA-GH200-480GB", "NVIDIA-GH200-144G-HBM3e"],
    "B200": ["NVIDIA-B200"],
    "B300": ["NVIDIA-B300-SXM6-AC", "NVIDIA-B300"],
    "RTX-3090": ["NVIDIA-GeForce-RTX-3090"],
    "RTX-4090": ["NVIDIA-GeForce-RTX-4090"],
    "RTX-5090": ["NVIDIA-GeForce-RTX-5090"],
    "RTX-A6000": ["NVIDIA-RTX-A6000"],
}
"""What NVIDIA's GPU feature discovery calls a model in its label."""
_GOOGLE = {
    "A100-40GB": ["nvidia-tesla-a100"],
    "A100-80GB": ["nvidia-a100-80gb"],
    "H100-80GB": ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"],
    "H200": ["nvidia-h200-141gb"],
}
"""What Google calls a model in its label, where that does not follow from the name."""
_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/class",
)


def resource(accelerator: Accelerator) -> str:
    """The name of the resource that pods ask for."""
    return next((name for known, name in _VENDORS if known.match(accelerator.name)), NVIDIA)


def affinity(accelerator: Accelerator) -> dict[str, Any] | None:
    """Nodes whose labels name the model, by whoever labelled them, or that have no such label."""
    if resource(accelerator) != NVIDIA:
        return None
    name, memory = accelerator.name.replace("_", "-"), accelerator.memory
    products = _PRODUCTS.get(f"{name}-{memory}") or _PRODUCTS.get(name) or []
    google = _GOOGLE.get(f"{name}-{memory}") or _GOOGLE.get(name)
    google = google or [f"nvidia-{name.lower()}", f"nvidia-tesla-{name.lower()}"]
    values = {
        "nvidia.com/gpu.product": [*products, *(f"{each}-SHARED" for each in products)],
        "cloud.google.com/gke-accelerator": google,
        "karpenter.k8s.aws/instance-gpu-name": [name.lower()],
        "gpu.nvidia.com/class": [name],
    }
    terms: list[dict[str, Any]] = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": wanted}]}
        for key, wanted in values.items()
        if wanted
    ]
    unlabelled = [{"key": key, "operator": "DoesNotExist"} for key in _LABELS]
    if not products:
        # The label's value is not known: whatever it is, the node itself says what it has.
        terms[0:0] = [{"matchExpressions": [{"key": _LABELS[0], "operator": "Exists"}]}]
    terms.append({"matchExpressions": unlabelled})
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
