"""Moving a record: what another machine of the same user needs to use a pool that stays."""

from __future__ import annotations

import msgspec

from skyward.nodes import keeping
from skyward.nodes.keeping import KeptPool
from skyward.nodes.reaching import provider_of
from skyward.providers import holds_keys


def exported(record: KeptPool) -> bytes:
    """The record with the provider's keys of the pool, for another machine.

    Raises `PoolError` if the pool can only be used on this machine.
    """
    provider = provider_of(record)
    keys = dict(provider.export_keys(record.id)) if holds_keys(provider) else {}
    return keeping.encode(msgspec.structs.replace(record, keys=keys))


def imported(data: bytes, where: str, name: str | None) -> KeptPool:
    """Write down a record that was exported, under a name of its own if one is given."""
    told = keeping.decode(data, where)
    record = msgspec.structs.replace(told, name=name or told.name, keys={})
    keeping.write(record, new=True)
    try:
        if told.keys and holds_keys(provider := provider_of(record)):
            provider.import_keys(record.id, told.keys)
    except BaseException:
        keeping.forget(record.name, record.id)
        raise
    return record
