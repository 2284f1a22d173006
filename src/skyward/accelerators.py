"""The catalog of accelerators: what a user asks of a node, and which cards satisfy the request."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
                "take one from the catalog, such as accelerators.A100(), or write "
                "accelerators.Custom('RTX 6000 Ada', '48GB')"
            )
        object.__setattr__(self, "memory", _memory(self.name, self.memory))
        object.__setattr__(self, "count", _count(self.name, self.count))

    @property
    def memory_gb(self) -> int:
        """The memory of each accelerator, in gigabytes."""
        return int(self.memory.removesuffix("GB"))

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's driver can confirm it; what the catalog does not list counts as such."""
        model = _BY_KEY.get(_key(self.name))
        return self.cuda is not None or model is None or model.cuda is not None

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


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of a machine, as its driver describes it.

    `memory_mib` is what `nvidia-smi` measures, or `None` where nobody measured it.
    """

    name: str
    memory_mib: int | None = None


def Custom(name: str, memory: str, count: int = 1) -> Accelerator:  # noqa: N802
    """Ask for NVIDIA cards that the catalog does not list, by the name `nvidia-smi -L` prints.

    The words NVIDIA, GeForce, Quadro and Tesla, and the memory, may be left out of the name.

    >>> str(Custom("RTX 6000 Ada Generation", "48GB", count=2))
    'RTX 6000 Ada Generation-48GB:2'
    """
    if _match(_NAME, name) is None:
        raise ConfigurationError(
            f"Custom(name={name!r}): the name must be a non-empty str; write the one that "
            "`nvidia-smi -L` prints, such as Custom('RTX 6000 Ada Generation', '48GB')"
        )
    known = _BY_KEY.get(_key(name))
    return Accelerator(name.strip(), memory, count, known.cuda if known else None)


def matching(wanted: Accelerator, cards: Sequence[Card]) -> list[Card]:
    """The cards that are of the model and the memory asked for.

    The model must be the same: an A100 is no A10, and an RTX 4090 D no RTX 4090. The memory is what
    the card's name says, or else what was measured; where neither is known, the model decides.

    >>> matching(A100(), [Card("NVIDIA A100-SXM4-40GB"), Card("NVIDIA A100 80GB PCIe")])
    [Card(name='NVIDIA A100 80GB PCIe', memory_mib=None)]
    """
    return [card for card in cards if _is_of_model(wanted, card) and _has_memory(wanted, card)]


def describe(cards: Sequence[Card]) -> str:
    """Cards as people count them, such as "2 x NVIDIA L4, 1 x Tesla T4"."""
    counts = Counter(
        card.name
        if card.memory_mib is None or _named_memory(card.name)
        else f"{card.name} ({card.memory_mib} MiB)"
        for card in cards
    )
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


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
    name, colon, written = match["model"].partition(":")
    if colon:
        raise ConfigurationError(
            f"accelerator {text!r}: the count {written.strip()!r} is no whole number; write one "
            f"such as '{name.strip()}:8'"
        )
    if model is None:
        known = ", ".join(each.name for each in models())
        raise ConfigurationError(
            f"accelerator {text!r}: no model called {match['model']!r}; the catalog has "
            f"{known}; in Python, accelerators.Custom(name, memory) asks for any other"
        )
    if match["count"] is not None:
        number = int(match["count"])
        if count not in (1, number):
            raise ConfigurationError(
                f"accelerator {text!r} with count={count}: two different counts; give only one"
            )
        count = number
    return model(count, memory=match["memory"])


def check(call: str, accelerator: object) -> None:
    """Refuse what is no `Accelerator`, in the call of a function; None asks for none."""
    if accelerator is None or isinstance(accelerator, Accelerator):
        return
    if isinstance(accelerator, Model):
        raise ConfigurationError(
            f"{call}(accelerator=sky.accelerators.{accelerator.name}): this is a model; write "
            f"sky.accelerators.{accelerator.name}()"
        )
    wanted = A100()
    if isinstance(accelerator, str):
        try:
            wanted = parse(accelerator)
        except ConfigurationError as problem:
            why = str(problem).removeprefix(f"accelerator {accelerator!r}: ")
            raise ConfigurationError(
                f"{call}(accelerator={accelerator!r}): {why}. Write it as {_spelled(wanted)}"
            ) from None
    raise ConfigurationError(f"{call}(accelerator={accelerator!r}): expected {_spelled(wanted)}")


def _spelled(accelerator: Accelerator) -> str:
    """The Python that makes an accelerator of the catalog."""
    model = _BY_KEY[_key(accelerator.name)]
    arguments = [f"count={accelerator.count}"] if accelerator.count != 1 else []
    if accelerator.memory != model.memories[0]:
        arguments.append(f"memory={accelerator.memory!r}")
    return f"sky.accelerators.{model.name}({', '.join(arguments)})"


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


_MAKERS = {"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GRID"}
_BUILDS = re.compile(r"SXM\d?|PCIE|NVL|HBM\d?E?|DGXS|FHHL|GENERATION|\d+GB?", re.IGNORECASE)
"""What a driver's name says besides the model: how the card is built, and its memory."""
_MEMORY_IN_NAME = re.compile(r"(?<!\w)(\d+)GB?(?!\w)", re.IGNORECASE)
_MEMORY_OF_NAME = {"GH200480GB": 96, "H100NVL": 94, "H100PCIE": 80}
"""The 480 GB of that GH200 belong to its processor; the other two do not say what they have."""
_LEAST_MEASURED, _MOST_MEASURED = 0.9, 1.05
"""Of the nominal gigabytes times 1024, what `nvidia-smi` reports in MiB: an L4 of 24 GB has 23,034
(94 %: error correction takes a part), a B300 of 288 GB has 275,040 (93 %: those are decimal), an
H200 of 141 GB has 143,771 (99.6 %)."""


def _words(name: str) -> list[str]:
    """A name without its maker: ["A100", "SXM4", "40GB"] for "NVIDIA A100-SXM4-40GB"."""
    return [word for word in re.split(r"[-_\s]+", name) if word and word.upper() not in _MAKERS]


def _model_key(name: str) -> str:
    """The model alone: "A100" for "NVIDIA A100-SXM4-40GB", "RTX4090D" for an RTX 4090 D."""
    words = _words(name)
    return _key("".join(word for word in words if not _BUILDS.fullmatch(word)) or "".join(words))


def _named_memory(name: str) -> int | None:
    """The gigabytes that a card's name says or implies."""
    implied = _MEMORY_OF_NAME.get(_key("".join(_words(name))))
    written = _MEMORY_IN_NAME.search(name)
    return implied or (int(written[1]) if written else None)


def _is_of_model(wanted: Accelerator, card: Card) -> bool:
    return _model_key(card.name) == _model_key(wanted.name)


def _has_memory(wanted: Accelerator, card: Card) -> bool:
    named = _named_memory(card.name)
    if named is not None:
        return named == wanted.memory_gb
    if card.memory_mib is None:
        return True
    nominal = wanted.memory_gb * 1024
    return nominal * _LEAST_MEASURED <= card.memory_mib <= nominal * _MOST_MEASURED


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
