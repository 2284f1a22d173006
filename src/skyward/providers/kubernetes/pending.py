"""Why a pod is pending, in the words of the scheduler, the kubelet and the controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_RAN = ("Completed", "Error", "OOMKilled")
"""Why containers end that were running: the message is then what they said last."""
_UNREAD = (
    "Error on reading termination message from logs: ",
    "failed to try resolving symlinks in path ",
    "unable to retrieve container logs for ",
)
WAITING = "waiting for the scheduler"
MAKING = "its container is being made"
"""The one reason that is none to worry."""
_ADVICE = (
    ("exceeded quota", "ask for less, wait until others need less, or have the quota raised"),
    ("persistentvolumeclaim", "look at `kubectl describe pvc`: the claim must exist and be bound"),
    ("unbound", "look at `kubectl describe pvc`: the claim must exist and be bound"),
    ("volume", "look at `kubectl describe pod` and at the volumes that it mounts"),
    (
        "Insufficient",
        "ask for less, or wait until there is room: see `kubectl describe nodes`",
    ),
    ("taint", "give tolerations=, or a node_selector= for nodes that take your pods"),
    ("affinity", "look at the labels of the nodes with `kubectl get nodes --show-labels`"),
    ("forbidden", "the cluster's rules do not allow this pod: change it with pod_template="),
    ("suspended", "the queue has no room yet: look at `kubectl get workloads`"),
)


def reason(pod: Mapping[str, Any] | None, job: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Why a node has no running pod; empty if nothing is known."""
    if pod is None:
        told = _last(events, job, "FailedCreate")
        return _without_name(told) if told else ""
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    # A scheduler that takes a pod up twice says of its second try that it failed: the node counts.
    bound = bool((pod.get("spec") or {}).get("nodeName"))
    scheduled = [each for each in status.get("conditions") or () if each["type"] == "PodScheduled"]
    for condition in scheduled:
        if condition["status"] == "False" and not bound:
            return str(condition.get("message") or condition.get("reason") or WAITING)
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    told = _last(events, name, "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
    return told or (MAKING if bound or scheduled else WAITING)


def refusal(pod: Mapping[str, Any]) -> str:
    """What a registry said when the image was pulled, which later states do not repeat."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") == "ErrImagePull":
            return str(waiting.get("message", ""))
    return ""


def hopeless(pod: Mapping[str, Any], refusal: str = "") -> str:
    """Why a pod will never run, with the next step; empty if it may yet."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        why, message = waiting.get("reason", ""), str(waiting.get("message", ""))
        # The first failure of a pull may be the network's; the kubelet has then tried again.
        if why in _PULL and why != "ErrImagePull":
            image = container.get("image") or ""
            return (
                f"the image {image!r} cannot be pulled: {refusal or message}; see that it exists "
                "and that the cluster may pull it (imagePullSecrets go into pod_template=)"
            )
        if why in _CONFIG:
            return f"its container cannot be made: {why}: {message}; change it with pod_template="
    return ""


def ended(pod: Mapping[str, Any], words: str) -> str:
    """How a pod ended, with the last words of its container."""
    status = pod.get("status") or {}
    name = pod["metadata"]["name"]
    if pod["metadata"].get("deletionTimestamp"):
        return f"pod {name} was deleted"
    why = str(status.get("message") or status.get("reason") or "")
    for container in status.get("containerStatuses") or ():
        terminated = (container.get("state") or {}).get("terminated")
        if terminated:
            reason, message = (str(terminated.get(key) or "") for key in ("reason", "message"))
            if reason in _RAN:
                words, message = _said(message) or _said(words), ""
            why = why or message or reason
            why = f"exit status {terminated.get('exitCode')}{f' ({why})' if why else ''}"
    said = f"; it said:\n{words.strip()[-2000:]}" if words.strip() else "; it said nothing"
    return f"pod {name} ended: {why or 'no reason given'}{said}"


def _said(words: str) -> str:
    """What a container said; empty if it is the kubelet's word that it cannot read that."""
    return "" if words.startswith(_UNREAD) else words


def advice(why: str) -> str:
    """The next step for a reason."""
    return next((f"; {step}" for words, step in _ADVICE if words in why), "")


def _last(events: Sequence[Mapping[str, Any]], name: str, *reasons: str) -> str:
    found = [
        event
        for event in events
        if event["involvedObject"].get("name") == name and event.get("reason") in reasons
    ]
    found.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return str(found[-1].get("message") or found[-1]["reason"]) if found else ""


def _without_name(message: str) -> str:
    return message.removeprefix("Error creating: ")
