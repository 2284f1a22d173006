"""A mesh: PyTorch's DTensor, FSDP, tensor parallelism and collectives, held by one program."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import skyward as sky
from skyward.errors import ConfigurationError, DeviceError, NoDeviceError

from ..conftest import other_case

pytestmark = [
    # PyTorch 2.13 has other names for two of them, and 2.11 has only these.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
    # It says so of any linear layer whose input has three dimensions.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view:UserWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
]

RANKS = range(4)
DIFFERS = "the ranks of the mesh have different values here"


@pytest.fixture
def place(mesh: Any) -> torch.Tensor:
    """The number of each rank."""
    return mesh.get_rank()


@pytest.fixture
def own(place: torch.Tensor) -> torch.Tensor:
    """Another tensor on each rank: three times its number, counted from 1."""
    return (place + 1).float() * torch.ones(3, device=place.device)


@pytest.fixture(autouse=True)
def _works_afterwards(mesh: Any) -> Iterator[None]:
    yield
    assert mesh.each(mesh.get_rank()) == list(RANKS)


def _wholes(*values: float) -> list[torch.Tensor]:
    return [torch.full((3,), value) for value in values]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# The ranks.


def test_a_tensor_of_the_mesh_is_once_on_each_rank(mesh: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    there = x.to(mesh.device)
    assert there.device == mesh.device
    assert _equal(mesh.each(there), [x] * 4)
    assert torch.equal(there.cpu(), x)
    assert (there @ there.T).sum().item() == (x @ x.T).sum().item()


def test_the_place_of_a_rank_is_a_tensor_that_differs(mesh: Any) -> None:
    assert mesh.each(mesh.get_rank()) == [0, 1, 2, 3]
    assert mesh.each(mesh.get_local_rank("dp")) == [0, 0, 1, 1]
    assert mesh.each(mesh.get_local_rank("tp")) == [0, 1, 0, 1]
    assert mesh.each(mesh["tp"].get_local_rank()) == [0, 1, 0, 1]
    assert [mesh.each(at) for at in mesh.get_coordinate()] == [[0, 0, 1, 1], [0, 1, 0, 1]]


def test_a_mesh_has_the_shape_and_slices_of_a_device_mesh(mesh: Any) -> None:
    assert mesh.shape == (2, 2)
    assert mesh.size() == 4
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert mesh["dp"].size() == mesh["tp"].size() == 2
    assert mesh["dp"].device == mesh["dp", "tp"].device == mesh.device
    assert mesh["tp"] == mesh["tp"]
    assert mesh["tp"] != mesh["dp"]
    flat = mesh._flatten("flat")
    assert flat.size() == 4
    rows = distribute_tensor(torch.arange(8.0), flat, [Shard(0)])
    assert _equal(mesh.each(rows), list(torch.arange(8.0).view(4, 2)))


def test_a_value_that_differs_is_read_by_rank_and_not_as_one(mesh: Any, own: torch.Tensor) -> None:
    for read in (own.cpu, own.tolist, own[0].item, lambda: bool(own[0] > 2)):
        with pytest.raises(DeviceError, match=rf"rank 0 \(node 0\) and rank \d.*{DIFFERS}"):
            read()
    assert _equal(mesh.each(own), _wholes(1, 2, 3, 4))
    assert torch.equal(own.on(2), torch.full((3,), 3.0))
    assert torch.equal(mesh.on(own, 3), torch.full((3,), 4.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_each_rank_is_read_in_any_dtype_and_layout(
    mesh: Any, place: torch.Tensor, dtype: torch.dtype
) -> None:
    whole = torch.arange(6).view(2, 3).T
    there = ((whole.to(mesh.device) + place) % 2).to(dtype)
    wanted = [((whole + rank) % 2).to(dtype) for rank in RANKS]
    assert _equal(mesh.each(there), wanted)
    assert torch.equal(there.on(1), wanted[1])
    assert [each.shape for each in mesh.each(there[:, :0])] == [(3, 0)] * 4


def test_printing_shows_the_ranks_that_differ(mesh: Any, own: torch.Tensor) -> None:
    same = torch.ones(2, device=mesh.device, requires_grad=True)
    assert repr(same) == f"tensor([1., 1.], device='{mesh.device}', requires_grad=True)"
    assert repr(2 * same) == f"tensor([2., 2.], device='{mesh.device}', grad_fn=<MulBackward0>)"
    half = mesh.get_local_rank("dp")
    assert repr(half) == (
        f"tensor(0, device='{mesh.device}', rank=0, 1)\n"
        f"tensor(1, device='{mesh.device}', rank=2, 3)"
    )
    assert [line.split("rank=")[1] for line in repr(own).splitlines()] == [f"{r})" for r in RANKS]
    sharded = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
    assert "Shard(dim=0)" in repr(sharded)


def test_of_a_large_tensor_only_what_is_printed_comes_here(mesh: Any, place: torch.Tensor) -> None:
    whole = torch.randn(40, 5, 300)
    same = whole.to(mesh.device)
    # What differs is not shown: two signs, a word that is in another place, the last bits.
    signs, moved, last = same.clone(), same.clone(), same.clone()
    signs[20, 2, 100:102] *= 1 - 2 * (place == 1)
    moved[20, 2, 100] = torch.where(place == 1, same[21, 2, 100], same[20, 2, 100])
    moved[21, 2, 100] = torch.where(place == 1, same[20, 2, 100], same[21, 2, 100])
    last.view(torch.uint8)[20, 2, 1] ^= place == 1
    before = sky.device_stats(mesh.device).bytes_fetched
    assert repr(same) == f"{repr(whole)[:-1]}, device='{mesh.device}')"
    for each in (signs, moved, last):
        alone, others = sorted(repr(each).split("tensor")[1:], key=len)
        assert alone.strip().endswith(f"device='{mesh.device}', rank=1)")
        assert others.strip().endswith(f"device='{mesh.device}', rank=0, 2, 3)")
        assert repr(whole)[:-1].removeprefix("tensor") in others
    assert sky.device_stats(mesh.device).bytes_fetched - before < whole.nbytes / 4
    # Whatever the size of an element, and where it begins.
    for dtype in (torch.bool, torch.bfloat16, torch.complex64):
        odd = (torch.arange(2003, device=mesh.device) % 2).to(dtype)[1:]
        assert repr(odd) == f"{repr(odd.cpu())[:-1]}, device='{mesh.device}')"
        odd[1000] = place == 3
        assert "rank=3)" in repr(odd)


# Collectives.

REDUCTIONS = {
    dist.ReduceOp.SUM: 10,
    dist.ReduceOp.AVG: 2.5,
    dist.ReduceOp.PRODUCT: 24,
    dist.ReduceOp.MIN: 1,
    dist.ReduceOp.MAX: 4,
    dist.ReduceOp.BAND: 0,
    dist.ReduceOp.BOR: 7,
    dist.ReduceOp.BXOR: 4,
}


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda op: str(op).split(".")[-1])
def test_all_reduce(mesh: Any, own: torch.Tensor, reduction: Any) -> None:
    x = own if REDUCTIONS[reduction] in (10, 2.5, 24, 1) else own.long()
    dist.all_reduce(x, reduction, group=mesh.world)
    assert x.tolist() == [REDUCTIONS[reduction]] * 3


def test_a_collective_of_a_slice_is_among_its_ranks(mesh: Any, own: torch.Tensor) -> None:
    across, along = own.clone(), own.clone()
    dist.all_reduce(across, group=mesh.get_group("dp"))
    dist.all_reduce(along, group=mesh["tp"].get_group())
    assert _equal(mesh.each(across), _wholes(4, 6, 4, 6))
    assert _equal(mesh.each(along), _wholes(3, 3, 7, 7))


def test_what_is_gathered_comes_in_the_order_of_the_ranks(mesh: Any, own: torch.Tensor) -> None:
    wanted = torch.cat(_wholes(1, 2, 3, 4))
    one_after_the_other = torch.empty(12, device=mesh.device)
    dist.all_gather_into_tensor(one_after_the_other, own, group=mesh.world)
    assert torch.equal(one_after_the_other.cpu(), wanted)
    rows = torch.empty(4, 3, device=mesh.device)
    dist.all_gather_into_tensor(rows, own, group=mesh.world)
    assert torch.equal(rows.cpu(), wanted.view(4, 3))
    for gather in (dist.all_gather, lambda to, x, group: dist.gather(x, to, group=group)):
        each = [torch.empty(3, device=mesh.device) for _ in RANKS]
        gather(each, own, group=mesh.world)
        assert _equal([x.cpu() for x in each], list(wanted.view(4, 3)))


def test_what_is_reduced_is_scattered_in_the_order_of_the_ranks(
    mesh: Any, own: torch.Tensor
) -> None:
    parts = torch.arange(8.0, device=mesh.device)
    single, several = torch.empty(2, 2, device=mesh.device)
    dist.reduce_scatter_tensor(single, parts * own[0], group=mesh.world)
    dist.reduce_scatter(several, list((parts * own[0]).view(4, 2)), group=mesh.world)
    wanted = list(10 * torch.arange(8.0).view(4, 2))
    assert _equal(mesh.each(single), wanted)
    assert _equal(mesh.each(several), wanted)


def test_one_rank_gives_to_all(mesh: Any, own: torch.Tensor) -> None:
    whole, pairs, mine = own.clone(), own.clone(), torch.empty(3, device=mesh.device)
    dist.broadcast(whole, 2, group=mesh.world)
    dist.broadcast(pairs, group_src=1, group=mesh.get_group("tp"))
    dist.scatter(mine, [own * scale for scale in (1, 10, 100, 1000)], src=1, group=mesh.world)
    assert whole.tolist() == [3, 3, 3]
    assert _equal(mesh.each(pairs), _wholes(2, 2, 4, 4))
    assert _equal(mesh.each(mine), _wholes(2, 20, 200, 2000))


def test_all_ranks_give_to_all(mesh: Any, place: torch.Tensor) -> None:
    given = 10.0 * place + torch.arange(4, device=mesh.device)
    wanted = list((10.0 * torch.arange(4)[:, None] + torch.arange(4)).T.contiguous())
    whole = torch.empty(4, device=mesh.device)
    dist.all_to_all_single(whole, given, group=mesh.world)
    assert _equal(mesh.each(whole), wanted)
    parts = list(torch.empty(4, 1, device=mesh.device))
    dist.all_to_all(parts, list(given.view(4, 1)), group=mesh.world)
    assert _equal(mesh.each(torch.cat(parts)), wanted)


def test_a_collective_is_waited_for_by_the_ranks_alone(mesh: Any, own: torch.Tensor) -> None:
    work = dist.all_reduce(own, group=mesh.world, async_op=True)
    gathered = torch.empty(2, 3, device=mesh.device)
    other = dist.all_gather_into_tensor(
        gathered, torch.ones(3, device=mesh.device), group=mesh.get_group("tp"), async_op=True
    )
    assert work.wait()
    assert other.wait()
    assert work.is_completed()
    assert own.tolist() == [10, 10, 10]
    assert torch.equal(gathered.cpu(), torch.ones(2, 3))
    assert dist.barrier(group=mesh.world) is None


def test_a_collective_takes_any_layout_dtype_and_place(mesh: Any, place: torch.Tensor) -> None:
    columns = torch.arange(4.0).view(2, 2)
    there = (columns.to(mesh.device).T * (place + 1)).T
    apart = torch.stack([there, there], -1)[..., 0]
    complex_one = torch.full((2,), 1j, dtype=torch.complex64, device=mesh.device)
    here = torch.ones(2)
    for x in (there, apart, complex_one, here):
        dist.all_reduce(x, group=mesh.world)
    assert torch.equal(there.cpu(), 10 * columns)
    assert torch.equal(apart.cpu(), 10 * columns)
    assert complex_one.tolist() == [4j, 4j]
    assert here.tolist() == [4, 4]


def test_functional_collectives(mesh: Any, own: torch.Tensor) -> None:
    x = own[:1]

    def each(y: torch.Tensor) -> list[Any]:
        return [rank.tolist() for rank in mesh.each(y)]

    assert each(functional.all_reduce(x, "sum", mesh["tp"])) == [[3], [3], [7], [7]]
    assert each(functional.all_reduce(x, "sum", (mesh, 0))) == [[4], [6], [4], [6]]
    assert each(functional.broadcast(x, 1, mesh["tp"])) == [[2], [2], [4], [4]]
    gathered = functional.all_gather_tensor(x, 0, mesh["dp"])
    assert each(gathered) == [[1, 3], [2, 4], [1, 3], [2, 4]]
    scattered = functional.reduce_scatter_tensor(torch.cat([x, 2 * x]), "sum", 0, mesh["dp"])
    assert each(scattered) == [[4], [6], [8], [12]]
    exchanged = functional.all_to_all_single(torch.cat([x, 2 * x]), None, None, mesh["dp"])
    assert each(exchanged) == [[1, 3], [2, 4], [2, 6], [4, 8]]
    assert each(functional.permute_tensor(x, [1, 2, 3, 0], mesh.world)) == [[4], [1], [2], [3]]
    assert each(functional.permute_tensor(x, [1, 0], (mesh, 1))) == [[2], [1], [4], [3]]


def test_what_one_program_cannot_say_is_refused(mesh: Any, own: torch.Tensor) -> None:
    ring = [dist.P2POp(dist.isend, own, 1, mesh.world)]
    for sends in (
        lambda: dist.send(own, 1, group=mesh.world),
        lambda: dist.recv(own, 1, group=mesh.world),
        lambda: dist.batch_isend_irecv(ring),
    ):
        with pytest.raises(ConfigurationError, match=r"process per rank.*permute_tensor"):
            sends()
    with pytest.raises(ConfigurationError, match=r"parts of \[1, 2\] for parts of \[1, 1\]"):
        dist.all_to_all_single(own[:2], own, [1, 1], [1, 2], group=mesh.get_group("tp"))
    with pytest.raises(ConfigurationError, match="pad them to one size"):
        functional.all_to_all_single(own, [1, 2], [1, 2], mesh["tp"])
    with pytest.raises(ConfigurationError, match="3 tensors for the 4 ranks"):
        dist.all_gather([own.clone() for _ in range(3)], own, group=mesh.world)


# DTensor.

PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("before", list(itertools.product(PLACEMENTS, PLACEMENTS)), ids=str)
def test_a_dtensor_is_redistributed(mesh: Any, before: tuple[Any, ...]) -> None:
    whole = torch.randn(8, 12)
    x = distribute_tensor(whole, mesh, before)
    for after in itertools.product(PLACEMENTS, PLACEMENTS):
        y = x.redistribute(mesh, after)
        assert y.placements == after
        assert torch.equal(y.full_tensor().cpu(), whole)
        fresh = distribute_tensor(whole, mesh, after)
        assert _equal(mesh.each(y), mesh.each(fresh))


@pytest.mark.parametrize(("reduction", "wanted"), [("sum", 10), ("avg", 2.5), ("max", 4)])
def test_partial_values_become_one(
    mesh: Any, place: torch.Tensor, reduction: str, wanted: float
) -> None:
    part = (place + 1).float() * torch.ones(4, 4, device=mesh.device)
    partial = DTensor.from_local(part, mesh, [Partial(reduction)] * 2, run_check=False)
    for after in ([Replicate()] * 2, [Shard(0), Shard(1)], [Shard(0), Replicate()]):
        assert torch.equal(
            partial.redistribute(mesh, after).full_tensor().cpu(), torch.full((4, 4), wanted)
        )


def test_operations_of_dtensors_equal_those_of_whole_tensors(mesh: Any) -> None:
    a, b = torch.randn(8, 12), torch.randn(12, 4)
    x = distribute_tensor(a, mesh, [Shard(0), Shard(1)]).requires_grad_()
    y = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    product = x @ y
    assert product.placements == (Shard(0), Partial())
    torch.testing.assert_close(product.full_tensor().cpu(), a @ b)
    product.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor().cpu(), b.sum(1).expand(8, 12))
    for f in (
        lambda t: t.softmax(-1),
        lambda t: t.mean(0),
        lambda t: t.view(8, 4, 3).transpose(0, 1),
        lambda t: t[2:4],
        lambda t: torch.cat([t, t], 1),
        lambda t: nn.functional.layer_norm(t, (12,)),
        lambda t: t.std(),
        lambda t: t.argmax(1),
        lambda t: t.argmin(),
    ):
        torch.testing.assert_close(f(x).full_tensor().detach().cpu(), f(a))


def test_a_view_that_joins_dimensions_keeps_the_shards(mesh: Any) -> None:
    whole = torch.arange(48.0).view(2, 8, 3)
    joined = distribute_tensor(whole, mesh["tp"], [Shard(1)]).flatten(0, 1)
    assert torch.equal(mesh.on(joined, 1), whole[:, 4:].flatten(0, 1))
    assert torch.equal(joined.full_tensor().cpu(), whole.flatten(0, 1))
    assert torch.equal((joined * 2).sum(0).full_tensor().cpu(), 2 * whole.sum((0, 1)))


def test_a_dimension_of_nothing_is_sharded(mesh: Any) -> None:
    nothing = distribute_tensor(torch.empty(0, 3), mesh["tp"], [Shard(0)])
    assert nothing.full_tensor().shape == (0, 3)
    assert compute_local_shape_and_global_offset((0, 3), mesh["tp"], [Shard(0)]) == ((0, 3), (0, 0))


def test_a_dtensor_is_read_as_a_whole(mesh: Any) -> None:
    rows = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    assert rows.sum().item() == 6  # each rank has a part of the sum
    assert (rows > 2.5).any()  # on one rank alone
    assert not (rows > 2.5).all()
    nn.init.trunc_normal_(rows, a=-1, b=1)  # draws again as long as any number is too large
    assert rows.full_tensor().abs().max() <= 1


def test_a_tensor_that_wraps_others_is_sharded(mesh: Any) -> None:
    whole = torch.arange(4.0)
    pair = TwoTensor(whole.to(mesh.device), (whole + 4).to(mesh.device))
    own = distribute_tensor(pair, mesh["tp"], [Shard(0)]).to_local()
    assert [mesh.on(each, 1).tolist() for each in (own.a, own.b)] == [[2.0, 3.0], [6.0, 7.0]]


def test_a_sharded_embedding_looks_up_its_own_words(mesh: Any) -> None:
    words, weight = torch.randint(0, 16, (3, 5)), torch.randn(16, 4)
    found = nn.functional.embedding(
        distribute_tensor(words, mesh["tp"], [Replicate()]),
        distribute_tensor(weight, mesh["tp"], [Shard(0)]),
    )
    assert torch.equal(found.full_tensor().cpu(), nn.functional.embedding(words, weight))


def test_a_loss_of_sharded_logits(mesh: Any) -> None:
    logits, words = torch.randn(6, 8), torch.randint(0, 8, (6,))
    wanted = logits.clone().requires_grad_()
    loss = nn.functional.cross_entropy(wanted, words)
    loss.backward()
    sharded = distribute_tensor(logits, mesh["tp"], [Shard(1)]).requires_grad_()
    with loss_parallel():
        ours = nn.functional.cross_entropy(sharded, words.to(mesh.device))
        ours.backward()
    torch.testing.assert_close(ours.full_tensor().cpu(), loss)
    torch.testing.assert_close(sharded.grad.full_tensor().cpu(), wanted.grad)


def test_a_dtensor_has_equal_parts(mesh: Any) -> None:
    said = "a dimension of 5 has no equal parts for 2 ranks.*pad it to 6, or leave the tensor whole"
    for make in (
        lambda: distribute_tensor(torch.ones(5), mesh["tp"], [Shard(0)]),
        lambda: zeros(4, 5, device_mesh=mesh, placements=[Replicate(), Shard(1)]),
        lambda: distribute_tensor(torch.ones(5), mesh["tp"], [Replicate()]).redistribute(
            mesh["tp"], [Shard(0)]
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            make()
    with pytest.raises(ConfigurationError, match=r"shards of \[4, 2\] and of \[0, 2\].*pad the"):
        whole = distribute_tensor(torch.ones(4, 2), mesh["tp"], [Replicate()])
        whole.redistribute(placements=[_StridedShard(0, split_factor=4)])


# Models.

STEPS = 3
functional_of = nn.functional


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional_of.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks; no parameter of the head has equal parts."""

    def __init__(self, words: int = 5, width: int = 8) -> None:
        super().__init__()
        self.begin = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _trained(
    prepare: Callable[[nn.Module], nn.Module],
    batch: Callable[..., Any],
    words: int = 5,
    steps: int = STEPS,
    how: Callable[..., Any] = lambda step: step,
) -> SimpleNamespace:
    """A model's losses, the norms of its gradients and its parameters after some steps."""
    torch.manual_seed(0)
    model = prepare(Net(words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = functional_of.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach().float(), norm

    train = how(step)
    for _ in range(steps):
        x, y = batch((torch.randn(8, 3, 6), torch.randint(0, words, (8, 3))))
        loss, norm = train(x, y)
        norms.append(_whole(norm))
        losses.append(_whole(loss))
    parameters = {
        name.removeprefix("module."): _whole(parameter)
        for name, parameter in model.named_parameters()
    }
    replayed = getattr(train, "replayed", 0)
    return SimpleNamespace(losses=losses, norms=norms, parameters=parameters, replayed=replayed)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU; of what differs, such as the loss of a part of the batch, the mean."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().cpu()
    if tensor.device.type != "sky" or tensor.dim():
        return tensor.cpu()
    from skyward.device.mesh import mesh_of

    return torch.stack(mesh_of(tensor).each(tensor)).mean(0)


@pytest.fixture(scope="module")
def alone(one_thread: None) -> dict[int, SimpleNamespace]:
    """The same model on this processor, with so many words."""
    return {words: _trained(lambda model: model, lambda batch: batch, words) for words in (5, 6)}


def _sharded(mesh: Any, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: Any) -> nn.Module:
        model = model.to(mesh.device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return prepare


def _parallel(mesh: Any) -> Callable[[nn.Module], nn.Module]:
    """Every parameter in parts, or named as whole."""

    def prepare(model: Any) -> nn.Module:
        model = parallelize_module(
            model.to(mesh.device),
            mesh["tp"],
            {
                "begin": RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
                ),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
        for block in model.blocks:
            parallelize_module(
                block,
                mesh["tp"],
                {
                    "norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                },
            )
        return model

    return prepare


def _agree(ours: SimpleNamespace, theirs: SimpleNamespace, **tolerance: float) -> None:
    for what in ("losses", "norms", "parameters"):
        torch.testing.assert_close(getattr(ours, what), getattr(theirs, what), **tolerance)


def _uneven(batch: Any) -> Any:
    x, y = batch
    return torch.cat([x, x[:, :1]], 1), torch.cat([y, y[:, :1]], 1)


@pytest.mark.parametrize("reshards", [True, False])
def test_fully_shard_trains_like_the_whole_model(mesh: Any, alone: Any, reshards: bool) -> None:
    prepare = _sharded(mesh["dp"], reshard_after_forward=reshards)
    _agree(_trained(prepare, mesh.split), alone[5])


def test_fully_shard_of_copies(mesh: Any, alone: Any) -> None:
    """Copies along the first dimension, parts along the second; a part of the batch each."""

    def batch(whole: Any) -> Any:
        return [_over_all(mesh, each) for each in whole]

    _agree(_trained(_sharded(mesh), batch), alone[5])


def _over_all(mesh: Any, tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.to(mesh.device).unflatten(0, (4, -1))
    return rows.index_select(0, mesh.get_rank().view(1)).squeeze(0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_takes_a_learning_rate_that_is_a_tensor(mesh: Any, kind: Any) -> None:
    weights = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])
        optimizer = kind(model.parameters(), lr=torch.tensor(0.1), fused=is_fused)
        model(torch.ones(2, 4, device=mesh.device)).sum().backward()
        optimizer.step()
        weights.append(_whole(model.weight))
    torch.testing.assert_close(*weights)


def test_fully_shard_has_a_part_of_each_parameter_on_each_rank(mesh: Any) -> None:
    model = Net()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in _sharded(mesh["dp"])(model).named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor().detach().cpu(), whole[name])
        assert parameter.to_local().shape[0] == -(-whole[name].shape[0] // 2)


def test_fully_shard_with_mixed_precision_is_that_of_bfloat16(mesh: Any, alone: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ours = _trained(_sharded(mesh["dp"], mp_policy=policy), mesh.split)
    _agree(ours, alone[5], atol=0.05, rtol=0.05)
    assert all(each.dtype == torch.float32 for each in ours.parameters.values())
    assert not torch.equal(ours.losses[0], alone[5].losses[0])


def test_tensor_parallel_trains_like_the_whole_model(mesh: Any, alone: Any) -> None:
    def batch(whole: Any) -> Any:
        return [each.to(mesh.device) for each in whole]

    def padded(whole: Any) -> Any:
        return batch(_uneven(whole))

    theirs = _trained(lambda model: model, _uneven, 6)
    _agree(_trained(_parallel(mesh), padded, 6), theirs)


def test_fully_shard_of_a_tensor_parallel_model(mesh: Any) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        parallel: Any = _parallel(mesh)(model)
        for block in parallel.blocks:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(parallel, mesh=mesh["dp"])

    theirs = _trained(lambda model: model, _uneven, 8)
    _agree(_trained(prepare, lambda whole: mesh.split(_uneven(whole)), 8), theirs)


@pytest.mark.parametrize("how", ["mesh.replicate", "DistributedDataParallel", "replicate"])
def test_copies_train_like_the_whole_model(mesh: Any, alone: Any, how: str) -> None:
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "mesh.replicate": mesh.replicate,
        "DistributedDataParallel": lambda model: nn.parallel.DistributedDataParallel(
            model.to(mesh.device), device_mesh=mesh["dp"]
        ),
        "replicate": lambda model: replicate(model.to(mesh.device), device_mesh=mesh["dp"]),
    }
    _agree(_trained(ways[how], mesh.split), alone[5])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("parallel", marks=other_case),
        pytest.param("copies of parts", marks=other_case),
        "both",
    ],
)
def test_replayed_steps_have_the_bits_of_others(mesh: Any, how: str) -> None:
    def both(model: nn.Module) -> nn.Module:
        return fully_shard(_parallel(mesh)(model), mesh=mesh["dp"])

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ways = {
        "copies of parts": _sharded(mesh, mp_policy=policy),
        "parallel": _parallel(mesh),
        "both": both,
    }

    def batch(whole: Any) -> Any:
        if how in ("parallel", "both"):
            whole = _uneven(whole)
        return [each.to(mesh.device) for each in whole] if how == "parallel" else mesh.split(whole)

    def trained(wrap: Callable[..., Any]) -> SimpleNamespace:
        return _trained(ways[how], batch, 8 if how in ("parallel", "both") else 5, 8, wrap)

    ours, theirs = trained(sky.replay), trained(lambda step: step)
    _agree(ours, theirs, atol=0, rtol=0)
    assert ours.replayed >= 5


def test_a_replayed_function_takes_and_gives_dtensors(mesh: Any) -> None:
    weight = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)]).requires_grad_()
    total = distribute_tensor(torch.zeros(8), mesh["tp"], [Shard(0)])

    @sky.replay
    def step(x: DTensor) -> tuple[DTensor, DTensor]:
        weight.grad = None
        (weight * x).sum().backward()
        total.add_(x)
        return x.redistribute(mesh["tp"], [Replicate()]) + 1, total

    kept = []
    for number in range(8):
        x = torch.arange(8.0) * number
        more, same = step(distribute_tensor(x, mesh["tp"], [Shard(0)]))
        assert same is total
        assert more.placements == (Replicate(),)
        assert torch.equal(more.to_local().cpu(), x + 1)
        assert weight.grad is not None
        assert torch.equal(weight.grad.full_tensor().cpu(), x)
        assert torch.equal(total.full_tensor().cpu(), torch.arange(8.0) * sum(range(number + 1)))
        with torch.no_grad():
            kept.append(weight.grad.to_local())
    # Whose parts the user has kept is not written to.
    for number, each in enumerate(kept):
        assert _equal(mesh.each(each), [*(torch.arange(8.0) * number).view(2, 4)] * 2)
    before = step.replayed
    for _ in range(8):
        step(distribute_tensor(torch.ones(8), mesh["tp"], [Shard(0)]))
        step(distribute_tensor(torch.ones(8), mesh["tp"], [Replicate()]))
    assert step.replayed >= before + 8
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(distribute_tensor(torch.ones(8), mesh["tp"], [Shard(0)]))


def test_replayed_steps_follow_what_fully_shard_is_told(mesh: Any) -> None:
    """Gradients gathered over some calls, and another divisor after replays began."""

    def trained(how: Callable[..., Any]) -> tuple[Any, list[list[Any]]]:
        torch.manual_seed(0)
        model: Any = _sharded(mesh["dp"])(Net())
        # The divisor is an argument of an operation then, and of none of a collective.
        model.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional_of.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            return loss.detach()

        train, seen = how(step), []
        for number in range(20):
            if number == 12:
                model.set_gradient_divide_factor(4.0)
            gathers = number < 8
            model.set_requires_gradient_sync(not gathers or number % 4 == 3)
            train(*mesh.split((torch.randn(8, 3, 6), torch.randint(0, 5, (8, 3)))))
            if not gathers or number % 4 == 3:
                seen.append([_whole(each.grad) for each in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        return train, seen

    with pytest.warns(UserWarning, match=r"div_.Tensor gets 2.0 and then 2.0 and then 4.0"):
        ours, found = trained(sky.replay)
    _, expected = trained(lambda step: step)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert ours.replayed


def test_a_replayed_function_waits_for_the_collectives_of_its_results(mesh: Any) -> None:
    model = _parallel(mesh)(Net(6))
    x = torch.randn(8, 4, 6, device=mesh.device)

    @sky.replay
    @torch.no_grad()
    def forward(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(model(x), "sum", mesh["tp"])

    expected = mesh.each(forward(x) + 0)
    for _ in range(5):
        assert _equal(mesh.each(forward(x)), expected)
    assert forward.replayed


def test_copies_without_a_mesh_are_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"mesh\.replicate\(model\)"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(mesh.device))


def test_fully_shard_refuses_what_a_mesh_has_not(mesh: Any) -> None:
    model, other = nn.Linear(2, 2).to(mesh.device), nn.Linear(2, 2).to(mesh.device)
    with pytest.raises(ConfigurationError, match=r"CPUOffloadPolicy.*come to this machine"):
        fully_shard(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    with pytest.raises(ConfigurationError, match=r"reshard_after_forward=2.*True or False"):
        fully_shard(other, mesh=mesh._flatten("all"), reshard_after_forward=2)


# Data.


def test_split_gives_each_rank_its_part(mesh: Any) -> None:
    batch = {"x": torch.arange(8).view(4, 2), "y": [torch.arange(4), 7, "text"]}
    split = mesh.split(batch)
    first, second = torch.arange(8).view(2, 2, 2)
    assert _equal(mesh.each(split["x"]), [first, first, second, second])
    assert split["y"][1:] == [7, "text"]
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4)
    parts = [mesh.each(part)[0].tolist() for part in mesh.split(loader)]
    assert parts == [[0, 1], [4, 5]]
    along_tp = mesh.split(torch.arange(4), "tp")
    assert [x.tolist() for x in mesh.each(along_tp)] == [[0, 1], [2, 3]] * 2


def test_a_batch_without_equal_parts_is_refused(mesh: Any) -> None:
    said = "a batch of 7 has no equal parts for the 2 ranks of 'dp'.*drop_last=True"
    with pytest.raises(ConfigurationError, match=said):
        mesh.split(torch.ones(7, 2))
    with pytest.raises(KeyError, match="pp"):
        mesh.split(torch.ones(8, 2), "pp")


# Errors.


def _lacks_on(rank: int, place: torch.Tensor) -> torch.Tensor:
    """What one rank cannot look up."""
    at = (place == rank).long().view(1) * 9
    return torch.arange(4, device=place.device).index_select(0, at)


def _after_a_collective(x: torch.Tensor, mesh: Any) -> object:
    x = x + 1
    dist.all_reduce(x, group=mesh.world)
    return (2 * x).cpu()


def _after_gathering(x: torch.Tensor, mesh: Any) -> object:
    rows = torch.empty(2, dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(rows, x, group=mesh.get_group("tp"))
    return rows.on(0)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, mesh: x.cpu(),
        lambda x, mesh: x.on(0),
        lambda x, mesh: repr(x),
        lambda x, mesh: torch.accelerator.synchronize(mesh.device),
        _after_a_collective,
        _after_gathering,
    ],
    ids=["cpu", "on", "repr", "synchronize", "all_reduce", "all_gather"],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_one_rank_names_it(
    mesh: Any, place: torch.Tensor, rank: int, read: Callable[..., object]
) -> None:
    began = time.monotonic()
    said = rf"rank {rank} \(node {rank}\): index out of range(.|\n)*aten::index_select"
    with pytest.raises(IndexError, match=said):
        read(_lacks_on(rank, place), mesh)
    # Far less than the ranks wait for each other.
    assert time.monotonic() - began < 60


def test_an_error_of_all_ranks_names_none(mesh: Any) -> None:
    x = torch.ones(2, 3, device=mesh.device)
    with pytest.raises(DeviceError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        (x @ x).cpu()
    with pytest.raises(IndexError, match=r"^index 7 is out of bounds"):
        x[torch.tensor(7, device=mesh.device)].cpu()


def test_a_size_that_differs_is_an_error(mesh: Any, place: torch.Tensor) -> None:
    row = torch.arange(4, device=mesh.device)
    with pytest.raises(DeviceError, match=DIFFERS):
        row[row < place]
    assert torch.nonzero(row == place).shape == (1, 1)


def test_a_mesh_that_cannot_be_is_refused(four_nodes: sky.Compute) -> None:
    for call, said in (
        (lambda: four_nodes.mesh(dp=5), "it takes 5 ranks, and the pool has 4 on 4 nodes"),
        (lambda: four_nodes.mesh(), "name its dimensions, such as compute.mesh(dp=4)"),
        (lambda: four_nodes.mesh(dp=0), "mesh(dp=0): give a whole number of ranks"),
        (lambda: four_nodes.mesh(dp=2.0), "mesh(dp=2.0): give a whole number of ranks"),  # type: ignore[arg-type]
        (lambda: four_nodes.mesh("tpu", dp=2), "mesh('tpu'): give 'cuda', 'cpu' or 'auto'"),
    ):
        with pytest.raises((ConfigurationError, NoDeviceError), match=re.escape(said)):
            call()


def test_what_is_on_another_device_has_no_ranks(mesh: Any) -> None:
    with pytest.raises(ConfigurationError, match="the tensor is on cpu, and the mesh is sky"):
        mesh.each(torch.ones(2))
    with pytest.raises(ConfigurationError, match="on cpu, which is no mesh"):
        torch.ones(2).on(0)
    with pytest.raises(ConfigurationError, match=r"on\(9\): the ranks of this mesh are 0 to 3"):
        torch.ones(2, device=mesh.device).on(9)


# Meshes side by side.


def test_meshes_and_devices_side_by_side(mesh: Any, four_nodes: sky.Compute) -> None:
    before = torch.sky.current_device()
    other: Any = four_nodes.mesh("cpu", ep=2)
    single = four_nodes.device("cpu")
    assert len({mesh.device, other.device, single}) == 3
    x = torch.arange(8.0)
    ours = distribute_tensor(x, mesh["tp"], [Shard(0)])
    theirs = distribute_tensor(x, other, [Shard(0)])
    assert _equal(other.each(theirs), list(x.view(2, 4)))
    for sharded in (ours, theirs):
        assert torch.equal(sharded.full_tensor().cpu(), x)
    for place in (mesh, other):
        made = zeros(8, 2, device_mesh=place, placements=[Shard(0)] * place.ndim)
        local = DTensor.from_local(torch.ones(2), place, [Shard(0)] * place.ndim)
        model = fully_shard(nn.Linear(2, 2).to(place.device), mesh=place[place.mesh_dim_names[0]])
        model(torch.ones(4, 2, device=place.device)).sum().backward()
        for x_there in (made, local, model.weight, model.weight.grad):
            assert x_there.device == place.device
    assert torch.sky.current_device() == before, "a mesh leaves the current device alone"
    with pytest.warns(UserWarning, match="copies between sky.*a mesh has no links"):
        assert torch.equal(theirs.full_tensor().to(mesh.device).cpu(), x)
    with pytest.warns(UserWarning, match="copies between sky.*a mesh has no links"):
        assert torch.equal(theirs.full_tensor().to(single).cpu(), x)
    with pytest.raises(ConfigurationError, match=f"is on {other.device}, and the mesh is"):
        mesh.each(theirs)
