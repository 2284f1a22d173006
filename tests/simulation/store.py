"""A store in a folder that several processes use at once; and what must hold, whatever happens."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

from .kernel import Process
from .scenario import Scenario
from .world import World

torch.set_num_threads(1)
NAMES = ("model", "model", "team/other")
OPERATIONS = ("save",) * 4 + ("load",) * 3 + ("again", "delete", "delete all", "list", "collect")
FIGHTING = ("save", "save", "delete all", "collect", "collect", "load")
"""Most of what a save finds is deleted and collected while it goes on."""
Version = tuple[str, int]


class Store(Scenario):
    """Rounds in which processes use a store, and nights between them, after which much is old."""

    killed = ("user", "user")
    stopped = ("user",)

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.folder = Path(world.folder, "store")
        self.users = self.random.choice((1, 2, 3, 4))
        fights = self.users > 1 and self.random.random() < 0.4
        self.operations, self.names = (FIGHTING, NAMES[:1]) if fights else (OPERATIONS, NAMES)
        self.durable = self.random.random() < 0.3
        self.whole, self.pack = self.random.choice(((1 << 20, 48 << 20), (16, 64), (64, 64)))
        """From which size tensors are files of their own, and how large a batch is."""
        self.slowness: dict[Process, float] = {}
        """How long a disk may take for each operation of a process."""
        self.numbers = 0
        self.saved: dict[int, str] = {}
        """The name of each value that a save has begun to store."""
        self.refused: set[int] = set()
        """Values of which a save has said that nothing was published."""
        self.returned: dict[Version, int] = {}
        """The value of each version that a save has returned."""
        self.again: set[int] = set()
        """Values that may be those of another version, which a save has not returned."""
        self.withdrawn: set[Version] = set()
        """Versions that somebody has begun to delete."""
        self.deleted: set[Version] = set()
        self.deletions: Counter[str] = Counter()
        """How many deletions of each name have begun."""
        self.deleting: Counter[str] = Counter()
        """How many of them go on, or were killed in this round."""
        self._choose_faults()
        world.commands["user"] = self._user
        world.commands["reader"] = self._reader

    def run(self) -> None:
        """Run rounds of users and nights, then look at all that is left."""
        for _ in range(self.random.choice((1, 2, 2, 3))):
            self._begin_faults()
            users = [self.world.spawn(["user"]) for _ in range(self.users)]
            for user in users:
                self._await(user)
            self._check_objects()
            self._night(self.random.choice((0.0, 13.0, 25.0, 50.0)))
        self._end_faults()
        self._await(self.world.spawn(["reader"]))
        # The clock may have jumped back.
        self._night(50.0 + 24.0 * self.counts["clock"])
        self._await(self.world.spawn(["reader", "collect"]))
        for process in self._living():
            self._says(f"{process.name} lives when all have ended")

    def _night(self, hours: float) -> None:
        self.kernel.wall += hours * 3600.0
        self.deleting.clear()

    def _disk(self, operation: str, what: Any) -> None:
        thread = self.kernel.current
        if thread is not None and (most := self.slowness.get(thread.process)):
            self.kernel.sleep(self.kernel.random.random() * most)
        super()._disk(operation, what)

    # The users.

    def _store(self) -> Any:
        """A store as the current process has it, with sizes that tiny tensors reach."""
        import skyward as sky
        from skyward.store import load, local, save

        local.LocalFiles.whole = self.whole
        save.PACK = self.pack
        load._SMALL_MAPPED = self.whole
        return sky.ModelStore(self.folder, durable=self.durable)

    def _user(self, process: Process) -> int:
        # The copy of this process: its threads are simulated.
        import threading

        self.slowness[process] = self.random.choice((0.0, 0.001, 0.02, 0.3))
        store = self._store()
        count = 2 if self.users > 1 and self.random.random() < 0.3 else 1
        threads = [threading.Thread(target=self._use, args=(store,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0

    def _use(self, store: Any) -> None:
        import time

        for _ in range(self.random.randint(1, 8)):
            operation = self.random.choice(self.operations)
            name = self.random.choice(self.names)
            self.counts["operations"] += 1
            self.kernel.note(f"{operation} {name}")
            try:
                self._operation(store, operation, name)
            except Exception as problem:
                self._says(f"{operation}: {''.join(traceback.format_exception(problem))}")
            time.sleep(self.random.choice((0.0, 0.0, 0.001, 0.1, 3.0)))

    def _operation(self, store: Any, operation: str, name: str) -> None:
        if operation == "save":
            self._save(store, name, self._number())
        elif operation == "again":
            self._save_again(store, name)
        elif operation == "load":
            known = [version for owner, version in self.returned if owner == name]
            if known and self.random.random() < 0.5:
                self._load(store, name, self.random.choice(known))
            else:
                self._load_newest(store, name)
        elif operation == "list":
            self._list(store, name)
        elif operation == "collect":
            store.gc()
        elif operation == "delete all":
            self._delete(store, name, None)
        elif numbers := store.numbers(name).get(name):
            self._delete(store, name, self.random.choice(numbers))

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _value(self, number: int) -> dict[str, Any]:
        """The value of a number: many of its tensors are those of other numbers."""
        random = Random(number)
        value: dict[str, Any] = {"number": number}
        for at in range(random.randint(1, 4)):
            tensor = torch.full((random.choice((3, 8, 300)),), float(random.randint(0, 2)))
            if random.random() < 0.3:
                tensor[-1] = number
            value[f"layer{at}"] = tensor
        if random.random() < 0.3:
            value["tied"] = value["layer0"]
            value["part"] = value["layer0"][1:3]
        return value

    def _save(self, store: Any, name: str, number: int) -> Any:
        """Save a value, perhaps again if the disk fails; no other save gets its version."""
        import skyward as sky

        self.saved[number] = name
        deleted = self.deleted.copy()
        before, others = self.deletions[name], self.deleting[name]
        is_new = number not in self.returned.values()
        for _ in range(self.random.randint(1, 3)):
            self.refused.discard(number)
            try:
                made = store.save_model(self._value(number), name, metadata={"number": number})
            except sky.errors.StoreError as problem:
                if "disk" not in self.kinds:
                    raise
                self._expected(problem, "a save")
                is_new = is_new and isinstance(problem, sky.errors.StoreFullError)
                if is_new:
                    self.refused.add(number)
                continue
            break
        else:
            return None
        version = (name, made.version)
        self.kernel.note(f"{version} is {number}")
        self.counts["saved"] += 1
        if version in self.returned:
            self._says(f"two saves got {version}: {self.returned[version]} and {number}")
        # Others may delete what a save has published, before it returns.
        if version in deleted:
            self._says(f"{version}, which was deleted, is {number} now")
        self.returned[version] = number
        if others or self.deletions[name] != before:
            # Those who delete all that is there may have found it.
            self.withdrawn.add(version)
        return made

    def _save_again(self, store: Any, name: str) -> None:
        """What is there is not stored again."""
        number = self._number()
        first = self._save(store, name, number)
        before = self.deletions.copy()
        if first is None or any(self.deleting.values()):
            return
        self.again.add(number)
        second = self._save(store, name, number)
        if second is None:
            return
        self.again.discard(number)
        if self.deletions == before and second.added:
            self._says(f"version {second.version} of {name} added {second.added} bytes")

    def _load(self, store: Any, name: str, version: int) -> None:
        """Load a version that a save has returned, or that was listed."""
        import skyward as sky

        gone = (name, version) in self.deleted
        try:
            found = store.load_model(name, version=version)
        except sky.errors.StoreError as problem:
            # A number that somebody has deleted before may be seen, and is taken back.
            unsure = (name, version) not in self.returned and self.deletions[name]
            taken_back = unsure and isinstance(problem, sky.errors.ModelNotFoundError)
            if (name, version) not in self.withdrawn and not taken_back:
                raise
            return
        number = self._check_value(found, name)
        if gone:
            self._says(f"version {version} of {name} was deleted, and loads")
        if self.returned.get((name, version), number) != number:
            self._says(f"version {version} of {name} has the value of {number}")

    def _load_newest(self, store: Any, name: str) -> None:
        """What loads is as new as anything that was there before."""
        import skyward as sky

        there = self._there(name)
        before, others = self.deletions[name], self.deleting[name]
        try:
            number = self._check_value(store.load_model(name), name)
        except sky.errors.StoreError as problem:
            alone = not others and self.deletions[name] == before
            if alone and (there or not isinstance(problem, sky.errors.ModelNotFoundError)):
                raise
            return
        found = [version for version, saved in self.returned.items() if saved == number]
        still = [version for version in there if version not in self.withdrawn]
        if still and found and number not in self.again and max(found) < max(still):
            self._says(f"the newest is {max(found)}, and {max(still)} was there")

    def _check_value(self, found: Any, name: str) -> int:
        number = int(found["number"])
        self.counts["loaded"] += 1
        if self.saved.get(number) != name:
            self._says(f"{name} has {number}, a value of {self.saved.get(number)}")
        wanted = self._value(number)
        same = found.keys() == wanted.keys() and all(
            torch.equal(found[key], each) for key, each in wanted.items() if key != "number"
        )
        if not same:
            self._says(f"{name} has {found} and not {wanted}")
        return number

    def _list(self, store: Any, name: str) -> None:
        """All that is there is listed, and what is listed is there."""
        import skyward as sky

        there = self._there(name)
        before, others = self.deletions[name], self.deleting[name]
        try:
            listed = {each.version: each.metadata["number"] for each in store.versions(name)}
        except sky.errors.ModelNotFoundError:
            if there and not others and self.deletions[name] == before:
                raise
            return
        newest = {each.name: each.version for each in store.list()}.get(name, 0)
        for _, version in [each for each in there if each not in self.withdrawn]:
            if version not in listed or newest < version:
                self._says(f"version {version} of {name} is missing in {listed}; {newest}")
        for version, number in listed.items():
            if self.returned.get((name, version), number) != number:
                self._says(f"version {version} of {name} is listed with {number}")
        if listed:
            self._load(store, name, self.random.choice(sorted(listed)))

    def _delete(self, store: Any, name: str, version: int | None) -> None:
        import skyward as sky

        versions = {each for each in self.returned if each[0] == name}
        if version is not None:
            versions = {(name, version)}
        there = versions - self.withdrawn
        self.withdrawn |= versions
        others = self.deleting[name]
        self.deletions[name] += 1
        self.deleting[name] += 1
        before = self.deletions[name]
        try:
            store.delete(name, version)
        except sky.errors.ModelNotFoundError:
            if there and not others and self.deletions[name] == before:
                raise
        except sky.errors.StoreError as problem:
            if "disk" not in self.kinds:
                raise
            self._expected(problem, "a deletion")
        else:
            self.deleted |= versions
        self.deleting[name] -= 1

    def _there(self, name: str) -> list[Version]:
        """The versions that nobody has begun to delete."""
        return [each for each in self.returned if each[0] == name and each not in self.withdrawn]

    # The end.

    def _check_objects(self) -> None:
        """What one user has stored is not stored again, also if the save was interrupted."""
        if self.users > 1 or "clock" in self.kinds:
            return
        now = self.kernel.now + self.kernel.wall
        recent = [
            each.name[:32]
            for each in self.folder.glob("objects/*/*")
            if each.stat().st_mtime > now - 12 * 3600.0
        ]
        if len(set(recent)) < len(recent):
            self._says(f"stored twice: {sorted(recent)}")

    def _reader(self, process: Process) -> int:
        """Nobody uses the store any more: all that was saved is there, and nothing else."""
        store = self._store()
        collects = "collect" in process.argv
        if collects:
            store.gc()
        listed = {(name, each) for name, numbers in store.numbers().items() for each in numbers}
        for version in [*self.returned, *listed]:
            if version in self.deleted and version in listed:
                self._says(f"{version} was deleted, and is listed")
            if version not in self.withdrawn and version not in listed:
                self._says(f"{version} is lost")
        for name, version in sorted(listed):
            found = store.load_model(name, version=version)
            number = self._check_value(found, name)
            if self.returned.get((name, version), number) != number:
                self._says(f"version {version} of {name} has the value of {number}")
            if number in self.refused:
                self._says(f"nothing of {number} was published, and it is version {version}")
        if collects:
            self._check_folder(store, sorted(listed))
        return 0

    def _check_folder(self, store: Any, listed: list[Version]) -> None:
        named = {
            each.name
            for name, version in listed
            for each in store._catalog.read(name, version).objects
        }
        left = {each.name for each in self.folder.glob("objects/*/*")} - named
        left |= {str(each) for part in ("tmp", "saves") for each in self.folder.glob(f"{part}/*")}
        if left:
            self._says(f"left behind: {', '.join(sorted(left))}")
        if freed := store.gc():
            self._says(f"another collection has freed {freed} bytes")
