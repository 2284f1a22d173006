"""The catalog of accelerators: what can be asked of a node, and the facts that come with it."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import SupportsIndex

from skyward.errors import ConfigurationError

_NAME = re.compile(r"\S+(?: \S+)*")
_MEMORY = re.compile(r"([1-9]\d*)\s*GB", re.IGNORECASE)
_DESCRIPTION = re.compile(
    r"(?P<model>.+?)(?:[-_\s]+(?P<memory>\d+\s*GB))?(?:\s*:\s*(?P<count>\d+))?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class CudaInfo:
    """What CUDA needs to know of a GPU: its compute capability and the toolkits that serve it.

    `min_version` is the first toolkit that compiles for it, `max_version` the last, or `None`
    while every newer toolkit still does.
    """

    compute_capability: tuple[int, int]
    min_version: str
    max_version: str | None = None

    @property
    def arch(self) -> str:
        """The capability as compilers spell it, such as `sm_90`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """So many accelerators of one model on a node; `memory` is that of each.

    >>> str(H100(count=8))
    'H100-80GB:8'
    """

    name: str
    memory: str
    count: int = 1
    cuda: CudaInfo | None = None

    def __post_init__(self) -> None:
        if _match(_NAME, self.name) is None:
            raise ConfigurationError(
                f"Accelerator(name={self.name!r}): the name must be a non-empty str; "
                "take one from the catalog, such as accelerators.A100()"
            )
        object.__setattr__(self, "memory", _memory(self.name, self.memory))
        object.__setattr__(self, "count", _count(self.name, self.count))

    @property
    def memory_gb(self) -> int:
        """The memory of each accelerator, in gigabytes."""
        return int(self.memory.removesuffix("GB"))

    def __str__(self) -> str:
        described = f"{self.name}-{self.memory}"
        return described if self.count == 1 else f"{described}:{self.count}"


@dataclass(frozen=True, slots=True)
class Model:
    """One line of the catalog; calling it says how many are wanted, and of which memory.

    >>> A100(memory="40GB").memory_gb
    40
    """

    name: str
    memories: tuple[str, ...]
    cuda: CudaInfo | None = None

    def __call__(self, count: int = 1, *, memory: str | None = None) -> Accelerator:
        """Ask for `count` of this model on each node; without `memory`, the usual one."""
        chosen = self.memories[0] if memory is None else _memory(self.name, memory)
        if chosen not in self.memories:
            options = " or ".join(repr(option) for option in self.memories)
            raise ConfigurationError(
                f"{self.name}(memory={memory!r}): no {self.name} has that memory; write {options}"
            )
        return Accelerator(self.name, chosen, count, self.cuda)


def parse(text: str, count: int = 1) -> Accelerator:
    """Read an accelerator as a command line spells it: `H100`, `H100:8` or `A100-40GB:2`.

    Case, spaces, hyphens and underscores in the model's name do not matter. A number in the text
    and another in `count` contradict each other and are refused.

    >>> str(parse("a100-40gb:2"))
    'A100-40GB:2'
    """
    match = _match(_DESCRIPTION, text)
    if match is None:
        raise ConfigurationError(
            f"accelerator {text!r}: not an accelerator; write one such as 'H100', 'H100:8' or "
            "'A100-40GB'"
        )
    model = _BY_KEY.get(_key(match["model"]))
    if model is None:
        known = ", ".join(each.name for each in models())
        raise ConfigurationError(
            f"accelerator {text!r}: no model called {match['model']!r}; the catalog has {known}"
        )
    if match["count"] is not None:
        written = int(match["count"])
        if count not in (1, written):
            raise ConfigurationError(
                f"accelerator {text!r} with count={count}: two different counts; give only one"
            )
        count = written
    return model(count, memory=match["memory"])


def models() -> Iterator[Model]:
    """Every model in the catalog, in its order."""
    return iter(_BY_KEY.values())


def _match(pattern: re.Pattern[str], text: object) -> re.Match[str] | None:
    return pattern.fullmatch(text.strip()) if isinstance(text, str) else None


def _memory(name: str, memory: object) -> str:
    match = _match(_MEMORY, memory)
    if match is None:
        raise ConfigurationError(
            f"{name}(memory={memory!r}): not an amount of memory; write one such as '80GB'"
        )
    return f"{match[1]}GB"


def _count(name: str, count: SupportsIndex) -> int:
    try:
        number = 0 if isinstance(count, bool) else operator.index(count)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigurationError(
            f"{name}(count={count!r}): the count must be a whole number from 1; "
            "to ask for no accelerator, leave the argument out"
        )
    return number


def _key(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).upper()


_BY_KEY: dict[str, Model] = {}


def _model(name: str, *memories: str, cuda: CudaInfo | None = None) -> Model:
    """Enter a model in the catalog; the first memory is what a call without one means."""
    model = _BY_KEY[_key(name)] = Model(name, memories, cuda)
    return model


# The first toolkit for an architecture is the one whose compiler first knew it; the drivers of
# later cards may ask for more. CUDA 12 ended Kepler, CUDA 13 ended Pascal and Volta.
_KEPLER = CudaInfo((3, 7), "6.5", "11.8")
_PASCAL = CudaInfo((6, 0), "8.0", "12.9")
_VOLTA = CudaInfo((7, 0), "9.0", "12.9")
_TURING = CudaInfo((7, 5), "10.0")
_AMPERE = CudaInfo((8, 0), "11.0")
_AMPERE_GRAPHICS = CudaInfo((8, 6), "11.1")
_ADA = CudaInfo((8, 9), "11.8")
_HOPPER = CudaInfo((9, 0), "11.8")
_BLACKWELL = CudaInfo((10, 0), "12.8")
_BLACKWELL_ULTRA = CudaInfo((10, 3), "12.9")
_BLACKWELL_GRAPHICS = CudaInfo((12, 0), "12.8")

# A K80 board is two GPUs of 12 GB, and clouds, drivers and frameworks count GPUs.
K80 = _model("K80", "12GB", cuda=_KEPLER)
P100 = _model("P100", "16GB", "12GB", cuda=_PASCAL)
V100 = _model("V100", "16GB", "32GB", cuda=_VOLTA)
T4 = _model("T4", "16GB", cuda=_TURING)
A100 = _model("A100", "80GB", "40GB", cuda=_AMPERE)
A10 = _model("A10", "24GB", cuda=_AMPERE_GRAPHICS)
A10G = _model("A10G", "24GB", cuda=_AMPERE_GRAPHICS)
A40 = _model("A40", "48GB", cuda=_AMPERE_GRAPHICS)
L4 = _model("L4", "24GB", cuda=_ADA)
L40 = _model("L40", "48GB", cuda=_ADA)
L40S = _model("L40S", "48GB", cuda=_ADA)
# 94 GB is the H100 NVL.
H100 = _model("H100", "80GB", "94GB", cuda=_HOPPER)
H200 = _model("H200", "141GB", cuda=_HOPPER)
GH200 = _model("GH200", "96GB", "144GB", cuda=_HOPPER)
# The package carries 192 GB, of which HGX systems and the clouds offer 180.
B200 = _model("B200", "180GB", "192GB", cuda=_BLACKWELL)
B300 = _model("B300", "288GB", cuda=_BLACKWELL_ULTRA)

RTX_3090 = _model("RTX_3090", "24GB", cuda=_AMPERE_GRAPHICS)
RTX_4090 = _model("RTX_4090", "24GB", cuda=_ADA)
RTX_5090 = _model("RTX_5090", "32GB", cuda=_BLACKWELL_GRAPHICS)
RTX_A6000 = _model("RTX_A6000", "48GB", cuda=_AMPERE_GRAPHICS)

MI250 = _model("MI250", "128GB")
MI300X = _model("MI300X", "192GB")

TPU_V4 = _model("TPU_V4", "32GB")
TPU_V5E = _model("TPU_V5E", "16GB")
TPU_V5P = _model("TPU_V5P", "95GB")
TPU_V6E = _model("TPU_V6E", "32GB")

TRAINIUM = _model("TRAINIUM", "32GB")
TRAINIUM2 = _model("TRAINIUM2", "96GB")
INFERENTIA = _model("INFERENTIA", "8GB")
INFERENTIA2 = _model("INFERENTIA2", "32GB")

# Apple silicon shares the machine's memory; 8 GB is the least that any has.
MPS = _model(
    "MPS",
    *("8GB", "16GB", "18GB", "24GB", "32GB", "36GB", "48GB", "64GB"),
    *("96GB", "128GB", "192GB", "256GB", "512GB"),
)
