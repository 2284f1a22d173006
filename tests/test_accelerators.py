"""What the catalog of accelerators offers, and the facts it promises."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from skyward import accelerators
from skyward.accelerators import Accelerator, CudaInfo, Model, parse
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

    @pytest.mark.parametrize("text", ["H1000", "H100:", "A100-40", "gpu"])
    def test_an_unknown_model_is_refused_with_the_catalog(self, text):
        with refused(rf"accelerator '{text}': no model called .* the catalog has .*A100.*H100"):
            parse(text)

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
