"""Exceptions as they travel: with all that they have, and without a call of their class."""

from __future__ import annotations

import contextlib
import copyreg
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OWN_PICKLING = frozenset(("__reduce__", "__reduce_ex__"))


def reduce_exception(problem: BaseException) -> Any:
    """An exception of the user's class as what it is made of, for a pickler.

    Pickle alone would call the class with `args`. These are what the class gave its base, and not
    what the class itself takes.
    """
    kind = type(problem)
    own = [base for base in kind.__mro__ if base.__module__ != "builtins"]
    if not own or kind in copyreg.dispatch_table:
        return NotImplemented
    if any(not _OWN_PICKLING.isdisjoint(vars(base)) for base in own):
        return NotImplemented
    if any(isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in own):
        # What a class written in C keeps, only the class itself can make.
        return NotImplemented
    fields = {}
    for name, descriptor in _fields(kind):
        with contextlib.suppress(AttributeError):
            fields[name] = descriptor.__get__(problem, kind)
    given: tuple[Any, ...] = ()
    if isinstance(problem, BaseExceptionGroup):
        given = problem.message, list(problem.exceptions)
    attributes: Any = dict(vars(problem))
    if any("__getstate__" in vars(base) for base in own):
        attributes = problem.__getstate__()
    state = problem.args, fields, attributes
    return _exception, (kind, given), state, None, None, _set_exception_state


def _fields(kind: type[BaseException]) -> Iterator[tuple[str, Any]]:
    """Slots, and what the classes of Python itself keep in C, as an OSError its file's name."""
    for base in kind.__mro__:
        if base in (BaseException, BaseExceptionGroup, object):
            continue
        for name, found in vars(base).items():
            is_field = isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))
            # What an AttributeError is about may be any object, of any size.
            is_subject = base is AttributeError and name == "obj"
            if is_field and not is_subject and not name.startswith("__"):
                yield name, found


def _exception(kind: type[BaseException], given: tuple[Any, ...]) -> BaseException:
    base = kind
    while base.__module__ != "builtins":
        base = base.__base__  # type: ignore[assignment]
    return base.__new__(kind, *given)


def _set_exception_state(problem: BaseException, state: tuple[Any, dict[str, Any], Any]) -> None:
    args, fields, attributes = state
    # Not as the class sets attributes: a frozen dataclass refuses.
    BaseException.__setattr__(problem, "args", args)
    for name, descriptor in _fields(type(problem)):
        # An OSError without a file has no name, which is not the same as the name None.
        if fields.get(name) is not None:
            descriptor.__set__(problem, fields[name])
    if type(problem).__setstate__ is not BaseException.__setstate__:
        problem.__setstate__(attributes)
    elif attributes is not None:
        vars(problem).update(attributes)


def add_note(problem: BaseException, note: str) -> None:
    """Add a note, also to an exception whose class lets nobody set attributes."""
    notes = [*getattr(problem, "__notes__", ()), note]
    BaseException.__setattr__(problem, "__notes__", notes)


@dataclass(slots=True)
class PortableException:
    """An exception with its notes, causes and contexts, which pickle may leave out."""

    problem: Exception
    chain: dict[str, PortableException]
    suppress_context: bool
    notes: list[str]

    @classmethod
    def of(cls, problem: Exception, chain: dict[str, PortableException]) -> PortableException:
        """The exception with the given causes and contexts."""
        notes = list(getattr(problem, "__notes__", ()))
        return cls(problem, chain, problem.__suppress_context__, notes)

    def rebuild(self) -> Exception:
        """The exception with its restored chain."""
        for link, other in self.chain.items():
            BaseException.__setattr__(self.problem, link, other.rebuild())
        suppress = self.suppress_context
        BaseException.__setattr__(self.problem, "__suppress_context__", suppress)
        if self.notes:
            BaseException.__setattr__(self.problem, "__notes__", self.notes)
        return self.problem
