"""The loader: a DataLoader on a device's node, whose batches are sky tensors.

The data set and the processes that read it live on the node. The client makes *room* on the device,
which a process of the node opens as memory. That process puts each batch there and tells the client
where it is. The client copies it to tensors of its own on the device, with operations like any
other, the last of which writes the number of the batch into the room: from then on the node uses
the place again. So the client sees no byte of a batch, and waits for no answer.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import mmap
import os
import queue
import random
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from skyward import functions
from skyward.classes import Instance, InstanceFunction, Making, RemoteClass
from skyward.closing import Closing
from skyward.device.core import core, index_of
from skyward.errors import ConfigurationError
from skyward.objects import encoding, references
from skyward.objects.exceptions import PortableException, add_note
from skyward.objects.handles import Handle
from skyward.objects.kept import ResultBook, Span
from skyward.objects.memory import ALIGNMENT, rounded_up

if TYPE_CHECKING:
    import torch

ROOM_MOST = 64 << 20
"""The room for batches has up to this many bytes, or that of four batches if they are larger."""
BATCHES_MOST = 64
"""How many batches are ready at most, and how many are told of in one message."""
SLAB_PART, SLAB_MOST = 256 << 20, 2 << 30
"""How many bytes of batches a worker, and all of them, have ready at most without further cost."""
STATES_MOST = 2048
"""More batches than can be on their way: of older ones, no state has to be kept."""
ENDED_MOST = 4
"""Of how many epochs that have ended the states are kept, for clients that are behind."""
DRAWN_AHEAD = 16
"""How many batches a sampler of the user's is asked for beyond those that workers prefetch."""
GATHERED, GATHER_SECONDS = 8, 0.02
"""A client that has so many batches is told of others so many at a time, or after so long: each
message takes time of its interpreter."""
POLL_SECONDS = 0.001
"""How often the node looks whether a place is free: batches are ready meanwhile."""
LOOK_SECONDS = 0.2
"""How often a thread that waits for a batch looks whether it is still wanted."""
FOREVER = 1e9
"""The timeout of an epoch, which lasts as long as the user's loop."""

Random = tuple[Any, Any, Any]
"""The states of the generators of torch, random and numpy that data sets use."""


def loader(
    dataset: Any,
    *,
    device: str | torch.device,
    batch_size: int | None = 1,
    shuffle: bool | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: str | None = None,
    generator: torch.Generator | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    in_order: bool = True,
    pin_memory: bool = False,
) -> Loader:
    """A DataLoader on the node of a device, whose batches are tensors of the device.

    The data set is sent once; a function that takes no arguments is called on the node, and
    returns the data set. The rest is as in `torch.utils.data.DataLoader`; order and random numbers
    are those of the same one here. `pin_memory` changes nothing: what goes to a GPU always does so
    from pinned memory.

    >>> for x, y in sky.loader(images, device=device, batch_size=64, shuffle=True, num_workers=4):
    ...     train(x, y)
    """
    return Loader(
        dataset,
        index_of(device, "loader"),
        batch_size=batch_size,
        shuffle=shuffle,
        sampler=sampler,
        batch_sampler=batch_sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        drop_last=drop_last,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        generator=generator,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        in_order=in_order,
    )


class Loader(Closing):
    """Iterates over batches that are made on a node; made by `loader`.

    `state_dict` and `load_state_dict` resume an epoch in its middle. A `with` block closes it, as
    does dropping it.
    """

    def __init__(self, dataset: Any, index: int, **options: Any) -> None:
        import torch

        self.device = torch.device("sky", index)
        source, called = _source(dataset)
        here = dataset.value if isinstance(dataset, Handle) else dataset
        if not called:
            # First: a mistake among the arguments need not go to the node to be found.
            self._plan: Any = _plan(here, options)
        made: Any = None
        for target in reversed(functions.active):
            place = getattr(target, "make_on_device", None)
            making = Making(_REMOTE, (source, called, _for_node(options)), {})
            made = None if place is None else place(making, index)
            if made is not None:
                break
        if made is None:
            raise ConfigurationError(
                f"loader(device={self.device}): no open pool has this device; give a device of "
                "compute.device(), inside the `with` block of its pool"
            )
        self._data: Instance = made
        if called:
            self._plan = _plan(_stand_in(*made.facts()), options)
        self._room: BatchRoom | None = None
        self._seed: int | None = None
        """That of the workers, if they are persistent and have begun."""
        self._resumed: dict[str, Any] | None = None
        self._last: Callable[[], Epoch | None] = _nothing
        """The last epoch, as long as the user's loop has it."""
        self._left = False
        """Whether that epoch was left in its middle."""

    def __iter__(self) -> Epoch:
        """Begin an epoch, or go on with the one of `load_state_dict`."""
        resumed, self._resumed = self._resumed, None
        self._left = False
        epoch = Epoch(self, resumed)
        self._last = weakref.ref(epoch)
        return epoch

    def __len__(self) -> int:
        return len(self._plan)

    def __getattr__(self, name: str) -> Any:
        """The arguments: `dataset`, `batch_size`, `sampler`, `num_workers` and so on."""
        if name.startswith("_") or name not in vars(self._plan):
            raise AttributeError(f"a sky.loader has no {name!r}")
        return getattr(self._plan, name)

    def state_dict(self) -> dict[str, Any]:
        """Where the last epoch is: how many batches were taken, and how the next ones come about.

        It asks the node. Between epochs, it says only that the next epoch begins.
        """
        epoch = self._last()
        if epoch is not None and not epoch.ended:
            return epoch.state()
        if self._left and self._resumed is None:
            raise ConfigurationError(
                "state_dict(): the loop over this loader was left in the middle of an epoch, which "
                "is gone with its workers; call state_dict() inside the loop"
            )
        return dict(self._resumed or {"batches": 0})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on where a state was taken, with the batches that were to come."""
        if not isinstance(state, dict) or not isinstance(state.get("batches"), int):
            raise ConfigurationError(
                f"load_state_dict({type(state).__name__}): give what state_dict() of a sky.loader "
                "has returned"
            )
        workers = state.get("workers")
        if workers is not None and len(workers) != max(1, self.num_workers):
            raise ConfigurationError(
                f"load_state_dict: the state is that of a loader with {state['num_workers']} "
                f"workers, and this one has {self.num_workers}; give num_workers="
                f"{state['num_workers']}"
            )
        self._resumed = dict(state) if state["batches"] else None

    def close(self) -> None:
        """End the epoch and the processes on the node; iterating again raises."""
        if (epoch := self._last()) is not None:
            epoch.close()
        self._room = None
        self._data.close()

    def __repr__(self) -> str:
        return f"<sky.loader of {type(self.dataset).__name__} on {self.device}>"


def _source(dataset: Any) -> tuple[Any, bool]:
    """What is sent, and whether it is called on the node."""
    if isinstance(dataset, Handle):
        return dataset, False
    kind = type(dataset)
    if hasattr(kind, "__getitem__") or hasattr(kind, "__iter__"):
        return _whole(dataset), False
    if callable(dataset):
        body = dataset.body if isinstance(dataset, functions.Function) else dataset
        return body, True
    raise ConfigurationError(
        f"loader({dataset!r}): this is no data set; give one with __getitem__ or __iter__, or a "
        "function without arguments that makes one on the node"
    )


def _whole(dataset: Any) -> Any:
    """The data set with all that it needs: one of Hugging Face's may refer to files here."""
    tables = sys.modules.get("datasets.table")
    parts = {name: getattr(dataset, name, None) for name in ("_data", "_indices")}
    if tables is None or not isinstance(parts["_data"], tables.Table):
        return dataset
    whole = copy.copy(dataset)
    for name, part in parts.items():
        if part is not None and not isinstance(part, tables.InMemoryTable):
            setattr(whole, name, tables.InMemoryTable(part.table))
    return whole


def _plan(dataset: Any, options: dict[str, Any]) -> Any:
    """The same DataLoader here: it checks arguments, makes samplers, and has a length."""
    import warnings

    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        # The processors that count are the node's.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return DataLoader(dataset, **options)


def _for_node(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the node needs; order is the client's."""
    here = ("shuffle", "sampler", "batch_sampler", "generator")
    found = {name: value for name, value in options.items() if name not in here}
    if options["batch_sampler"] is not None:
        found["batch_size"] = 1
    return found


def _stand_in(is_iterable: bool, length: int | None, name: str) -> Any:
    """What the client has of a data set that was made on the node."""
    from torch.utils.data import Dataset, IterableDataset

    base: Any = IterableDataset if is_iterable else Dataset
    members: dict[str, Any] = {"__repr__": lambda self: f"<{name} on a node>"}
    if length is not None:
        members["__len__"] = lambda self: length
    return type(name, (base,), members)()


# Random numbers.


def _random_state() -> Random:
    import torch

    own, numpy = torch.get_rng_state(), sys.modules.get("numpy")
    if numpy is None:
        return bytes(own.tolist()), random.getstate(), None
    # Plain values: they are compared, and a checkpoint may have them.
    name, key, *rest = numpy.random.get_state()
    return own.numpy().tobytes(), random.getstate(), (str(name), key.tolist(), *rest)


def _set_random_state(state: Random) -> None:
    import torch

    torch.set_rng_state(_generator_state(state[0]))
    random.setstate(state[1])
    if state[2] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state[2])


def _generator_state(state: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _copied(sampler: Any, generator: torch.Generator) -> Any:
    """A sampler of PyTorch's that gives the same indices elsewhere; None of any other.

    `generator` has the state of the one that the sampler draws from.
    """
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    kind = type(sampler)
    if kind is BatchSampler:
        inner = _copied(sampler.sampler, generator)
        if inner is None:
            return None
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if kind is SequentialSampler:
        return SequentialSampler(range(len(sampler)))
    if kind is RandomSampler:
        if sampler.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
            generator = torch.Generator().manual_seed(seed)
        length = len(sampler.data_source)
        return RandomSampler(range(length), sampler.replacement, sampler._num_samples, generator)
    return None


def _drawn_from(sampler: Any) -> torch.Generator:
    """The generator that a sampler draws from."""
    import torch

    inner = getattr(sampler, "sampler", None)
    found = getattr(sampler, "generator", None) or getattr(inner, "generator", None)
    return found if isinstance(found, torch.Generator) else torch.default_generator


# The room for batches.


def _layout(spans: Iterable[Span]) -> tuple[list[int], int]:
    """Where each storage of a batch begins, and the bytes of all."""
    ends = list(
        itertools.accumulate((rounded_up(last - first) for first, last in spans), initial=0)
    )
    return ends[:-1], ends[-1]


class BatchRoom:
    """Memory of a device for batches, as the client has it: a number, and the batches behind it."""

    def __init__(self, device: torch.device, need: int) -> None:
        """`need` is the size of a batch. Waits for all earlier operations of the device."""
        import torch

        size = max(4 * need, min(BATCHES_MOST * need, ROOM_MOST))
        self.serial = core().serial(device.index)
        self._memory = torch.empty(ALIGNMENT + size, dtype=torch.uint8, device=device)
        self._taken = self._memory[:8].view(torch.int64).zero_()
        self.number = 0
        """Of the batch that was taken last."""
        pointer = self._memory.untyped_storage().data_ptr()
        self.description = core().export(device.index, [pointer])[0]

    def take(self, start: int, size: int) -> torch.UntypedStorage:
        """A copy of a part."""
        return self._memory[ALIGNMENT + start : ALIGNMENT + start + size].clone().untyped_storage()

    def taken(self, number: int) -> None:
        """Let the node use the place of a batch again, when the device has come so far."""
        self.number = number
        self._taken.fill_(number)


@dataclass(slots=True)
class Placed:
    """The tensors of a batch whose bytes are in one place."""

    device: torch.device
    take: Callable[[int, int], torch.UntypedStorage] | None
    """Gives a copy of a part of the memory: its first byte, and its size."""
    start: int
    spans: list[Span]
    places: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = _layout(self.spans)[0]

    def storage(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A storage of its own, and the first byte of the original that it holds."""
        import torch

        first, last = self.spans[index]
        if last == first or self.take is None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).untyped_storage(), 0
        return self.take(self.start + self.places[index], last - first), first

    def argument(self, description: bytes) -> torch.UntypedStorage:
        """Refuse: no batch refers to tensors of the client's."""
        raise AssertionError(description)


class Epoch(Closing):
    """Iterates over the batches of one epoch."""

    def __init__(self, loader: Loader, resumed: dict[str, Any] | None) -> None:
        import torch

        plan = loader._plan
        self._loader, self._plan, self._resumed = loader, plan, resumed
        self._workers: int = plan.num_workers
        self._batches = 0 if resumed is None else resumed["batches"]
        """How many were taken."""
        self.ended = self._complete = False
        self._stream: Any = None
        self._ready: deque[Any] = deque()
        self._known: list[tuple[bytes, list[Span]]] = []
        """The kinds of batches that have come: their pickles, without tensors' bytes."""
        self._room, loader._room = loader._room, None
        self._orders: queue.SimpleQueue[Any] | None = None
        self._key = uuid.uuid4().hex
        is_iterable = isinstance(plan.dataset, torch.utils.data.IterableDataset)
        self._sampler: Iterator[Any] | None = None if is_iterable else iter(plan._index_sampler)
        if resumed is not None:
            self._seed = resumed["seed"]
        elif loader._seed is not None:
            self._seed = loader._seed
        else:
            self._seed = int(
                torch.empty((), dtype=torch.int64).random_(generator=plan.generator).item()
            )
        if plan.persistent_workers:
            loader._seed = self._seed
        if self._workers:
            # As a DataLoader's own: with workers they begin now, and without with the first batch.
            self._begin()

    def _begin(self) -> None:
        import torch

        loader, plan, resumed = self._loader, self._plan, self._resumed
        order = drawn = None
        if self._sampler is not None:
            source = _drawn_from(plan._index_sampler)
            if resumed is None:
                drawn = bytes(source.get_state().tolist())
                order = self._draw(source)
            else:
                drawn, before = resumed["drawn"], source.get_state()
                source.set_state(_generator_state(drawn))
                order = self._draw(source)
                if source is torch.default_generator:
                    source.set_state(before)
        self._drawn = drawn
        self._random = None if self._workers else _random_state()
        self._first = self._random if resumed is None else resumed["random"]
        start = {
            "seed": self._seed,
            "batches": self._batches,
            "order": order,
            "workers": None if resumed is None else resumed["workers"],
            "random": self._first,
            "room": None,
            "number": 0,
        }
        room = self._room
        if room is not None and room.serial != core().serial(loader.device.index):
            room = self._room = None  # the device was lost, and is another one
        if room is not None:
            start["room"], start["number"] = room.description, room.number
        orders = None if self._orders is None else iter(self._orders.get, None)
        self._stream = self._call("epoch", self._key, start, orders)

    def _draw(self, source: torch.Generator) -> Any:
        """Ask the sampler as a DataLoader does, and return what the node draws by itself."""
        import torch

        order = _copied(self._plan._index_sampler, torch.Generator().set_state(source.get_state()))
        assert self._sampler is not None
        for _ in itertools.islice(self._sampler, self._batches):
            pass
        ahead = self._workers * (self._plan.prefetch_factor or 0)
        if order is None:
            self._orders = queue.SimpleQueue()
            ahead += DRAWN_AHEAD
        for _ in range(max(1, ahead)):
            self._draw_one()
        return order

    def _draw_one(self) -> None:
        index = _END if self._sampler is None else next(self._sampler, _END)
        if self._orders is not None:
            self._orders.put(None if index is _END else [index])

    def _call(self, method: str, *args: Any) -> Any:
        """Call the data set on its node: beside all other calls of it, and of its worker."""
        residence = self._loader._data._residence
        # The objects of an epoch have no tensor, unless the node cannot open the device's memory.
        kept_on = self._loader.device if method == "epoch" else None
        function = InstanceFunction(residence, method, getattr(Data, method), kept_on)
        function.apart, function.timeout = f"{residence.key} {uuid.uuid4().hex}", FOREVER
        return function.seat.run(function(*args))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        if self._stream is None:
            self._begin()
        try:
            while True:
                while not self._ready:
                    self._ready.extend(next(self._stream))
                kind, *parts = self._ready.popleft()
                if kind == "need":
                    self._widen(*parts)
                elif kind == "end":
                    self._finish(*parts)
                    raise StopIteration
                else:
                    break
        except BaseException:
            self.close()
            raise
        batch = parts[0] if kind == "whole" else self._taken(*parts)
        self._batches += 1
        self._draw_one()
        return batch

    def _taken(
        self, known: int, new: Any, number: int, start: int, buffers: list[bytes], storages: Any
    ) -> Any:
        """A batch that is in the room, as tensors of the device."""
        if new is not None and known >= 0:
            self._known.append(new)
        pickle, spans = self._known[known] if known >= 0 else new
        take = None if self._room is None else self._room.take
        kept = Placed(self._loader.device, take, start, spans)
        batch = encoding.decode(pickle, [memoryview(each) for each in buffers], storages, kept)
        if self._room is not None:
            self._room.taken(number)
        return batch

    def _widen(self, need: int) -> None:
        """Make room for batches of that size, and tell the node."""
        self._room = BatchRoom(self._loader.device, need)
        self._call("widen", self._key, self._room.description)

    def _finish(self, random_state: Random | None) -> None:
        """Take what the data set has drawn, if nobody has drawn here meanwhile."""
        if random_state is not None and _random_state() == self._random:
            _set_random_state(random_state)
        self._loader._room, self._room = self._room, None
        self._complete = True

    def state(self) -> dict[str, Any]:
        """What `Loader.state_dict` returns in the middle of the epoch."""
        if self._stream is None:
            return {"batches": 0} if self._resumed is None else dict(self._resumed)
        return {
            "batches": self._batches,
            "seed": self._seed,
            "drawn": self._drawn,
            "random": self._first,
            "num_workers": self._workers,
            "workers": self._call("states", self._key, self._batches),
        }

    def close(self) -> None:
        """End the epoch; its workers end, too, unless they are persistent."""
        if not self.ended:
            self._loader._left = not self._complete
        self.ended = True
        self._ready.clear()
        self._room = None
        if self._orders is not None:
            self._orders.put(None)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def __del__(self) -> None:
        if "_stream" in vars(self):
            self.close()


_END = object()


def _nothing() -> None:
    """No epoch."""


# On the node.


class Data:
    """A data set on the device's node, and the epochs over it that are under way."""

    def __init__(self, source: Any, called: bool, options: dict[str, Any]) -> None:
        self.dataset = source() if called else source
        self.options = options
        self._feeds: dict[str, Feed] = {}
        """The epochs by their keys, with some that have ended: the client may be behind."""
        self._persistent: Any = None
        """The DataLoader whose workers stay from epoch to epoch, and its order."""
        self._closed = False
        self._ending = threading.Lock()

    def facts(self) -> tuple[bool, int | None, str]:
        """Whether the data set is an iterable one, its length if it has one, and its class."""
        from torch.utils.data import IterableDataset

        try:
            length = len(self.dataset)
        except TypeError:
            length = None
        return isinstance(self.dataset, IterableDataset), length, type(self.dataset).__name__

    def epoch(
        self, key: str, start: dict[str, Any], orders: Iterator[Any] | None
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The batches of one epoch: where each is in the room, some at a time."""
        if self.options["persistent_workers"]:
            for before in list(self._feeds.values()):
                # It has the workers, until the batch that it waits for is there.
                before.stop()
                before.thread.join()
        ended = [each for each, feed in list(self._feeds.items()) if not feed.thread.is_alive()]
        for each in ended[:-ENDED_MOST]:
            self._feeds.pop(each, None)
        feed = self._feeds[key] = Feed(self, start, orders)
        try:
            yield from feed
        finally:
            feed.stop()

    def widen(self, key: str, description: bytes) -> None:
        """Give an epoch other room."""
        self._feeds[key].widen(description, 0)

    def states(self, key: str, batches: int) -> list[Any]:
        """What the workers of an epoch had left behind after so many batches."""
        return self._feeds[key].states(batches)

    def loader(self, order: Any, worker: WorkerSide) -> Any:
        """The DataLoader of an epoch; the one before if its workers stay."""
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        if worker.resumes:
            # Workers that are there already cannot be set back.
            self._persistent = None
        if self._persistent is not None:
            loader, former, worker.slab = self._persistent
            former.source = order
            return loader
        options = {**self.options, "worker_init_fn": worker, "generator": torch.Generator()}
        options["multiprocessing_context"] = options["multiprocessing_context"] or "fork"
        if not options["num_workers"]:
            # The generators of this process belong to tasks: also this data set gets its own.
            options.update(num_workers=1, prefetch_factor=2)
        given = _Order(order)
        if not isinstance(self.dataset, IterableDataset):
            single = options.pop("batch_size") is None
            del options["drop_last"]
            if single:
                options.update(batch_size=None, sampler=given)
            else:
                options.update(batch_sampler=given)
        if options["multiprocessing_context"] == "fork":
            # One more than is fetched ahead: the parent copies a batch after it has asked anew.
            ahead = (options["prefetch_factor"] or 2) + 1
            with contextlib.suppress(OSError):
                worker.slab = Slab(options["num_workers"], ahead)
        loader = DataLoader(self.dataset, **options)
        if options["persistent_workers"]:
            self._persistent = loader, given, worker.slab
        return loader

    def end_workers(self, iterator: Any) -> None:
        """End the workers of an epoch, unless they stay."""
        # Not left to the garbage collector: a traceback may have the iterator for long.
        with self._ending:
            if self._closed or not self.options["persistent_workers"]:
                iterator._shutdown_workers()

    def close(self) -> None:
        """End all epochs, and the workers."""
        self._closed = True
        for feed in list(self._feeds.values()):
            feed.stop()
        loader = self._persistent and self._persistent[0]
        if loader is not None and loader._iterator is not None:
            self.end_workers(loader._iterator)

    def __del__(self) -> None:
        if "_ending" in vars(self):
            self.close()


class _Order:
    """A sampler that is asked for the order of one epoch after the other."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class WorkerSide:
    """What a worker of a DataLoader does besides: it begins as it should, and encodes batches.

    It is the `worker_init_fn`, and then fetches in place of PyTorch's own fetcher.
    """

    def __init__(self, start: dict[str, Any], options: dict[str, Any]) -> None:
        self._seed, self._count = start["seed"], options["num_workers"]
        self._init = options["worker_init_fn"]
        self._random = start["random"]
        entries = start["workers"]
        self.resumes = entries is not None
        self._entries = entries or []
        self._turn = next((n for n, each in enumerate(self._entries) if each["next"]), 0)
        self.slab: Slab | None = None
        self._made = 0

    def __call__(self, number: int) -> None:
        """Begin as the worker of that number."""
        import torch
        from torch.utils.data._utils import worker as own

        # What PyTorch has of it is not for others, and has no types.
        worker, kinds = cast(Any, own), cast(Any, torch.utils.data)._DatasetKind
        self._dataset, self._fetcher = worker._worker_info.dataset, cast(Any, None)
        self._problem: Exception | None = None
        self._place = number
        # After an epoch is resumed, the first batch is that of the worker whose turn it was.
        self._number = (number + self._turn) % max(1, self._count)
        entry = self._entries[self._number] if self._entries else {}
        if self._count:
            seed = self._seed + self._number
            random.seed(seed)
            torch.manual_seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(worker._generate_state(self._seed, self._number))
            worker._worker_info = worker.WorkerInfo(
                id=self._number, num_workers=self._count, seed=seed, dataset=self._dataset
            )
        else:
            worker._worker_info = None
            _set_random_state(self._random)
        try:
            if self._init is not None and self._count:
                self._init(self._number)
            self._sent = _random_state()
            state, self._again = entry.get("dataset"), 0
            if state is not None:
                self._dataset.load_state_dict(state)
            elif isinstance(self._dataset, torch.utils.data.IterableDataset):
                self._again = entry.get("batches", 0)
            if entry.get("random") is not None and not self._again:
                _set_random_state(entry["random"])
        except Exception as problem:
            self._problem = problem
        made = kinds.create_fetcher

        def create_fetcher(kind: Any, dataset: Any, *how: Any) -> Any:
            if dataset is not self._dataset:
                return made(kind, dataset, *how)
            try:
                self._fetcher = None if self._problem else made(kind, dataset, *how)
            except Exception as problem:
                self._problem = problem
            return self

        kinds.create_fetcher = create_fetcher

    def fetch(self, index: Any) -> tuple[Any, ...]:
        """A batch as its pickle and its bytes, and what has changed in this worker; or a failure.

        Nothing in it is of a class of the user's: the process that gets it may not find the class.
        """
        from torch.utils.data import IterableDataset

        is_iterable = isinstance(self._dataset, IterableDataset)
        try:
            if self._problem is not None:
                raise self._problem
            while self._again:
                self._again -= 1
                self._fetcher.fetch(index)
            return self._encoded(self._fetcher.fetch(index), is_iterable)
        except Exception as problem:
            if is_iterable and isinstance(problem, StopIteration):
                raise
            where = f"worker {self._number}" if self._count else "the data set"
            lines = "".join(traceback.format_exception(problem)).rstrip()
            add_note(problem, f"raised in {where}:\n{lines}")
            return False, _as_bytes(problem)

    def _encoded(self, batch: Any, is_iterable: bool) -> tuple[Any, ...]:
        import torch

        book = ResultBook([])
        encoded = encoding.encode(batch, what="a batch", keep=book)
        spans = book.spans
        parts = [
            torch.empty(0, dtype=torch.uint8, device=ref.storage.device).set_(ref.storage)[a:b]
            for ref, (a, b) in zip(book.kept, spans, strict=True)
        ]
        self._made += 1
        at = None
        if self.slab is not None and (layout := _layout(spans))[1]:
            at = self.slab.put(self._place, self._made, layout[1], parts, layout[0])
        now, state = _random_state(), None
        changed, self._sent = (None if now == self._sent else now), now
        if is_iterable and hasattr(self._dataset, "load_state_dict"):
            state = self._dataset.state_dict()
        buffers = [bytes(each) for each in encoded.buffers]
        note = self._number, changed, state
        there = self._place, self._made, at, parts if at is None else []
        return True, b"".join(encoded.pieces), spans, there, buffers, encoded.storages, note


def _as_bytes(problem: Exception) -> bytes:
    """An exception for another process."""
    portable = PortableException.of(problem, {})
    try:
        encoded = encoding.encode(portable, own_modules=True)
        if not encoded.buffers:
            return b"".join(encoded.pieces)
    except Exception:
        pass
    return _as_bytes(RuntimeError(f"{type(problem).__name__}: {problem}"))


class Ring:
    """Memory that two processes share: places in it are used one after the other.

    The room on the device is one, and the part of a slab that a worker has.
    """

    def __init__(self, whole: torch.Tensor, number: int = 0) -> None:
        """`number` is that of the batch that the other process has taken last."""
        import torch

        self._taken, self._memory = whole[:8].view(torch.int64), whole[ALIGNMENT:]
        self.size = self.most = self._memory.numel()
        self._on_gpu = whole.is_cuda
        self._stream: Any = torch.Stream(whole.device) if self._on_gpu else None
        # The device may still have to copy batches of the epoch before.
        self._busy: deque[tuple[int, int]] = deque([(number, 0)] if number else [])
        """The number and the first byte of each batch that is there."""
        self._at = self.size if number else 0
        self.taken = 0
        """The number of a batch that was taken, by now or a while ago."""

    def _used(self) -> contextlib.AbstractContextManager[Any]:
        return self._stream if self._on_gpu else contextlib.nullcontext()

    def claim(self, number: int, size: int) -> int | None:
        """A place for a batch, by its first byte; None if there is none yet."""
        start = self._free(size)
        # Now and then also if there is room: a read takes a GPU some microseconds.
        if start is None or not number % 4:
            with self._used():
                self.taken = int(self._taken.item())
            while self._busy and self._busy[0][0] <= self.taken:
                self._busy.popleft()
            start = self._free(size)
        if start is not None:
            self._busy.append((number, start))
            self._at = start + size
        return start

    def _free(self, size: int) -> int | None:
        if not self._busy:
            return 0
        oldest = self._busy[0][1]
        if self._at > oldest:
            if self.size - self._at >= size:
                return self._at
            return 0 if oldest > size else None
        return self._at if oldest - self._at > size else None

    def put(
        self, start: int, parts: list[torch.Tensor], places: list[int], *, pinned: bool = False
    ) -> None:
        """Copy a batch to its place; it is there when this returns.

        `pinned` says that a GPU can read the parts as they are.
        """
        if self._on_gpu and not pinned:
            parts = [part.pin_memory() if part.is_cpu else part for part in parts]
        with self._used():
            for part, place in zip(parts, places, strict=True):
                target = self._memory[start + place : start + place + part.numel()]
                target.copy_(part, non_blocking=True)
        if self._on_gpu:
            self._stream.synchronize()

    @property
    def on_gpu(self) -> torch.device | None:
        """The GPU that the memory is on; None if it is the host's."""
        return self._memory.device if self._on_gpu else None

    def parts(self, start: int, places: list[int], spans: list[Span]) -> list[torch.Tensor]:
        """The storages of a batch, where they are."""
        return [
            self._memory[start + place : start + place + last - first]
            for place, (first, last) in zip(places, spans, strict=True)
        ]

    def release(self, number: int) -> None:
        """Let the other process use the place of a batch again."""
        self._taken.fill_(number)


class Slab:
    """Memory that the workers of a DataLoader share with their parent, a part for each.

    Every batch would else come in memory of its own, whose pages the parent has to map: for 3 MB,
    that takes longer than a step. A page takes no memory before it is used.
    """

    def __init__(self, workers: int, ahead: int) -> None:
        """`ahead` is how many batches of one worker are on their way at most."""
        import torch

        self._owner, self._pinned = os.getpid(), [0] * workers
        """How much of each part a GPU reads by itself; -1 if it cannot."""
        stride = rounded_up(min(SLAB_PART, SLAB_MOST // workers), mmap.PAGESIZE)
        whole = torch.frombuffer(mmap.mmap(-1, workers * stride), dtype=torch.uint8)
        self.rings = [Ring(whole[at : at + stride]) for at in range(0, len(whole), stride)]
        for ring in self.rings:
            ring.size = 0
        self.ahead = ahead
        self._device: torch.device | None = None

    def put(
        self, worker: int, number: int, size: int, parts: list[torch.Tensor], places: list[int]
    ) -> int | None:
        """Copy a batch of a worker to its part; where it is there, or None if there is no room."""
        ring = self.rings[worker]
        ring.size = min(ring.most, max(ring.size, (self.ahead + 1) * size))
        start = ring.claim(number, size) if 2 * size <= ring.size else None
        if start is not None:
            ring.put(start, parts, places)
        return start

    def pin(self, worker: int, end: int, device: torch.device) -> bool:
        """Have a GPU read a worker's part by itself, up to there; whether it can."""
        import torch

        if self._pinned[worker] >= end:
            return True
        if self._pinned[worker] < 0:
            return False
        ring, driver = self.rings[worker], cast(Any, torch.cuda.cudart)()
        pointer, self._device = ring._memory.data_ptr() - ALIGNMENT, device
        size = min(rounded_up(ALIGNMENT + 2 * end, mmap.PAGESIZE), ALIGNMENT + ring.most)
        with torch.cuda.device(device):
            if self._pinned[worker]:
                driver.cudaHostUnregister(pointer)
            is_pinned = not int(driver.cudaHostRegister(pointer, size, 0))
        self._pinned[worker] = size - ALIGNMENT if is_pinned else -1
        return is_pinned

    def __del__(self) -> None:
        # A worker has a copy of this object, and nothing to do with the GPU.
        if os.getpid() == self._owner and any(size > 0 for size in self._pinned):
            import torch

            with torch.cuda.device(self._device):
                for ring, size in zip(self.rings, self._pinned, strict=True):
                    if size > 0:
                        pointer = ring._memory.data_ptr() - ALIGNMENT
                        cast(Any, torch.cuda.cudart)().cudaHostUnregister(pointer)


class Feed:
    """Makes the batches of one epoch, on a thread of its own, as far ahead as there is room."""

    def __init__(self, data: Data, start: dict[str, Any], orders: Any) -> None:
        self._data: Data | None = data
        """None when the thread has begun: an epoch that has ended must not hold the data set."""
        self._start, self._orders = start, orders
        self._ready: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._rings: queue.SimpleQueue[Ring | None] = queue.SimpleQueue()
        self._number = self._taken = start["number"]
        """Of the batch that was made last, and of one that the client has taken."""
        self._kinds: dict[Any, int] = {}
        workers = max(1, data.options["num_workers"])
        fresh = {"batches": 0, "random": None, "dataset": None, "next": False}
        self._entries = start["workers"] or [dict(fresh) for _ in range(workers)]
        if self._entries[0]["random"] is None and start["random"] is not None:
            self._entries[0]["random"] = start["random"]
        self._notes: deque[tuple[int, Any, Any]] = deque()
        self._noted = start["batches"]
        """How many batches the entries have; the notes are of those behind."""
        self.thread = threading.Thread(target=self._run, name="skyward-loader", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[list[tuple[Any, ...]]]:
        while True:
            with self._changed:
                while not self._ready:
                    # An interrupt is raised when this looks.
                    self._changed.wait(LOOK_SECONDS)
                self._changed.wait_for(self._is_enough, GATHER_SECONDS)
                count = min(BATCHES_MOST, len(self._ready))
                ready = [self._ready.popleft() for _ in range(count)]
                self._changed.notify_all()
            if ready[-1][0] == "failed":
                problem = ready.pop()[1]
                if ready:
                    yield ready
                raise problem
            if len(ready) > 1 and any(each[0] == "whole" for each in ready):
                for each in ready:
                    yield [each]
            else:
                yield ready
            if ready[-1][0] == "end":
                return

    def _is_enough(self) -> bool:
        """Whether to tell the client what is ready: not if it has some, and more is on its way."""
        ready, taken = len(self._ready), self._taken
        # What the client has not taken, less what it was not told of.
        told = self._number - taken - ready
        return ready >= GATHERED or told < GATHERED or self._ready[-1][0] != "at"

    def stop(self) -> None:
        """Make no more batches."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._orders is not None:
            self._orders.finish(None)

    def widen(self, description: bytes, number: int) -> None:
        """Use other room from now on."""
        ring = None
        if description:
            with contextlib.suppress(references.CannotOpenError):
                ring = Ring(references.flat(description), number)
        self._rings.put(ring)

    def states(self, batches: int) -> list[Any]:
        """What each worker had left behind after so many batches."""
        with self._changed:
            entries = [dict(each) for each in self._entries]
            for note in itertools.islice(self._notes, batches - self._noted):
                _apply(entries, note)
        return entries

    def _run(self) -> None:
        data, self._data = self._data, None
        assert data is not None
        try:
            worker = WorkerSide(self._start, data.options)
            iterator = iter(data.loader(self._order(), worker))
            try:
                self._make(iterator, worker.slab, alone=not data.options["num_workers"])
            finally:
                data.end_workers(iterator)
        except BaseException as problem:
            # Whatever it is, the client must be told.
            self._tell("failed", problem)

    def _order(self) -> Any:
        """The indices of the batches; None of an iterable data set."""
        if self._orders is not None:
            return (index for (index,) in self._orders)
        if (order := self._start["order"]) is not None:
            return itertools.islice(iter(order), self._start["batches"], None)
        return None

    def _make(self, iterator: Iterator[Any], slab: Slab | None, *, alone: bool) -> None:
        """`alone` says that there are no workers for the user."""
        start = self._start
        if start["room"] is not None:
            self.widen(start["room"], start["number"])
            ring = self._rings.get()
        else:
            ring = None
        whole = False
        for made in iterator:
            if not made[0]:
                raise encoding.decode(made[1]).rebuild()
            _, pickle, spans, (worker, its_number, its_place, parts), buffers, storages, note = made
            places, size = _layout(spans)
            if its_place is not None and slab is not None:
                parts = slab.rings[worker].parts(its_place, places, spans)
            if size and not whole and (ring is None or 2 * size > ring.size):
                self._tell("need", size)
                ring = self._next_ring()
                whole = ring is None
            if self._stopped:
                return
            self._note(note, ring)
            if whole:
                batch = _on_host(pickle, spans, parts, buffers, storages)
                self._tell("whole", batch)
                if slab is not None:
                    slab.rings[worker].release(its_number)
                continue
            self._number += 1
            at: int | None = 0
            if ring is not None and size:
                at = self._claimed(ring, size)
                if at is None:
                    return
                self._taken = max(self._taken, ring.taken)
                gpu, pinned = ring.on_gpu, False
                if gpu is not None and slab is not None and its_place is not None:
                    pinned = slab.pin(worker, its_place + size, gpu)
                ring.put(at, parts, places, pinned=pinned)
            known, new = self._kind(pickle, spans)
            self._tell("at", known, new, self._number, at, buffers, storages)
            if slab is not None:
                slab.rings[worker].release(its_number)
        self._tell("end", self.states(sys.maxsize)[0]["random"] if alone else None)

    def _next_ring(self) -> Ring | None:
        while not self._stopped:
            try:
                return self._rings.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
        return None

    def _claimed(self, ring: Ring, size: int) -> int | None:
        """A place for the next batch, when there is one; None if it is not wanted any more."""
        while not self._stopped:
            start = ring.claim(self._number, size)
            if start is not None:
                return start
            time.sleep(POLL_SECONDS)
        return None

    def _kind(
        self, pickle: bytes, spans: list[Span]
    ) -> tuple[int, tuple[bytes, list[Span]] | None]:
        """The number of a kind of batches, and the kind itself if the client has not got it."""
        known = self._kinds.get((pickle, *spans))
        if known is not None:
            return known, None
        if len(self._kinds) >= STATES_MOST:
            return -1, (pickle, spans)
        known = self._kinds[pickle, *spans] = len(self._kinds)
        return known, (pickle, spans)

    def _note(self, note: tuple[int, Any, Any], ring: Ring | None) -> None:
        start = self._start
        taken = 0 if ring is None else start["batches"] + ring.taken - start["number"]
        with self._changed:
            self._notes.append(note)
            while len(self._notes) > STATES_MOST or self._noted < taken:
                _apply(self._entries, self._notes.popleft())
                self._noted += 1

    def _tell(self, *item: Any) -> None:
        with self._changed:
            while len(self._ready) >= BATCHES_MOST and not self._stopped:
                self._changed.wait()
            self._ready.append(item)
            self._changed.notify_all()


def _apply(entries: list[dict[str, Any]], note: tuple[int, Any, Any]) -> None:
    """Note in the entries what a worker has left behind after one more batch."""
    worker, changed, state = note
    entry = entries[worker]
    entry["batches"] += 1
    if changed is not None:
        entry["random"] = changed
    if state is not None:
        entry["dataset"] = state
    for number, each in enumerate(entries):
        each["next"] = number == (worker + 1) % len(entries)


def _on_host(
    pickle: bytes, spans: list[Span], parts: list[torch.Tensor], buffers: Any, storages: Any
) -> Any:
    """A batch as it is in this process."""
    import torch

    places, size = _layout(spans)
    memory = torch.empty(size, dtype=torch.uint8)
    for part, place in zip(parts, places, strict=True):
        memory[place : place + part.numel()].copy_(part)

    def take(start: int, size: int) -> torch.UntypedStorage:
        return memory[start : start + size].clone().untyped_storage()

    kept = Placed(torch.device("cpu"), take, 0, spans)
    return encoding.decode(pickle, [memoryview(each) for each in buffers], storages, kept)


_REMOTE: RemoteClass[..., Data] = RemoteClass(Data, restart=True, resources="own")
