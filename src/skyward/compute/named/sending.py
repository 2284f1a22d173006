"""Sending a call by name: the call as one file, for the head's agent to keep."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import msgspec

from skyward.compute.named.facts import CallFacts
from skyward.errors import ConfigurationError
from skyward.functions import Pending
from skyward.nodes.inside import way_back
from skyward.nodes.keeper import identity
from skyward.nodes.keeping import KeptPool
from skyward.objects import encoding, stored
from skyward.objects.encoding import Encoded
from skyward.wire.asking import PART, ServiceConnection

RUNNER = ["{python}", "-m", "skyward.compute.named.runner"]
_IN_MEMORY = 16 << 20


def send(
    agent: ServiceConnection,
    record: KeptPool,
    name: str,
    pending: Pending[Any],
    *,
    on: int | None,
    everywhere: bool,
    fail_fast: bool,
) -> None:
    """Have the head's agent take a call and keep it by name; it runs from then on."""
    _check(pending, name)
    environment, private = way_back(record)
    me = identity()
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        _write(file, pending, on=on, everywhere=everywhere, fail_fast=fail_fast)
        agent.send(
            "submit",
            name=name,
            function=pending.function.name,
            command=RUNNER,
            environment=environment,
            private=private,
            by=f"{me['user']}@{me['host']}",
        )
        file.seek(0)
        while part := file.read(PART):
            agent.send("part", part)
        agent.send("part")
        agent.next_reply()


def _check(pending: Pending[Any], name: str) -> None:
    function = pending.function
    if function.seat is not None:
        raise ConfigurationError(
            f"submit({function.name}, name={name!r}): the object of this method lives with its "
            "client; make the object inside a function, and name the call of that function"
        )
    if function.kept_on is not None:
        raise ConfigurationError(
            f"submit({function.name}, name={name!r}): the tensors of sky.remote are those of their "
            "client; name the plain function, whose result is kept, and move it to a device later"
        )


def _write(
    file: IO[bytes],
    pending: Pending[Any],
    *,
    on: int | None,
    everywhere: bool,
    fail_fast: bool,
) -> None:
    function = pending.function
    code = function.code()
    args, kwargs = pending.whole_arguments()
    call = encoding.Arguments(function.name, function.parameter_names, args, kwargs)
    # The bytes of tensors on devices travel, too: the devices are this client's.
    encoded = encoding.encode(call, own_modules=True)
    facts = CallFacts(
        function=function.name,
        key=code.key,
        timeout=function.timeout,
        retries=function.retries,
        on=on,
        everywhere=everywhere,
        code_handles=[each.key for each in code.encoded.handles],
        handles=[each.key for each in encoded.handles],
        fail_fast=fail_fast or function.fail_fast,
    )
    _append(file, code.encoded, msgspec.to_builtins(facts, builtin_types=(bytes,)))
    _append(file, encoded)
    for handle in {each.key: each for each in (*code.encoded.handles, *encoded.handles)}.values():
        _append(file, handle.encoded, handle.key)


def _append(file: IO[bytes], encoded: Encoded, facts: Any = None) -> None:
    stored.append(file, encoded.pieces, encoded.buffers, encoded.storages, facts)
