"""The catalog: lists, publishes and withdraws versions, and removes what no version needs."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from skyward.errors import (
    ConfigurationError,
    ModelNotFoundError,
    SerializationError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from skyward.store import manifest as manifests
from skyward.store.manifest import MANIFEST_LIMIT, Manifest, StoredObject, object_path
from skyward.store.places import FileEntry, Files

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_RESERVED = re.compile(r".*\.(json|gone)", re.IGNORECASE)
_VERSION = re.compile(r"models/(.+)/([1-9][0-9]{0,8})\.(json|gone)")
_LONGEST = 200
_KEPT = 64
"""How many manifests a catalog remembers; one may take as much memory as a small model."""
GRACE = 24 * 3600.0
"""How long the garbage collector keeps a file that no manifest names."""
_LEASE_LIMIT = 64 << 20

_log = logging.getLogger("skyward.store")


def manifest_url(files: Files, manifest: Manifest) -> str:
    """The name of a manifest in messages."""
    return f"{files.url}/models/{manifest.name}/{manifest.version}.json"


def check_name(name: object) -> str:
    """Check a model's name: a path whose segments never lead out of the store's folder."""
    if not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: a model's name must be a str; pass a str")
    problem = name_problem(name)
    if problem is not None:
        raise ConfigurationError(f"name={problem}")
    return name


def name_problem(name: str) -> str | None:
    """The name and the reason why it cannot be a model's; None if it can."""
    segments = name.split("/")
    if (
        len(name) <= _LONGEST
        and all(_SEGMENT.fullmatch(segment) for segment in segments)
        and not any(_RESERVED.fullmatch(segment) for segment in segments)
    ):
        return None
    return (
        f"{name[:_LONGEST]!r}: not a model's name; use up to {_LONGEST} letters, digits, "
        "'.', '_' and '-', with '/' between parts, none of which may begin with '.' or '-' "
        "or end in '.json' or '.gone'"
    )


class Catalog:
    """The manifests of a store.

    A version's number is used once: deleting it leaves a mark, so that a name and a number mean the
    same bytes for ever. A manifest with a mark is no version: a save may have taken a number that
    was deleted meanwhile, and not have taken the manifest back yet. The mark of the highest number
    stays, and the others for as long as a save may be about to take a number that was free when it
    began. A running save has a lease: a file that names the objects that the save reuses, so that
    the collector keeps them.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._kept: OrderedDict[str, Manifest] = OrderedDict()

    def numbers(self, name: str | None = None) -> dict[str, list[int]]:
        """The numbers of the versions, oldest first, of every model or of one."""
        listed = self._listed(name)
        gone = {(owner, number) for owner, number, is_mark in listed if is_mark}
        found: dict[str, list[int]] = {}
        for owner, number, _ in listed:
            if (owner, number) not in gone:
                found.setdefault(owner, []).append(number)
        return {owner: sorted(found[owner]) for owner in sorted(found)}

    def resolve(self, name: str, version: int | None) -> int:
        """The number of the version that was asked for, or of the newest."""
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise ConfigurationError(
                f"version={version!r}: a version is a whole number; pass an int, such as version=1"
            )
        numbers = self.numbers(name).get(name, [])
        if not numbers:
            names = ", ".join(self.numbers()) or "none yet"
            if self.files.absent:
                raise ModelNotFoundError(
                    f"no model {name!r} in {self.files.url}, which does not exist; "
                    "check where the store is, or save a model there first"
                )
            raise ModelNotFoundError(
                f"{self.files.url} has no model {name!r}; it has: {names[:500]}"
            )
        if version is None:
            return numbers[-1]
        if version not in numbers:
            shown = ", ".join(str(number) for number in numbers[-20:])
            raise ModelNotFoundError(
                f"{self.files.url} has no version {version!r} of {name!r}; it has: {shown}"
            )
        return version

    def read(self, name: str, version: int) -> Manifest:
        """One version's manifest, checked."""
        path = f"models/{name}/{version}.json"
        where = f"{self.files.url}/{path}"
        try:
            data = self.files.read(path, 0, MANIFEST_LIMIT + 1)
        except FileNotFoundError:
            raise ModelNotFoundError(f"{where} is gone: the version was deleted") from None
        if len(data) > MANIFEST_LIMIT:
            raise StoreDamagedError(
                f"{where}: longer than the {MANIFEST_LIMIT >> 20} MiB a manifest may have; "
                "delete this version and save the model again"
            )
        manifest = manifests.decode(data, where)
        if (manifest.name, manifest.version) != (name, version):
            raise StoreDamagedError(
                f"{where}: holds version {manifest.version} of {manifest.name!r}; on a filesystem "
                "that ignores case, names must differ in more than case: use another name"
            )
        return manifest

    def remember(self, name: str, version: int) -> Manifest:
        """One version's manifest: the remembered one, or else read from the store."""
        kept = self._kept.get(f"models/{name}/{version}.json")
        return self.keep(kept or self.read(name, version))

    def keep(self, manifest: Manifest) -> Manifest:
        """Remember a manifest, and forget the least recently used."""
        path = f"models/{manifest.name}/{manifest.version}.json"
        self._kept[path] = manifest
        self._kept.move_to_end(path)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return manifest

    def has(self, name: str, version: int) -> bool:
        """Whether a version still exists."""
        path = f"models/{name}/{version}"
        return self.files.size(f"{path}.json") is not None and not self._is_marked(path)

    def publish(self, drafts: Iterable[Manifest], name: str) -> Manifest:
        """Publish the first draft whose number is free; drafts are numbered upwards."""
        for draft in drafts:
            path = f"models/{name}/{draft.version}"
            if not self.files.create(f"{path}.json", _accepted(draft)):
                continue
            # Another client may have published and deleted this number after the drafts got theirs.
            if not self._is_marked(path):
                return self.keep(draft)
            self.files.delete(f"{path}.json")
        raise StoreError(
            f"{self.files.url}: other clients took every version number of {name!r} that this "
            "save tried; save again, or under another name"
        )

    def _is_marked(self, path: str) -> bool:
        """Whether the version at a path without an ending was deleted."""
        return self.files.size(f"{path}.gone") is not None

    def last_number(self, name: str) -> int:
        """The highest number ever used."""
        return max((number for _, number, _ in self._listed(name)), default=0)

    def withdraw(self, name: str, versions: list[int]) -> None:
        """Delete versions; their bytes stay until the garbage collector deletes them."""
        last = self.last_number(name)
        for number in versions:
            try:
                self.files.write(f"models/{name}/{number}.gone", [b"{}\n"])
            except StoreFullError:
                # Deletions make room. Without this mark, only a save that goes on may take the
                # number again.
                if number == last:
                    raise
            self.files.delete(f"models/{name}/{number}.json")
            self._kept.pop(f"models/{name}/{number}.json", None)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Callable[[Iterable[StoredObject]], None]]:
        """The lease of one save, as a function that names the objects that the save reuses."""
        path = f"saves/{uuid.uuid4().hex}.json"

        def write(reused: Iterable[StoredObject]) -> None:
            named = msgspec.json.encode({"objects": [stored.name for stored in reused]})
            self.files.write(path, [named])

        try:
            yield write
        finally:
            try:
                self.files.delete(path)
            except StoreError as problem:
                # The lease ends by itself, and the save succeeded or failed for another reason.
                _log.info("a lease stays for a day: %s", problem)

    def lost(self, reused: Mapping[StoredObject, tuple[str, int]]) -> set[StoredObject]:
        """The reused objects that no longer exist, or whose version no longer exists."""
        deleted = {source for source in set(reused.values()) if not self.has(*source)}
        streams = self.files.transfers

        def missing(some: list[StoredObject]) -> list[StoredObject]:
            return [each for each in some if self.files.size(object_path(each.name)) != each.size]

        stored = list(reused)
        with ThreadPoolExecutor(streams) as pool:
            found = pool.map(missing, [stored[each::streams] for each in range(streams)])
            lost = {each for some in found for each in some}
        return lost | {each for each in stored if reused[each] in deleted}

    def collect(self, older_than: float) -> int:
        """Remove what no manifest and no lease names, and what is left of deleted versions.

        Returns the bytes of that.

        A manifest that cannot be read stops the collection, because its objects are unknown. The
        manifests are read again after the leases, because a save publishes before it drops its
        lease: a save that published in between is seen now, and every other save still holds its
        lease.

        The clock may be set back meanwhile, and what is written then would look old at once: ages
        are those at the earliest time that the clock has shown so far.
        """
        now = time.time()
        there = [e for folder in ("objects", "tmp", "saves") for e in self.files.list(folder)]
        now = min(now, time.time())
        old = [entry for entry in there if entry.modified < now - older_than]
        named: set[str] = set()
        seen: set[tuple[str, int]] = set()
        self._mark(named, seen)
        leases = self.files.list("saves")
        now = min(now, time.time())
        for entry in leases:
            if entry.modified >= now - GRACE:
                named.update(object_path(name) for name in self._leased(entry.path))
        self._mark(named, seen)
        freed = 0
        for entry in [*old, *self._deleted(now, max(older_than, GRACE))]:
            abandoned = not entry.path.startswith("saves/") or entry.modified < now - GRACE
            if entry.path not in named and abandoned:
                self.files.delete(entry.path)
                freed += entry.size
        return freed

    def _deleted(self, now: float, seconds: float) -> list[FileEntry]:
        """What is left of deleted versions: first manifests, which interrupted clients have left.

        Then the marks that are older than that, except those of the highest numbers.
        """
        found = self._entries(None)
        before = min(now, time.time()) - seconds
        marked = {(name, number) for _, name, number, gone in found if gone}
        highest: dict[str, int] = {}
        for _, name, number, _ in found:
            highest[name] = max(number, highest.get(name, 0))
        manifests = [e for e, name, number, gone in found if not gone and (name, number) in marked]
        marks = [
            entry
            for entry, name, number, gone in found
            if gone and number < highest[name] and entry.modified < before
        ]
        return [*manifests, *marks]

    def _mark(self, named: set[str], seen: set[tuple[str, int]]) -> None:
        """Add the objects of the versions that are not in `seen` yet."""
        for name, numbers in self.numbers().items():
            for number in numbers:
                if (name, number) in seen:
                    continue
                seen.add((name, number))
                with contextlib.suppress(ModelNotFoundError):  # deleted since it was listed
                    manifest = self.read(name, number)
                    named.update(object_path(stored.name) for stored in manifest.objects)

    def _leased(self, path: str) -> list[str]:
        """The objects that the lease at a path names."""
        try:
            data = self.files.read(path, 0, _LEASE_LIMIT)
            return msgspec.json.decode(data, type=dict[str, list[str]])["objects"]
        except FileNotFoundError:
            return []
        except (msgspec.MsgspecError, KeyError):
            raise StoreDamagedError(
                f"{self.files.url}/{path}: not a list of the objects a save uses; "
                "delete the file when no save is running, then collect again"
            ) from None

    def _listed(self, name: str | None) -> list[tuple[str, int, bool]]:
        """The name and the number of each version, and whether it was deleted."""
        return [(owner, number, gone) for _, owner, number, gone in self._entries(name)]

    def _entries(self, name: str | None) -> list[tuple[FileEntry, str, int, bool]]:
        """The same, with the files."""
        folder = "models" if name is None else f"models/{name}"
        found = []
        for entry in self.files.list(folder):
            match = _VERSION.fullmatch(entry.path)
            if match and name in (None, match[1]):
                found.append((entry, match[1], int(match[2]), match[3] == "gone"))
        return found


def _accepted(draft: Manifest) -> bytes:
    """A draft as bytes to write; raises if readers would not accept it."""
    for flaw in manifests.flaws(draft):
        raise SerializationError(
            f"{draft.name!r} cannot be stored: {flaw}; please report this, with the tensors' "
            "shapes, strides and dtypes, and save copies of them meanwhile: tensor.clone()"
        )
    data = manifests.encode(draft)
    check_length(draft.name, len(data))
    return data


def check_length(name: str, length: int) -> None:
    """Raise for a manifest that is longer than readers accept."""
    if length > MANIFEST_LIMIT:
        raise SerializationError(
            f"{name!r} cannot be stored: what is not in tensors would take {length >> 20} MiB, and "
            f"a version has room for {MANIFEST_LIMIT >> 20}; turn bytes, text and long lists into "
            "tensors, such as torch.frombuffer(data, dtype=torch.uint8)"
        )
