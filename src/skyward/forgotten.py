"""Forgotten calls: a call that is a statement by itself, and that nobody runs, warns."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, Self


class Forgettable:
    """A call that does nothing by itself, and knows whether somebody has used it."""

    __slots__ = ("_used",)

    function: Any

    def use(self) -> Self:
        """Note that somebody has done something with the call."""
        object.__setattr__(self, "_used", True)
        return self

    def __setstate__(self, state: object) -> None:
        """After pickling: whoever made the call has used it."""
        self.use()

    def __del__(self) -> None:
        # Only of statements: a call in a variable may not have run because of an exception.
        if not hasattr(self, "_used") and _is_statement(sys._getframe().f_back):
            name = self.function.name
            warnings.warn(
                f"{name}(...) never ran: calling a @sky.function only describes a call; run it "
                f"with {name}(...) >> compute, or here with {name}.local(...)",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_statement(frame: FrameType | None) -> bool:
    """Whether a frame is about to drop the value of an expression that is a whole statement."""
    # Only here: most programs forget nothing.
    from opcode import opname

    if frame is None or frame.f_lasti < 0:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    if opname[code[at]] != "POP_TOP":
        return False
    # Before it comes what has made the value; a loop that is left drops its iterator, too.
    at -= 2
    while at > 0 and opname[code[at]] == "CACHE":
        at -= 2
    return opname[code[at]] in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "BINARY_OP")
