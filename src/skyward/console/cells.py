"""Cells: which cell of a notebook asked for something, so that output appears under that cell."""

from __future__ import annotations

import contextvars
import sys
import threading
from contextvars import Context
from typing import Any


def kernel_shell() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    find = getattr(ipython, "get_ipython", None)
    shell = find() if find is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def asking_cell(shell: Any) -> Context:
    """A context in which output belongs to the cell that this thread runs.

    The kernel keeps the cell in context variables, which a thread of the user's does not inherit.
    There, output belongs to the cell that runs now.
    """
    context = contextvars.copy_context()
    if threading.current_thread() is not threading.main_thread():
        # ipykernel has this from version 7 on; before, the newest cell gets the output.
        assign = getattr(shell, "set_thread_parent", None)
        if assign is not None:
            context.run(assign, shell.get_parent())
    return context


def cell_id(shell: Any) -> str:
    """What tells the cell of the current context from others."""
    header = getattr(shell.display_pub, "parent_header", None) or {}
    return str(header.get("msg_id", ""))
