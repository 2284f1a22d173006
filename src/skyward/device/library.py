"""The client core: the C++ library behind the "sky" device, loaded and called through ctypes."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from skyward.device import build, meeting, operators
from skyward.device.meeting import Whereabouts
from skyward.device.properties import DeviceProperties
from skyward.device.ranks import Groups, Joining
from skyward.errors import DeviceError
from skyward.wire import native

if TYPE_CHECKING:
    import torch

# Their composite kernels are right as they are: they make tensors with our `empty`, only look, or
# wrap what they are given.
LEFT_COMPOSITE = (
    "empty_like new_empty new_empty_strided _copy_from _to_copy view lift_fresh lift detach_ "
    "resize_ resize_as_ set_ is_pinned _pin_memory rand randn _new_zeros_with_same_feature_meta "
    "as_strided_ squeeze_ unsqueeze_ t_ transpose_ _pack_padded_sequence block_diag "
    "_test_parallel_materialize _wrap_tensor_autograd"
)
DEVICES_MAX = 64

_Introduce = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_uint64,
)


class Life(NamedTuple):
    """A storage of a device: its slot, and which storage of that slot it is."""

    slot: int
    birth: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """The process of a device, as its client reaches it."""

    ways: tuple[int, ...]
    """What leads there: for records and replies, and then for the bytes of tensors. The numbers of
    sockets on one host, else the addresses of links."""
    shares_memory: bool
    on_cpu: bool
    place: str
    """What the device is and where, for people."""
    properties: Mapping[str, Any]
    whereabouts: Whereabouts
    """Where the processes of other devices find it."""

    @property
    def connections(self) -> tuple[Any, ...]:
        """How the core is told of its connections."""
        ways = (ctypes.c_uint64 * len(self.ways))(*self.ways)
        return ways, len(self.ways), int(self.shares_memory), int(self.on_cpu)


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """The numbers of a sky device so far."""

    operations: int
    cache_hits: int
    asked: int
    """Operations for which the client had to ask the worker for the result's shape."""
    bytes_sent: int
    """Bytes of the operation stream."""
    waits: int
    """How often the client waited for the worker."""
    bytes_uploaded: int
    bytes_fetched: int
    bytes_to_devices: int
    """Bytes that its process has sent to those of other devices."""
    bytes_from_devices: int
    bytes_coded: int
    """Bytes of the operation stream as they went to the worker. Over a network, records that went
    before go as a reference."""
    bytes_on_wire: int
    """Bytes of all kinds that have gone to the worker over a network, with what links and TLS add
    to them, but for the signs of life; 0 on one host."""
    captured: str
    """What a GPU's worker has last found of a loop that repeats: how much of it runs as CUDA
    graphs, or why it does not. Empty before it has found one."""


class _Answer:
    """Reads an answer of the core."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._content[self._at - size : self._at]

    @property
    def is_left(self) -> bool:
        return self._at < len(self._content)

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self._take(size), "little")

    def text(self) -> bytes:
        return self._take(int.from_bytes(self._take(4), "little"))


class Core:
    """The loaded library; there is one per process."""

    def __init__(self) -> None:
        import torch

        self._library = ctypes.CDLL(str(build.library("client")), mode=ctypes.RTLD_GLOBAL)
        self._library.sky_message.restype = ctypes.c_char_p
        self._library.sky_settings_now.restype = ctypes.c_uint64
        # PyTorch's binding raises errors of the core as this class.
        self._library.sky_error_class(ctypes.py_object(DeviceError))
        # Slices of storages are known by what PyTorch frees them with.
        part = torch.UntypedStorage(2)[:1]  # type: ignore[no-untyped-call]
        self._library.sky_learn_slices(ctypes.c_void_p(part._cdata))
        # The core waits without the interpreter's lock: a thread here may carry its bytes.
        python = ctypes.pythonapi
        self._library.sky_interpreter(
            python.Py_IsInitialized,
            python.PyGILState_Check,
            python.PyEval_SaveThread,
            python.PyEval_RestoreThread,
        )
        # Ctrl-C ends a wait on the main thread. The core calls nothing that runs Python's code.
        self._handler = (import_module("_signal").getsignal, (signal.SIGINT,))
        self._library.sky_interrupts(
            python.PyGILState_Ensure,
            python.PyGILState_Release,
            python.PyOS_InterruptOccurred,
            python.PyObject_CallObject,
            python.Py_DecRef,
            *map(ctypes.py_object, (*self._handler, signal.default_int_handler, KeyboardInterrupt)),
            ctypes.c_uint64(threading.main_thread().ident or 0),
        )
        # The core calls it; it must live as long as the process.
        self._introducing = _Introduce(self._introduce)
        self._library.sky_introduce(self._introducing)
        self._library.sky_modules_of(operators.tell_modules)
        self._free = list(range(DEVICES_MAX))
        self._kept: set[int] = set()
        """Indices of closed devices whose tensors another device may take over."""
        self._places: dict[int, str] = {}
        self._meshes: set[int] = set()
        """The devices whose operations are carried out by several ranks."""
        self._explain_absent: dict[int, Callable[[str], str]] = {}
        self._serials: dict[int, int] = {}
        self._properties: dict[int, DeviceProperties] = {}
        self.openings = [0] * DEVICES_MAX
        """How often each index was opened: a worker knows nothing of what an earlier one knew."""
        self._state_sizes: dict[int, int] = {}
        """How many bytes the states of generators have."""
        self._whereabouts: dict[int, Whereabouts] = {}
        self._on_wire: dict[int, Callable[[], int]] = {}
        self.chosen: int | None = None
        """The device that the user has made the current one, if it is still open."""
        self._lock = threading.Lock()

    def use_links(self) -> None:
        """Be ready for devices that are reached over a network."""
        native.load(build.library(build.LINK))
        self._library.sky_use_links(native.core().table)

    def register(self) -> int:
        """Take over every operation that would not reach the device otherwise."""
        count = ctypes.c_int()
        self._call("sky_register", LEFT_COMPOSITE.encode(), ctypes.byref(count))
        return count.value

    def open(self, process: DeviceProcess) -> int:
        """Open the device of a process, and return its index."""
        import torch

        with self._lock:
            if not self._free:
                raise DeviceError(f"{DEVICES_MAX} sky devices are open; close a pool first")
            index = self._free.pop(0)
        try:
            self._note(index, process)
            self._call("sky_open", index, *process.connections)
            serial = ctypes.c_uint32()
            self._call("sky_serial", index, ctypes.byref(serial))
            self._serials[index] = serial.value
            self._meshes.discard(index)
            # As on other devices, a seed that was set before the device was opened applies to it.
            self.seed(index, torch.initial_seed())
        except BaseException:
            self.close(index, f"sky:{index} is gone: it could not be opened")
            raise
        return index

    def join_mesh(self, index: int, joining: Joining) -> None:
        """Have the process of a device become the first rank of a mesh."""
        import torch

        self._meshes.add(index)
        self._call("sky_join_mesh", index, msgspec.json.encode(joining))
        # The other ranks have not heard the seed of the device that this was.
        self.seed(index, torch.initial_seed())

    def make_groups(self, index: int, ranks: dict[str, list[list[int]]]) -> None:
        """Make process groups of a mesh's ranks: for each name, the ranks of every group of it."""
        self._call("sky_make_groups", index, msgspec.json.encode(Groups(ranks)))

    def explain_absent_with(self, index: int, explain: Callable[[str], str]) -> None:
        """Have errors of a mesh whose ranks do not come end with what this says to their text."""
        self._explain_absent[index] = explain

    def explain_absent(self, index: int, text: str) -> str:
        """What there is to say of the ranks that an error says have not come."""
        explain = self._explain_absent.get(index)
        return explain(text) if explain is not None else ""

    def _note(self, index: int, process: DeviceProcess) -> None:
        self._properties[index] = DeviceProperties(**process.properties)
        self._whereabouts[index] = process.whereabouts
        self._places[index] = process.place
        self.openings[index] += 1
        DeviceError.forget(index)

    def close(self, index: int, why: str) -> None:
        """End a device; later uses of it raise an error that says why."""
        # A device whose worker died has closed itself; this frees its index, too.
        self._library.sky_close(index, why.encode())
        self._on_wire.pop(index, None)
        self._explain_absent.pop(index, None)
        with self._lock:
            if self.chosen == index:
                self.chosen = None
            if index not in self._free and index not in self._kept:
                self._free.append(index)
                self._free.sort()

    def properties(self, index: int) -> DeviceProperties:
        """The properties of an open device."""
        self.stats(index)  # raises if the device is not open
        return self._properties[index]

    def stats(self, index: int) -> DeviceStats:
        """The numbers of the device so far."""
        numbers = (ctypes.c_uint64 * (len(fields(DeviceStats)) - 1))()
        self._call("sky_stats", index, numbers)
        if (on_wire := self._on_wire.get(index)) is not None:
            numbers[-1] = on_wire()
        captured = ctypes.create_string_buffer(200)
        self._call("sky_captured", index, captured, ctypes.c_uint64(len(captured)))
        values: list[Any] = [*numbers, captured.value.decode()]
        return DeviceStats(*values)

    def count_on_wire(self, index: int, count: Callable[[], int]) -> None:
        """Have `stats` tell how many bytes have gone over the network."""
        self._on_wire[index] = count

    def remember(self, index: int, answers: bytes) -> None:
        """Take what workers like this one have answered before (`learned`)."""
        self._call("sky_remember", index, answers, ctypes.c_uint64(len(answers)))

    def learned(self, index: int) -> tuple[bytes, bool]:
        """What the device's worker has answered, and whether earlier answers were right."""
        answer, size, wrong = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
        self._call(
            "sky_learned", index, ctypes.byref(answer), ctypes.byref(size), ctypes.byref(wrong)
        )
        return ctypes.string_at(answer, size.value), not wrong.value

    def place(self, index: int) -> str:
        """What the device is and where, for people."""
        return self._places[index]

    def start_profile(self, index: int) -> int:
        """Record what the device does from now on; returns what `stop_profile` wants."""
        serial = ctypes.c_uint32()
        self._call("sky_profile_start", index, ctypes.byref(serial))
        return serial.value

    def stop_profile(self, serial: int) -> bytes:
        """Wait for everything issued, and return the recording, as `Profile::written` writes it."""
        answer, size = ctypes.c_void_p(), ctypes.c_uint64()
        self._call(
            "sky_profile_stop", ctypes.c_uint32(serial), ctypes.byref(answer), ctypes.byref(size)
        )
        return ctypes.string_at(answer, size.value)

    # For replays.

    def settings(self) -> int:
        """What PyTorch keeps for the whole process and operations depend on."""
        return int(self._library.sky_settings_now())

    def use_lines(self, line_now: Callable[[], int]) -> None:
        """Have tapes tell the lines of operations by the numbers that this function gives."""
        self._line_now = ctypes.CFUNCTYPE(ctypes.c_int)(line_now)
        self._library.sky_line_now(self._line_now)

    def start_tape(self, index: int) -> None:
        """Note what this thread issues on a device."""
        self._call("sky_start_tape", index)

    def stop_tape(self, index: int) -> bytes:
        """What was noted since `start_tape`, as `csrc/client/tape.cpp` writes it."""
        answer, size = ctypes.c_void_p(), ctypes.c_uint64()
        serial = ctypes.c_uint32(self._serials[index])
        self._call("sky_stop_tape", serial, ctypes.byref(answer), ctypes.byref(size))
        return ctypes.string_at(answer, size.value)

    def reserve(self, index: int, count: int) -> list[int]:
        """Slots for what a program makes."""
        slots = (ctypes.c_uint32 * count)()
        self._call("sky_reserve", index, ctypes.c_uint32(count), slots)
        return list(slots)

    def add_program(self, index: int, content: bytes) -> int:
        """Have the worker keep a program, which `csrc/client/programs.cpp` reads; its number."""
        number = ctypes.c_int64()
        size = ctypes.c_uint64(len(content))
        self._call("sky_add_program", index, content, size, ctypes.byref(number))
        return number.value

    def drop_program(self, number: int) -> None:
        """Have the worker forget a program."""
        self._library.sky_drop_program(ctypes.c_int64(number))

    def finds_unchanged(self, number: int) -> bool:
        """Whether the tensors that a program watches are as they were."""
        return bool(self._library.sky_finds_unchanged(ctypes.c_int64(number)))

    def seed(self, index: int, seed: int) -> None:
        """Seed the worker's own generator."""
        self._call("sky_seed", index, ctypes.c_uint64(seed & (1 << 64) - 1))

    def rng_state(self, index: int) -> bytes:
        """The state of the worker's own generator."""
        size = ctypes.c_uint64(self._state_sizes.get(index, 0))
        state = ctypes.create_string_buffer(size.value)
        self._call("sky_get_state", index, state, ctypes.byref(size))
        if size.value != len(state):
            self._state_sizes[index] = size.value
            state = ctypes.create_string_buffer(size.value)
            self._call("sky_get_state", index, state, ctypes.byref(size))
        return state.raw

    def set_rng_state(self, index: int, state: bytes) -> None:
        """Set the state of the worker's own generator."""
        self._call("sky_set_state", index, state, ctypes.c_uint64(len(state)))

    def export(self, index: int, storages: list[int], rank: int | None = None) -> list[bytes]:
        """How other processes of the device's node open these storages; empty if they cannot.

        Storages are named by their data pointers. Waits for all earlier operations of the device.
        Of a mesh, it is how processes of the rank's node open the rank's.
        """
        reader = _Answer(self._exported(index, storages, numbered=False, rank=rank))
        return [reader.text() for _ in storages]

    def kept_storages(self, index: int, storages: list[int]) -> list[tuple[int, bytes]]:
        """As `export`, each with the number of its memory in the device's process, or 0.

        The process is told by its agent which of them are kept when the client leaves.
        """
        reader = _Answer(self._exported(index, storages, numbered=True))
        return [(reader.number(), reader.text()) for _ in storages]

    def _exported(
        self, index: int, storages: list[int], *, numbered: bool, rank: int | None = None
    ) -> bytes:
        import torch

        if index in self._meshes and rank is None:
            raise DeviceError(
                f"sky:{index} is a mesh, and this would see the memory of one of its ranks alone; "
                "f(x) @ compute gives each worker its own rank's tensors, mesh.split takes the "
                "batches of a DataLoader, and full_tensor() or .cpu() make a tensor to keep"
            )
        # Raises an earlier error with its own class; the call below has only its text.
        torch.accelerator.synchronize(index)
        answer, size = ctypes.c_void_p(), ctypes.c_uint64()
        self._call(
            "sky_export",
            (ctypes.c_uint64 * len(storages))(*storages),
            ctypes.c_uint64(len(storages)),
            int(numbered),
            ctypes.byref(answer),
            ctypes.byref(size),
        )
        content = ctypes.string_at(answer, size.value)
        if rank is None:
            return content
        reader, of_ranks = _Answer(content), {}
        while reader.is_left:
            number = reader.number(4)
            of_ranks[number] = reader.text()
        return of_ranks[rank]

    def adopt(self, index: int, places: Sequence[tuple[int, int]]) -> list[torch.UntypedStorage]:
        """Storages over memory that is in the device's process, by its (number, bytes)."""
        import torch

        count, weak = ctypes.c_uint64(len(places)), (ctypes.c_void_p * len(places))()
        numbers = (ctypes.c_uint64 * len(places))(*(number for number, _ in places))
        sizes = (ctypes.c_uint64 * len(places))(*(size for _, size in places))
        try:
            self._call("sky_adopt", index, numbers, sizes, count, weak)
            found = [torch.UntypedStorage._new_with_weak_ptr(each) for each in weak]
        finally:
            for each in filter(None, weak):
                torch.UntypedStorage._free_weak_ref(each)  # type: ignore[no-untyped-call]
            self._call("sky_adopt", index, None, None, ctypes.c_uint64(), None)
        return [storage for storage in found if storage is not None]

    # For checkpoints.

    def serial(self, index: int) -> int:
        """The number of the last device with this index, also when it is closed."""
        return self._serials[index]

    def slot(self, index: int, address: int) -> int | None:
        """The slot of a storage of the device, which is named by its data pointer."""
        serial, slot = ctypes.c_uint32(), ctypes.c_uint32()
        if self._library.sky_slot(
            ctypes.c_uint64(address), ctypes.byref(serial), ctypes.byref(slot)
        ):
            return None
        return slot.value if serial.value == self._serials.get(index) else None

    def living(self, serial: int) -> list[Life]:
        """The storages of a device that live, also after its worker is gone."""
        answer, count = ctypes.POINTER(ctypes.c_uint64)(), ctypes.c_uint64()
        self._call("sky_living", serial, ctypes.byref(answer), ctypes.byref(count))
        numbers = answer[: 3 * count.value]
        return [Life(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]

    def alias(self, serial: int, slot: int) -> torch.UntypedStorage:
        """A second storage over the memory of one that lives; keeps that memory allocated."""
        import torch

        weak = ctypes.c_void_p()
        self._call("sky_alias", serial, slot, ctypes.byref(weak))
        try:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.value)
        finally:
            torch.UntypedStorage._free_weak_ref(weak.value)  # type: ignore[no-untyped-call]
            self._call("sky_alias", serial, 0, None)
        assert storage is not None
        return storage

    def renew(self, serial: int, slot: int) -> None:
        """Give a storage that lives new memory: after a failed operation it cannot be used."""
        self._call("sky_renew", serial, slot)

    def keep_index(self, index: int) -> None:
        """Do not use the index of this device for another one when the device is closed."""
        with self._lock:
            self._kept.add(index)

    def give_up_index(self, index: int) -> None:
        """Undo `keep_index`: the device is closed, and none will take its place."""
        with self._lock:
            if index in self._kept:
                self._kept.discard(index)
                if index not in self._free:
                    self._free.append(index)
                    self._free.sort()

    def reopen(
        self, index: int, process: DeviceProcess, kept: Sequence[Life], lost: Mapping[int, str]
    ) -> None:
        """Open a device in place of one that is closed, with the same index and the same tensors.

        The `kept` storages get memory again, without contents. Using another one raises an error
        with its text in `lost`.
        """
        lives = [number for life in kept for number in (life.slot, life.birth, life.bytes)]
        self._call(
            "sky_reopen",
            ctypes.c_uint32(self._serials[index]),
            *process.connections,
            (ctypes.c_uint64 * len(lives))(*lives),
            ctypes.c_uint64(len(kept)),
            (ctypes.c_uint32 * len(lost))(*lost),
            (ctypes.c_char_p * len(lost))(*(text.encode() for text in lost.values())),
            ctypes.c_uint64(len(lost)),
            b"the tensor is lost with the process that held it; make it again",
        )
        self._note(index, process)
        with self._lock:
            self._kept.discard(index)

    def generators(self, index: int) -> list[int]:
        """The numbers of the device's generators that live; 0 is its own."""
        ids, count = ctypes.POINTER(ctypes.c_uint32)(), ctypes.c_uint64()
        self._call("sky_generators", index, ctypes.byref(ids), ctypes.byref(count))
        return [0, *ids[: count.value]]

    def generator_state(self, index: int, number: int) -> bytes:
        """The state of one of the device's generators."""
        state, size = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("sky_generator_state", index, number, ctypes.byref(state), ctypes.byref(size))
        return ctypes.string_at(state, size.value)

    def set_generator_state(self, index: int, number: int, state: bytes) -> None:
        """Set the state of one of the device's generators."""
        self._call("sky_set_generator_state", index, number, state, ctypes.c_uint64(len(state)))

    def _introduce(self, index: int, other: int, link: int, text: Any, size: int) -> int:
        """Write how the process of one device reaches that of another; called by the core."""
        try:
            arranged = meeting.arrange(
                link,
                f"sky:{index} ({self._places[index]})",
                self._whereabouts[index],
                f"sky:{other} ({self._places[other]})",
                self._whereabouts[other],
            )
            words, failed = msgspec.json.encode(arranged), 0
            if len(words) >= size:
                words, failed = b"the description of the way is too long", 1
        except Exception as problem:
            words, failed = str(problem).encode()[: size - 1], 1
        ctypes.memmove(text, words + b"\0", len(words) + 1)
        return failed

    @property
    def open_devices(self) -> list[int]:
        """The indices in use, without those whose worker died."""
        numbers = (ctypes.c_uint64 * len(fields(DeviceStats)))()
        with self._lock:
            taken = [index for index in range(DEVICES_MAX) if index not in self._free]
        return [index for index in taken if not self._library.sky_stats(index, numbers)]

    @property
    def in_bad_fork(self) -> bool:
        """Whether all devices belong to the parent process, from which this one was forked."""
        return bool(self._library.sky_in_bad_fork())

    @property
    def count(self) -> int:
        """The number of devices: one more than the highest index in use."""
        return int(self._library.sky_count())

    @property
    def current(self) -> int:
        """This thread's current device."""
        return int(self._library.sky_current())

    @current.setter
    def current(self, index: int) -> None:
        self._library.sky_set_current(index)

    def _call(self, name: str, *arguments: Any) -> None:
        if (failed := getattr(self._library, name)(*arguments)) == 2:
            raise KeyboardInterrupt
        if failed:
            raise DeviceError(self._library.sky_message().decode(errors="replace"))
