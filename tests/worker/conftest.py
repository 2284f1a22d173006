"""What tests of an agent's parts share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyward.worker.config import AgentConfig


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return AgentConfig(
        pool="pool",
        node=0,
        address="unix",
        folder=str(tmp_path),
        workers=1,
        slots=1,
        threads=False,
        compute_pool=[""],
        visible=[""],
        env={},
        search_path=sys.path,
        working_directory=str(tmp_path),
        orphan_timeout=60.0,
        client_pid=0,
        credentials=None,
        blob_cap=1 << 20,
        plugged=False,
    )
