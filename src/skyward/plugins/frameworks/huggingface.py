"""Hugging Face: its libraries, a token that stays secret, and models that are there already."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.frameworks.accelerate import compute_where_the_node_can
from skyward.plugins.plugin import Plugin, check_installed, imported, installing

# The Trainer needs accelerate, and says so only when it is made.
PACKAGES = ("transformers", "datasets", "tokenizers", "accelerate")
HUB_SECONDS = 5.0
"""How long the hub has to say whether it knows the token."""

_MODEL = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def huggingface(token: str | None = None, models: Sequence[str] = ()) -> Plugin:
    """Install transformers, datasets and tokenizers, and sign in to the hub.

    The workers get the token over the pool's own connections only, as `HF_TOKEN`; no file holds it.
    If the hub can be reached and refuses the token, the start fails. `models` are downloaded before
    the first task. With `sky.plugins.torch()`, the `Trainer` is distributed over all workers.

    >>> plugins = [sky.plugins.torch(), sky.plugins.huggingface(token="hf_xxx")]
    """
    if token is not None and (not isinstance(token, str) or not re.fullmatch(r"\S+", token)):
        # The value is not shown: it may be a token with one blank too many.
        raise ConfigurationError(
            "sky.plugins.huggingface(token=...): give a token of one word, such as 'hf_...', or "
            "None to go without"
        )
    return (
        Plugin.create("huggingface")
        .with_transform(installing(PACKAGES))
        .with_around_process(HubSession(token, _checked(models)))
    )


def _checked(models: Sequence[str]) -> tuple[str, ...]:
    if isinstance(models, str) or not isinstance(models, Sequence):
        raise ConfigurationError(
            f"sky.plugins.huggingface(models={models!r}): give a list, such as ['org/model']"
        )
    for model in models:
        if not isinstance(model, str) or not _MODEL.fullmatch(model):
            raise ConfigurationError(
                f"sky.plugins.huggingface(models=[{model!r}]): give names as on the hub, such as "
                "'org/model'"
            )
    return tuple(models)


class HubSession:
    """What a worker does before its first task; a class, so that nothing shows the token."""

    def __init__(self, token: str | None, models: tuple[str, ...]) -> None:
        self._token, self._models = token, models

    def __repr__(self) -> str:
        return f"<huggingface: {'a' if self._token else 'no'} token, {len(self._models)} models>"

    @contextlib.contextmanager
    def __call__(self, info: InstanceInfo) -> Iterator[None]:
        for package in PACKAGES:
            check_installed(package)
        compute_where_the_node_can(info)
        if self._token is not None:
            os.environ["HF_TOKEN"] = self._token
            # One worker asks for all: the hub limits how often it answers.
            if info.is_head:
                _sign_in(self._token)
        for model in self._models:
            _download(model, self._token)
        yield


def _sign_in(token: str) -> None:
    hub = imported("huggingface_hub")
    try:
        answer = hub.get_session().get(
            f"{hub.constants.ENDPOINT}/api/whoami-v2",
            headers=hub.utils.build_hf_headers(token=token),
            timeout=HUB_SECONDS,
        )
    except Exception:
        # Offline: each version of the hub's client raises other errors for that. The task may not
        # need the token at all.
        return
    if answer.status_code in (401, 403):
        raise PermissionError(
            f"the hub refuses the token ({answer.status_code}); give one that is listed under "
            "Access Tokens in the settings of your account"
        )


def _download(model: str, token: str | None) -> None:
    hub = imported("huggingface_hub")
    try:
        # The hub's client makes the workers of a node wait for each other: one downloads for all.
        hub.snapshot_download(model, token=token)
    except Exception as problem:
        raise RuntimeError(
            f"the model {model!r} could not be downloaded: {type(problem).__name__}: {problem}; "
            "check its name on the hub, and that the token may read it"
        ) from problem
