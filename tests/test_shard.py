"""How `shard` splits data between workers."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import UserList, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.shards import shard

worlds = st.integers(min_value=1, max_value=9)
seeds = st.integers(min_value=0, max_value=2**32)
lists = st.lists(st.integers(), max_size=60)


def parts_of(*data: Any, world: int, **options: Any) -> list[Any]:
    return [shard(*data, node=rank, total_nodes=world, **options) for rank in range(world)]


def joined(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


class TestLaws:
    @given(lists, worlds)
    def test_a_worker_gets_every_nth_item_from_its_rank_on(self, data, world):
        for rank, part in enumerate(parts_of(data, world=world)):
            assert part == data[rank::world]

    @given(st.integers(0, 60), worlds, st.booleans(), seeds)
    def test_the_parts_are_disjoint_and_complete(self, length, world, shuffle, seed):
        parts = parts_of(list(range(length)), world=world, shuffle=shuffle, seed=seed)
        assert sorted(joined(parts)) == list(range(length))

    @given(st.integers(0, 60), worlds, st.booleans())
    def test_part_sizes_differ_by_at_most_one(self, length, world, shuffle):
        sizes = [len(part) for part in parts_of(range(length), world=world, shuffle=shuffle)]
        assert max(sizes) - min(sizes) <= 1

    @given(st.integers(0, 60), worlds, st.booleans(), seeds)
    def test_drop_last_gives_equal_disjoint_parts_and_drops_less_than_one_each(
        self, length, world, shuffle, seed
    ):
        parts = parts_of(
            list(range(length)), world=world, shuffle=shuffle, seed=seed, drop_last=True
        )
        assert {len(part) for part in parts} == {length // world}
        kept = joined(parts)
        assert len(set(kept)) == len(kept) == length - length % world
        assert set(kept) <= set(range(length))

    @given(lists, worlds)
    def test_drop_last_gives_contiguous_blocks(self, data, world):
        parts = parts_of(data, world=world, drop_last=True)
        assert joined(parts) == data[: len(data) - len(data) % world]

    @given(lists, worlds, st.booleans(), seeds, st.booleans())
    def test_several_arguments_stay_aligned(self, data, world, shuffle, seed, drop_last):
        labels = tuple(f"label of {item}" for item in data)
        for x, y in parts_of(
            data, labels, world=world, shuffle=shuffle, seed=seed, drop_last=drop_last
        ):
            assert y == tuple(f"label of {item}" for item in x)

    @given(lists, worlds, seeds)
    def test_every_node_permutes_identically(self, data, world, seed):
        whole = shard(data, shuffle=True, seed=seed, node=0, total_nodes=1)
        for rank, part in enumerate(parts_of(data, world=world, shuffle=True, seed=seed)):
            assert part == whole[rank::world]

    @given(st.lists(st.integers(0, 255), max_size=40), worlds, st.booleans(), st.booleans())
    def test_builtin_sequences_keep_their_type_and_agree(self, data, world, shuffle, drop_last):
        options = {"world": world, "shuffle": shuffle, "drop_last": drop_last}
        expected = parts_of(data, **options)
        makers: list[Callable[[Sequence[int]], Any]] = [
            list,
            tuple,
            bytes,
            bytearray,
            deque,
            UserList,
            lambda items: array("q", items),
        ]
        for make in makers:
            for part, items in zip(parts_of(make(data), **options), expected, strict=True):
                assert type(part) is type(make(data))
                assert part == make(items)

    @given(st.text(max_size=40), worlds, st.booleans())
    def test_text_stays_text(self, text, world, shuffle):
        parts = parts_of(text, world=world, shuffle=shuffle)
        expected = parts_of(list(text), world=world, shuffle=shuffle)
        assert parts == ["".join(letters) for letters in expected]

    @settings(deadline=None)
    @given(st.integers(0, 40), worlds, st.booleans(), st.booleans(), seeds)
    def test_arrays_tensors_and_frames_agree_with_lists(
        self, length, world, shuffle, drop_last, seed
    ):
        np, torch, pd = map(pytest.importorskip, ("numpy", "torch", "pandas"))
        rows = np.arange(length * 2).reshape(length, 2)
        data = (
            list(range(length)),
            rows,
            torch.from_numpy(rows.copy()),
            pd.DataFrame(rows, columns=["a", "b"]),
            pd.Series(np.arange(length) * 10),
        )
        for rank in range(world):
            items, array_, tensor, frame, series = shard(
                *data,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                node=rank,
                total_nodes=world,
            )
            expected = [[2 * i, 2 * i + 1] for i in items]
            assert (type(array_), array_.tolist()) == (np.ndarray, expected)
            assert (type(tensor), tensor.tolist()) == (torch.Tensor, expected)
            assert (type(frame), frame.to_numpy().tolist()) == (pd.DataFrame, expected)
            assert (type(series), series.tolist()) == (pd.Series, [10 * i for i in items])


class TestShuffling:
    def test_the_order_for_a_seed_is_the_same_in_every_version_and_on_every_machine(self):
        order = shard(range(10), shuffle=True, seed=42, node=0, total_nodes=1)
        assert order == [1, 9, 7, 3, 2, 8, 0, 5, 4, 6]

    def test_another_seed_gives_another_order(self):
        orders = {
            tuple(shard(range(50), shuffle=True, seed=seed, node=0, total_nodes=1))
            for seed in range(5)
        }
        assert len(orders) == 5

    def test_the_callers_own_random_state_is_left_alone(self):
        import random

        before = random.getstate()
        shard([1, 2, 3], shuffle=True, node=0, total_nodes=1)
        assert random.getstate() == before

    def test_a_seed_that_is_not_an_int_is_refused(self):
        with pytest.raises(TypeError, match=r"shard\(seed=None\): seed must be an int"):
            shard([1, 2], shuffle=True, seed=None, node=0, total_nodes=1)  # type: ignore[call-overload]


class TestPlace:
    def test_without_one_the_workers_own_place_is_used(self, monkeypatch):
        info = SimpleNamespace(node=0, total_nodes=2, global_worker_index=2, total_workers=4)
        context = ModuleType("skyward.context")
        context.instance_info = lambda: info  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "skyward.context", context)
        assert shard(list(range(8))) == [2, 6]

    @pytest.mark.parametrize("place", [{"node": 1}, {"total_nodes": 2}])
    def test_node_and_total_nodes_go_together(self, place):
        with pytest.raises(ValueError, match="give both, or neither"):
            shard([1, 2], **place)

    @pytest.mark.parametrize(("node", "total"), [(2, 2), (-1, 2), (0, 0), (5, 3)])
    def test_a_node_outside_the_world_is_refused(self, node, total):
        with pytest.raises(ValueError, match=rf"node={node}, total_nodes={total}"):
            shard([1, 2], node=node, total_nodes=total)

    def test_a_node_that_is_not_an_int_is_refused(self):
        with pytest.raises(TypeError, match=r"shard\(node='head'\): node must be an int, not str"):
            shard([1, 2], node="head", total_nodes=2)  # type: ignore[call-overload]

    def test_more_workers_than_items_leave_some_with_nothing(self):
        assert parts_of([1, 2], world=4) == [[1], [2], [], []]
        assert parts_of([1, 2], world=4, drop_last=True) == [[], [], [], []]


class TestBuiltinTypes:
    def test_one_argument_returns_the_part_itself(self):
        assert shard((1, 2, 3), node=0, total_nodes=2) == (1, 3)

    def test_several_arguments_return_a_tuple(self):
        assert shard([1, 2, 3], "abc", range(3), node=0, total_nodes=2) == (
            [1, 3],
            "ac",
            range(0, 3, 2),
        )

    def test_a_range_stays_a_range(self):
        assert shard(range(10, 20), node=1, total_nodes=3) == range(11, 20, 3)
        assert shard(range(10), drop_last=True, node=1, total_nodes=3) == range(3, 6)

    def test_a_shuffled_range_is_a_list(self):
        part = shard(range(10), shuffle=True, node=0, total_nodes=2)
        assert isinstance(part, list)

    def test_a_bounded_deque_keeps_its_bound(self):
        part = shard(deque([1, 2, 3], maxlen=7), node=0, total_nodes=2)
        assert part == deque([1, 3])
        assert part.maxlen == 7

    def test_a_list_subclass_stays_one(self):
        class Names(list[str]):
            pass

        part = shard(Names(["a", "b", "c"]), node=0, total_nodes=2)
        assert type(part) is Names
        assert part == ["a", "c"]

    @pytest.mark.parametrize("fields", [["only"], ["x", "y", "z"]])
    def test_a_namedtuple_has_too_few_fields_left_and_becomes_a_tuple(self, fields):
        Record = namedtuple("Record", fields)
        part = shard(Record(*range(len(fields))), node=0, total_nodes=2)
        assert type(part) is tuple
        assert part == tuple(range(len(fields)))[::2]


class Lines(Sequence[str]):
    """A sequence whose constructor takes no items and which refuses slices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self.length:
            raise IndexError(i)
        return f"line {i}"


class Window(Lines):
    """A sequence that answers a slice with its own type."""

    def __init__(self, positions: range) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: Any) -> Any:
        found = self.positions[i]
        return Window(found) if isinstance(found, range) else f"line {found}"


class TestOtherSequences:
    def test_one_that_cannot_be_rebuilt_becomes_a_list(self):
        assert shard(Lines(5), node=1, total_nodes=2) == ["line 1", "line 3"]

    def test_one_that_slices_into_itself_keeps_its_type(self):
        part = shard(Window(range(5)), node=1, total_nodes=2)
        assert type(part) is Window
        assert list(part) == ["line 1", "line 3"]

    def test_a_constructor_that_means_something_else_by_items_is_not_trusted(self):
        class Folder(Lines):
            def __init__(self, path: object) -> None:
                super().__init__(3)

        assert shard(Folder("/data"), node=0, total_nodes=2) == ["line 0", "line 2"]

    def test_length_and_positions_are_enough(self):
        class Squares:
            def __len__(self) -> int:
                return 5

            def __getitem__(self, i: int) -> int:
                return i * i

        assert shard(Squares(), node=0, total_nodes=2) == [0, 4, 16]


class TestNumpy:
    def test_an_unshuffled_part_shares_memory_with_the_whole(self):
        np = pytest.importorskip("numpy")
        whole = np.arange(10)
        assert np.shares_memory(shard(whole, node=1, total_nodes=3), whole)

    def test_an_empty_shuffled_part_keeps_dtype_and_row_shape(self):
        np = pytest.importorskip("numpy")
        whole = np.zeros((1, 3), dtype=np.float16)
        part = shard(whole, shuffle=True, node=1, total_nodes=2)
        assert (part.shape, part.dtype) == ((0, 3), np.float16)

    def test_an_array_of_no_dimensions_is_refused(self):
        np = pytest.importorskip("numpy")
        with pytest.raises(TypeError, match="ndarray: it has no dimensions"):
            shard(np.array(3), node=0, total_nodes=1)

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_sparse_matrix_stays_one(self, shuffle):
        sparse = pytest.importorskip("scipy.sparse")
        part = shard(sparse.eye_array(6, format="csr"), shuffle=shuffle, node=0, total_nodes=2)
        assert (type(part), part.shape, part.nnz) == (sparse.csr_array, (3, 6), 3)


class TestPandas:
    def test_the_part_is_positional_and_keeps_its_index(self):
        pd = pytest.importorskip("pandas")
        frame = pd.DataFrame({"a": [1, 2, 3, 4]}, index=[30, 20, 10, 0])
        part = shard(frame, node=1, total_nodes=2)
        assert part.index.tolist() == [20, 0]
        assert part["a"].tolist() == [2, 4]

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_an_index_stays_an_index(self, shuffle):
        pd = pytest.importorskip("pandas")
        part = shard(pd.Index(["a", "b", "c"]), shuffle=shuffle, node=0, total_nodes=3)
        assert isinstance(part, pd.Index)
        assert len(part) == 1


class TestTorch:
    def test_an_unshuffled_tensor_part_is_a_view(self):
        torch = pytest.importorskip("torch")
        whole = torch.arange(10)
        part = shard(whole, node=1, total_nodes=3)
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()

    def test_a_tensor_keeps_its_gradient_path(self):
        torch = pytest.importorskip("torch")
        whole = torch.zeros(4, requires_grad=True)
        shard(whole, shuffle=True, node=0, total_nodes=2).sum().backward()
        assert whole.grad.sum() == 2

    def test_a_tensor_of_no_dimensions_is_refused(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(TypeError, match="Tensor: it has no dimensions"):
            shard(torch.tensor(3.0), node=0, total_nodes=1)

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_map_style_dataset_becomes_a_subset_that_a_loader_can_read(self, shuffle):
        torch = pytest.importorskip("torch")
        from torch.utils.data import DataLoader, Subset, TensorDataset

        whole = TensorDataset(torch.arange(7))
        parts = parts_of(whole, world=2, shuffle=shuffle)
        assert all(isinstance(part, Subset) for part in parts)
        seen = [x for part in parts for (batch,) in DataLoader(part, 3) for x in batch.tolist()]
        assert sorted(seen) == list(range(7))

    def test_a_subset_can_be_sharded_again(self):
        torch = pytest.importorskip("torch")
        from torch.utils.data import Subset, TensorDataset

        first = Subset(TensorDataset(torch.arange(10)), [1, 3, 5, 7, 9])
        part = shard(first, node=1, total_nodes=2)
        assert [part[i][0].item() for i in range(len(part))] == [3, 7]

    def test_a_dataset_may_have_a_shape_of_its_own(self):
        pytest.importorskip("torch")
        from torch.utils.data import Dataset

        class Images(Dataset[int]):
            shape = (3, 32, 32)

            def __len__(self) -> int:
                return 10

            def __getitem__(self, i: int) -> int:
                return i

        assert len(shard(Images(), node=0, total_nodes=2)) == 5

    def test_an_iterable_dataset_is_refused_with_the_way_out(self):
        pytest.importorskip("torch")
        from torch.utils.data import IterableDataset

        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

            def __len__(self) -> int:
                return 3

        with pytest.raises(TypeError, match=r"Stream: .* shard the list of files or rows"):
            shard(Stream(), node=0, total_nodes=1)

    def test_a_dataset_without_a_length_is_refused(self):
        pytest.importorskip("torch")
        from torch.utils.data import Dataset

        class Endless(Dataset[int]):
            def __getitem__(self, i: int) -> int:
                return i

        with pytest.raises(TypeError, match="Endless: it has no length; give its class a __len__"):
            shard(Endless(), node=0, total_nodes=1)


class TestHuggingFace:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_a_dataset_stays_a_dataset(self, shuffle, drop_last):
        datasets = pytest.importorskip("datasets")
        whole = datasets.Dataset.from_dict({"x": list(range(7)), "y": list("abcdefg")})
        parts = parts_of(whole, world=3, shuffle=shuffle, drop_last=drop_last)
        expected = parts_of(list(range(7)), world=3, shuffle=shuffle, drop_last=drop_last)
        assert all(isinstance(part, datasets.Dataset) for part in parts)
        assert [list(part["x"]) for part in parts] == expected

    def test_a_dict_of_splits_is_refused(self):
        datasets = pytest.importorskip("datasets")
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})})
        with pytest.raises(TypeError, match="DatasetDict: it has names, not positions"):
            shard(splits, node=0, total_nodes=1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"x": 1}, r"dict: it has names, not positions; shard its values"),
            ({1, 2}, r"set: its order may differ between nodes; pass sorted\(data\)"),
            (frozenset({1}), r"frozenset: its order may differ"),
            ({"x": 1}.keys(), r"dict_keys: its order may differ"),
            ({"x": 1}.values(), r"dict_values: it has no length or no positions; pass list\(data"),
            ((i for i in range(3)), r"generator: it has no length or no positions; pass list"),
            (iter([1]), r"list_iterator: it has no length"),
            (3, r"int: pass a sequence, an array, a tensor"),
            (None, r"NoneType: pass a sequence"),
            (list, r"type: pass a sequence"),
        ],
        ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
    )
    def test_data_without_positions_is_refused_by_type_with_what_to_do(self, data, message):
        with pytest.raises(TypeError, match=message):
            shard(data, node=0, total_nodes=2)

    def test_unequal_lengths_are_named(self):
        with pytest.raises(ValueError, match=r"equal lengths .* got 3, 2, 3"):
            shard([1, 2, 3], "ab", range(3), node=0, total_nodes=2)

    def test_no_data_is_refused(self):
        with pytest.raises(TypeError, match=r"write shard\(x\) or shard\(x, y\)"):
            shard(node=0, total_nodes=1)  # type: ignore[call-overload]


def test_sharding_plain_data_imports_no_framework():
    code = (
        "import sys; from skyward.shards import shard; "
        "shard([1, 2, 3], (4, 5, 6), shuffle=True, node=0, total_nodes=2); "
        "print(sorted({'torch', 'numpy', 'pandas', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
