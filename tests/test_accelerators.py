"""What the catalog of accelerators offers, and the facts it promises."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from skyward import accelerators
from skyward.accelerators import Accelerator, Card, CudaInfo, Custom, Model, matching, parse
from skyward.errors import ConfigurationError

CATALOG = list(accelerators.models())
EVERY_VARIANT = [model(memory=memory) for model in CATALOG for memory in model.memories]


def refused(message: str) -> pytest.RaisesExc[ConfigurationError]:
    return pytest.raises(ConfigurationError, match=message)


class TestAsking:
    def test_a_model_is_called_for_one_of_it(self):
        a100 = accelerators.A100()
        assert (a100.name, a100.memory, a100.memory_gb, a100.count) == ("A100", "80GB", 80, 1)

    def test_a_count_asks_for_several_on_each_node(self):
        assert accelerators.H100(count=8).count == 8
        assert accelerators.H100(8) == accelerators.H100(count=8)

    @pytest.mark.parametrize("memory", ["40GB", "40gb", "40 GB"])
    def test_a_memory_picks_the_variant(self, memory):
        a100 = accelerators.A100(memory=memory)
        assert (a100.memory, a100.memory_gb) == ("40GB", 40)

    def test_a_memory_no_such_model_has_is_refused_with_the_options(self):
        with refused(r"A100\(memory='64GB'\): no A100 has that memory; write '80GB' or '40GB'"):
            accelerators.A100(memory="64GB")

    @pytest.mark.parametrize("memory", ["lots", "", "0GB", 80])
    def test_what_is_not_an_amount_of_memory_is_refused(self, memory):
        with refused(r"A100\(memory=.*\): not an amount of memory; write one such as '80GB'"):
            accelerators.A100(memory=memory)

    @pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, None])
    def test_a_count_below_one_or_not_whole_is_refused(self, count):
        with refused(r"H100\(count=.*\): the count must be a whole number from 1"):
            accelerators.H100(count=count)

    def test_one_outside_the_catalog_can_be_described(self):
        chip = Accelerator("Homebrew", "16 gb", count=2)
        assert (chip.memory_gb, chip.count, chip.cuda) == (16, 2, None)

    @pytest.mark.parametrize("name", ["", " ", None])
    def test_one_without_a_name_is_refused(self, name):
        with refused("the name must be a non-empty str; take one from the catalog"):
            Accelerator(name, "16GB")


class TestValues:
    @pytest.mark.parametrize("value", EVERY_VARIANT, ids=str)
    def test_pickle_and_hash_by_content(self, value):
        twin = pickle.loads(pickle.dumps(value))
        assert twin == value
        assert hash(twin) == hash(value)

    def test_are_frozen_and_replaceable(self):
        one = accelerators.L4()
        assert dataclasses.replace(one, count=4) == accelerators.L4(count=4)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.count = 2  # type: ignore[misc]


class TestParsing:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("H100", accelerators.H100()),
            ("H100:8", accelerators.H100(count=8)),
            ("A100-40GB", accelerators.A100(memory="40GB")),
            ("a100-80gb:2", accelerators.A100(count=2, memory="80GB")),
            ("A100_40GB : 4", accelerators.A100(count=4, memory="40GB")),
            ("RTX 4090", accelerators.RTX_4090()),
            ("rtx-4090-24GB", accelerators.RTX_4090()),
            ("RTX4090", accelerators.RTX_4090()),
            ("tpu-v5e:4", accelerators.TPU_V5E(count=4)),
            ("trainium2", accelerators.TRAINIUM2()),
        ],
    )
    def test_reads_what_people_write(self, text, expected):
        assert parse(text) == expected

    @pytest.mark.parametrize("value", EVERY_VARIANT, ids=str)
    @pytest.mark.parametrize("count", [1, 8])
    def test_reads_back_what_an_accelerator_prints(self, value, count):
        wanted = dataclasses.replace(value, count=count)
        assert parse(str(wanted)) == wanted

    def test_a_count_can_be_given_beside_the_text(self):
        assert parse("H100", count=8) == parse("H100:8") == parse("H100:8", count=8)

    def test_two_different_counts_are_refused(self):
        with refused(r"accelerator 'H100:8' with count=4: two different counts; give only one"):
            parse("H100:8", count=4)

    @pytest.mark.parametrize("text", ["H1000", "A100-40", "gpu"])
    def test_an_unknown_model_is_refused_with_the_catalog(self, text):
        with refused(rf"accelerator '{text}': no model called .* the catalog has .*A100.*H100"):
            parse(text)

    @pytest.mark.parametrize("count", ["", "x", "-1", "1.5"])
    def test_a_count_that_is_no_number_is_refused(self, count):
        with refused(rf"'H100:{count}': the count '{count}' is no whole number; .* 'H100:8'"):
            parse(f"H100:{count}")

    @pytest.mark.parametrize("text", ["", "  ", None, 8])
    def test_what_is_no_description_is_refused(self, text):
        with refused("not an accelerator; write one such as 'H100', 'H100:8' or 'A100-40GB'"):
            parse(text)

    def test_a_memory_the_model_lacks_is_refused_with_the_options(self):
        with refused(r"H100\(memory='40GB'\): .* write '80GB' or '94GB'"):
            parse("H100-40GB")

    def test_a_count_of_zero_is_refused(self):
        with refused(r"H100\(count=0\)"):
            parse("H100:0")


class TestCatalog:
    def test_every_model_is_an_attribute_under_its_own_name(self):
        attributes = {
            name: value for name, value in vars(accelerators).items() if isinstance(value, Model)
        }
        assert attributes == {model.name: model for model in CATALOG}

    @pytest.mark.parametrize(
        ("model", "capability", "toolkit"),
        [
            (accelerators.K80, (3, 7), "6.5"),
            (accelerators.P100, (6, 0), "8.0"),
            (accelerators.V100, (7, 0), "9.0"),
            (accelerators.T4, (7, 5), "10.0"),
            (accelerators.A100, (8, 0), "11.0"),
            (accelerators.A10, (8, 6), "11.1"),
            (accelerators.A10G, (8, 6), "11.1"),
            (accelerators.A40, (8, 6), "11.1"),
            (accelerators.RTX_A6000, (8, 6), "11.1"),
            (accelerators.RTX_3090, (8, 6), "11.1"),
            (accelerators.L4, (8, 9), "11.8"),
            (accelerators.L40, (8, 9), "11.8"),
            (accelerators.L40S, (8, 9), "11.8"),
            (accelerators.RTX_4090, (8, 9), "11.8"),
            (accelerators.H100, (9, 0), "11.8"),
            (accelerators.H200, (9, 0), "11.8"),
            (accelerators.GH200, (9, 0), "11.8"),
            (accelerators.B200, (10, 0), "12.8"),
            (accelerators.B300, (10, 3), "12.9"),
            (accelerators.RTX_5090, (12, 0), "12.8"),
        ],
        ids=lambda value: value.name if isinstance(value, Model) else "",
    )
    def test_an_nvidia_gpu_says_what_cuda_it_needs(self, model, capability, toolkit):
        cuda = model().cuda
        assert cuda is not None
        assert (cuda.compute_capability, cuda.min_version) == (capability, toolkit)

    @pytest.mark.parametrize(
        "model",
        [
            accelerators.MI250,
            accelerators.MI300X,
            accelerators.TPU_V4,
            accelerators.TPU_V5E,
            accelerators.TPU_V5P,
            accelerators.TPU_V6E,
            accelerators.TRAINIUM,
            accelerators.TRAINIUM2,
            accelerators.INFERENTIA,
            accelerators.INFERENTIA2,
            accelerators.MPS,
        ],
        ids=lambda model: model.name,
    )
    def test_others_have_no_cuda(self, model):
        assert model().cuda is None

    def test_the_oldest_gpus_say_which_toolkit_was_their_last(self):
        last = {model.name: model.cuda.max_version for model in CATALOG if model.cuda is not None}
        ended = {name: version for name, version in last.items() if version is not None}
        assert ended == {"K80": "11.8", "P100": "12.9", "V100": "12.9"}

    @pytest.mark.parametrize(
        ("model", "memories"),
        [
            (accelerators.P100, {16, 12}),
            (accelerators.V100, {16, 32}),
            (accelerators.A100, {80, 40}),
            (accelerators.H100, {80, 94}),
            (accelerators.H200, {141}),
            (accelerators.GH200, {96, 144}),
            (accelerators.MI300X, {192}),
            (accelerators.TPU_V5P, {95}),
        ],
        ids=lambda value: value.name if isinstance(value, Model) else "",
    )
    def test_the_memories_are_those_that_are_sold(self, model, memories):
        assert {model(memory=memory).memory_gb for memory in model.memories} == memories

    def test_a_capability_has_the_name_compilers_use(self):
        assert CudaInfo((9, 0), "11.8").arch == "sm_90"
        assert CudaInfo((12, 0), "12.8").arch == "sm_120"


# As `nvidia-smi --query-gpu=name,memory.total` and /proc/driver/nvidia print them.
REAL_CARDS = [
    ("Tesla K80", 11441, accelerators.K80()),
    ("Tesla P100-PCIE-16GB", 16280, accelerators.P100()),
    ("Tesla P100-PCIE-12GB", 12198, accelerators.P100(memory="12GB")),
    ("Tesla V100-SXM2-16GB", 16160, accelerators.V100()),
    ("Tesla V100-SXM2-32GB", 32510, accelerators.V100(memory="32GB")),
    ("Tesla V100-DGXS-32GB", 32508, accelerators.V100(memory="32GB")),
    ("Tesla T4", 15360, accelerators.T4()),
    ("NVIDIA A100-SXM4-40GB", 40960, accelerators.A100(memory="40GB")),
    ("NVIDIA A100-PCIE-40GB", 40960, accelerators.A100(memory="40GB")),
    ("NVIDIA A100-SXM4-80GB", 81920, accelerators.A100()),
    ("NVIDIA A100 80GB PCIe", 81920, accelerators.A100()),
    ("NVIDIA A10", 23028, accelerators.A10()),
    ("NVIDIA A10G", 23028, accelerators.A10G()),
    ("NVIDIA A40", 46068, accelerators.A40()),
    ("NVIDIA L4", 23034, accelerators.L4()),
    ("NVIDIA L40", 46068, accelerators.L40()),
    ("NVIDIA L40S", 46068, accelerators.L40S()),
    ("NVIDIA H100 80GB HBM3", 81559, accelerators.H100()),
    ("NVIDIA H100 PCIe", 81559, accelerators.H100()),
    ("NVIDIA H100 NVL", 95830, accelerators.H100(memory="94GB")),
    ("NVIDIA H200", 143771, accelerators.H200()),
    ("NVIDIA H200 NVL", 143771, accelerators.H200()),
    ("NVIDIA GH200 480GB", 97871, accelerators.GH200()),
    ("NVIDIA GH200 144G HBM3e", 146831, accelerators.GH200(memory="144GB")),
    ("NVIDIA B200", 183359, accelerators.B200()),
    ("NVIDIA B300", 275040, accelerators.B300()),
    ("NVIDIA GeForce RTX 3090", 24576, accelerators.RTX_3090()),
    ("NVIDIA GeForce RTX 4090", 24564, accelerators.RTX_4090()),
    ("NVIDIA GeForce RTX 5090", 32607, accelerators.RTX_5090()),
    ("NVIDIA RTX A6000", 49140, accelerators.RTX_A6000()),
]
OTHER_CARDS = [
    ("NVIDIA GeForce RTX 3090 Ti", 24564, Custom("RTX 3090 Ti", "24GB")),
    ("NVIDIA GeForce RTX 4090 D", 24564, Custom("GeForce RTX 4090 D", "24GB")),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, Custom("RTX 4090 Laptop GPU", "16GB")),
    ("NVIDIA RTX 6000 Ada Generation", 49140, Custom("RTX 6000 Ada", "48GB")),
    ("Quadro RTX 6000", 23040, Custom("Quadro RTX 6000", "24GB")),
    ("Quadro RTX 8000", 49152, Custom("nvidia quadro rtx 8000", "48GB")),
    ("NVIDIA A100-SXM-64GB", 65536, Custom("A100", "64GB")),
    ("NVIDIA GB200", 189471, Custom("NVIDIA GB200", "186GB")),
]
EVERY_CARD = REAL_CARDS + OTHER_CARDS


def same_model(one: Accelerator, other: Accelerator) -> bool:
    """Whether both ask for the same card; a B200 is sold as 180 GB and as 192 GB."""
    return one.name == other.name and (one.memory == other.memory or one.name == "B200")


class TestMatching:
    @pytest.mark.parametrize(("name", "mib", "wanted"), EVERY_CARD, ids=lambda value: str(value))
    def test_a_card_is_what_its_driver_calls_it(self, name, mib, wanted):
        assert matching(wanted, [Card(name, mib)]) == [Card(name, mib)]
        assert matching(wanted, [Card(name)]) == [Card(name)]

    @pytest.mark.parametrize(("name", "mib", "wanted"), EVERY_CARD, ids=lambda value: str(value))
    def test_a_card_is_nothing_else(self, name, mib, wanted):
        asked = [*EVERY_VARIANT, *(each for _, _, each in OTHER_CARDS)]
        taken = [each for each in asked if matching(each, [Card(name, mib)])]
        assert [each for each in taken if not same_model(each, wanted)] == []

    @pytest.mark.parametrize(
        ("wanted", "name"),
        [
            (accelerators.A10(), "NVIDIA A100-SXM4-40GB"),
            (accelerators.L4(), "NVIDIA L40S"),
            (accelerators.L40(), "NVIDIA L40S"),
            (accelerators.H200(), "NVIDIA GH200 480GB"),
            (accelerators.A100(), "NVIDIA A100-SXM4-40GB"),
            (accelerators.RTX_4090(), "NVIDIA GeForce RTX 4090 D"),
            (accelerators.H100(), "NVIDIA H100 NVL"),
        ],
        ids=lambda value: str(value),
    )
    def test_a_name_that_contains_another_is_another(self, wanted, name):
        assert matching(wanted, [Card(name)]) == []

    def test_measured_memory_decides_where_the_name_is_silent(self):
        large, small = Card("NVIDIA P100", 16280), Card("NVIDIA P100", 12198)
        assert matching(accelerators.P100(), [large, small]) == [large]
        assert matching(accelerators.P100(memory="12GB"), [large, small]) == [small]

    def test_a_mixed_machine_offers_the_cards_that_match(self):
        cards = [Card("Tesla T4", 15360), Card("NVIDIA L4", 23034), Card("NVIDIA L4", 23034)]
        assert len(matching(accelerators.L4(), cards)) == 2
        assert accelerators.describe(cards) == (
            "1 x Tesla T4 (15360 MiB), 2 x NVIDIA L4 (23034 MiB)"
        )


class TestCustom:
    def test_names_what_the_catalog_does_not_have(self):
        card = Custom("RTX 6000 Ada Generation", "48 gb", count=2)
        assert (card.name, card.memory, card.count) == ("RTX 6000 Ada Generation", "48GB", 2)
        assert card.is_nvidia
        assert str(card) == "RTX 6000 Ada Generation-48GB:2"

    def test_a_name_of_the_catalog_keeps_its_facts(self):
        assert Custom("a100", "64GB").cuda == accelerators.A100().cuda

    @pytest.mark.parametrize(("name", "memory", "count"), [("", "8GB", 1), (None, "8GB", 1)])
    def test_a_name_is_needed(self, name, memory, count):
        with refused(r"Custom\(name=.*\): the name must be a non-empty str; .*nvidia-smi -L"):
            Custom(name, memory, count)

    def test_a_wrong_memory_or_count_is_refused(self):
        with refused(r"RTX 6000 Ada\(memory='much'\): not an amount of memory"):
            Custom("RTX 6000 Ada", "much")
        with refused(r"RTX 6000 Ada\(count=0\): the count must be a whole number from 1"):
            Custom("RTX 6000 Ada", "48GB", 0)

    def test_other_makers_of_the_catalog_are_not_nvidias(self):
        assert not accelerators.MI300X().is_nvidia
        assert not accelerators.TPU_V4().is_nvidia
        assert accelerators.H100().is_nvidia
