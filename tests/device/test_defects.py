"""What other remote devices get wrong, as measured on them: each is a promise here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings

import psutil
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import skyward as sky

from ..conftest import only_in_all


def device_processes(compute: sky.Compute) -> list[psutil.Process]:
    """The processes behind a pool's devices."""
    agents = [psutil.Process(node.host.agent_pid) for node in compute._open_fleet.nodes]
    return [
        child
        for agent in agents
        for child in agent.children(recursive=True)
        if any("skyward.device.worker" in part for part in child.cmdline())
    ]


def test_channels_last_convolutions_are_right(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    right = layer(x).detach()
    ours = layer.to(device)(x.to(device))
    assert ours.stride() == right.stride()
    torch.testing.assert_close(ours.cpu(), right)


def test_item_is_the_truth_however_often_the_value_changes(device: torch.device) -> None:
    x = torch.zeros((), device=device)
    for step in range(50):
        x += step * step
        assert x.item() == sum(i * i for i in range(step + 1))


def test_in_place_operations_on_two_devices_do_not_mix(
    device: torch.device, other_device: torch.device
) -> None:
    a, b = torch.zeros(4, device=device), torch.zeros(4, device=other_device)
    for _ in range(100):
        a.add_(1)
        b.sub_(1)
    assert a.tolist() == [100.0] * 4
    assert b.tolist() == [-100.0] * 4
    with pytest.raises(RuntimeError, match="same device, but found sky:"):
        a + b


def test_the_output_of_a_failed_operation_is_never_read_as_data(device: torch.device) -> None:
    table = torch.arange(10.0, device=device)
    inside, outside = (torch.tensor([i], device=device) for i in (3, 30))
    # Shapes are known from here on, so nothing waits for the worker before the end.
    (table.index_select(0, inside) * 2 + 1).neg()
    lost = table.index_select(0, outside)
    later = (lost * 2 + 1).neg()
    with pytest.raises(
        IndexError,
        match=r"^index out of range.*\n\(aten::index_select, operation \d+; it was noticed late: "
        r"SKYWARD_DEVICE_SYNC=1 finds its line\)$",
    ):
        later.cpu()
    with pytest.raises(IndexError, match="aten::index_select"):
        later.cpu()
    assert table.sum().item() == 45.0


@only_in_all
def test_an_error_that_is_noticed_at_once_does_not_say_that_it_was_late() -> None:
    """In another process: the variable is read once."""
    script = """
        import skyward as sky, torch
        with sky.Compute(options=sky.Options(console=False)) as compute:
            table = torch.arange(3.0, device=compute.device("cpu"))
            for index in (1, 99):
                table.index_select(0, torch.tensor([index]).to(table.device))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "SKYWARD_DEVICE_SYNC": "1"},
    )
    assert re.search(r"\n\(aten::index_select, operation \d+\)\n", done.stderr), done.stderr


def test_synchronize_raises_the_first_error_once(device: torch.device) -> None:
    table = torch.arange(10.0, device=device)
    table.index_select(0, torch.tensor([1], device=device))
    table.index_select(0, torch.tensor([99], device=device))
    with pytest.raises(IndexError, match="aten::index_select"):
        torch.sky.synchronize(device)
    torch.sky.synchronize(device)


def test_errors_begin_as_pytorchs_do(device: torch.device) -> None:
    def messages(where: torch.device) -> list[str]:
        said = []
        for wrong in (
            lambda: torch.ones(2, device=where) @ torch.ones(3, device=where),
            lambda: torch.linalg.inv(torch.zeros(2, 2, device=where)),
            lambda: torch.empty(0, device=where).item(),
            lambda: torch.ones(2, dtype=torch.int64, device=where).pow(-1),
        ):
            with pytest.raises((RuntimeError, IndexError)) as caught:
                wrong()
            said.append(str(caught.value))
        return said

    assert messages(device) == messages(torch.device("cpu"))


def test_an_index_beyond_the_end_is_an_error_of_the_next_read(device: torch.device) -> None:
    def message(where: torch.device) -> str:
        with pytest.raises(IndexError) as caught:
            torch.ones(2, device=where)[torch.tensor([5], device=where)].tolist()
        return str(caught.value)

    assert message(device).startswith(message(torch.device("cpu")))


def test_indices_on_the_device_of_a_tensor_that_is_not_there_are_refused(
    device: torch.device,
) -> None:
    with pytest.raises(RuntimeError, match=r"^indices should be either .* \(cpu\)"):
        torch.ones(3)[torch.tensor([1], device=device)]
    assert torch.ones(3, device=device)[torch.tensor([1])].tolist() == [1.0]


def test_numbers_of_two_dtypes_are_refused_at_the_call(device: torch.device) -> None:
    wide, narrow = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device).half()
    target = torch.zeros(2, dtype=torch.int64, device=device)
    for wrong in (
        lambda: wide @ narrow,
        lambda: torch.nn.functional.linear(wide, narrow, narrow[0]),
        lambda: torch.bmm(wide[None], narrow[None]),
        lambda: torch.nn.functional.nll_loss(wide, target, weight=narrow[0]),
    ):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            wrong()
    torch.sky.synchronize(device)


def test_scalars_that_an_operation_refuses_are_refused_at_the_call(device: torch.device) -> None:
    x, whole = torch.ones(3, device=device), torch.ones(3, dtype=torch.int64, device=device)
    uses = (
        lambda bad: x.uniform_(0.0, -1.0 if bad else 1.0),
        lambda bad: x.normal_(0.0, -1.0 if bad else 1.0),
        lambda bad: x.exponential_(-1.0 if bad else 1.0),
        lambda bad: x.histc(4, min=1.0, max=0.5 if bad else 2.0),
        lambda bad: (x / (0.0 if bad else 1.0)).histc(4),
        lambda bad: torch.nn.functional.softshrink(x, -1.0 if bad else 1.0),
        lambda bad: torch.nn.functional.huber_loss(x, x, delta=-1.0 if bad else 1.0),
        lambda bad: whole.pow(-1 if bad else 2),
    )
    for use in uses:
        use(False)  # from here on, the shapes are known
        with pytest.raises(RuntimeError):
            use(True)
    torch.sky.synchronize(device)


def test_a_refused_in_place_operation_leaves_its_tensor_usable(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="must match the size"):
        x.add_(torch.ones(4, device=device))
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_errors_keep_their_class(device: torch.device) -> None:
    torch.linalg.inv(torch.eye(2, device=device))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device=device))
    with pytest.raises(IndexError):
        torch.ones(3, device=device).sum(5)


def test_an_operation_the_worker_does_not_know_is_refused(device: torch.device) -> None:
    library = torch.library.Library("skytests", "DEF")
    library.define("unknown(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"skytests::unknown is not known to the worker"):
        torch.ops.skytests.unknown(torch.ones(2, device=device))
    assert torch.ones(2, device=device).sum().item() == 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ],
    ids=["coo", "csr", "bsr", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_dense_is_refused_where_it_would_be_moved(device: torch.device, make) -> None:
    with pytest.raises(NotImplementedError, match=r"dense tensors only.*call \.to_dense\(\)"):
        make().to(device)
    assert torch.ones(2, device=device).sum().item() == 2.0


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_results_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="cannot live on a sky device"):
        torch.eye(3, device=device).to_sparse()
    with pytest.raises(NotImplementedError, match="cannot live on a sky device"):
        torch.quantize_per_tensor(torch.ones(3, device=device), 0.1, 0, torch.quint8)
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 3, device=device))
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device=device)
    rows = nn.Embedding(4, 3, sparse=True).to(device)
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        rows(torch.tensor([1], device=device)).sum().backward()
    assert torch.ones(2, device=device).sum().item() == 2.0


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_where_it_would_be_made(
    device: torch.device, needs_grad: bool
) -> None:
    """One that needed a gradient ended the process: autograd asks for its sizes, and must get them.

    PyTorch's own jagged tensors are made of dense ones, and work.
    """
    parts = [torch.ones(2, 3), torch.ones(3, 3)]
    there = [part.to(device) for part in parts]
    options = {"requires_grad": needs_grad}
    for make in (
        lambda: torch.nested.nested_tensor(parts, device=device, **options),
        lambda: torch.nested.nested_tensor(there, **options),
        lambda: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=device, **options),
        lambda: torch.nested.nested_tensor([], device=device, **options),
        lambda: torch.nested.as_nested_tensor(parts, device=device),
        lambda: torch.nested.as_nested_tensor(torch.ones(2, 3, device=device)),
        lambda: torch.nested.nested_tensor(parts).to(device),
        lambda: torch.empty_like(torch.nested.nested_tensor(parts), device=device, **options),
        lambda: torch.zeros_like(torch.nested.nested_tensor(parts), device=device, **options),
    ):
        with pytest.raises(NotImplementedError, match="dense tensors only"):
            make()
    assert torch.nested.nested_tensor(parts, **options).to_padded_tensor(0.0).shape == (2, 3, 3)
    jagged = torch.nested.nested_tensor(parts, device=device, layout=torch.jagged, **options)
    assert jagged.to_padded_tensor(0.0).cpu().tolist()[0][2] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda host, other: host.add_(other),
        lambda host, other: torch.add(other, 1, out=host),
        lambda host, other: torch._foreach_mul_([host], [other]),
    ],
    ids=["in place", "out", "foreach"],
)
def test_nothing_is_written_to_a_host_tensor_behind_its_back(device: torch.device, write) -> None:
    host = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="same device, but found cpu and sky"):
        write(host, torch.tensor(2.0, device=device))
    assert (torch.tensor(2.0, device=device) + host).item() == 3.0


def test_a_storage_stays_on_its_device(device: torch.device, other_device: torch.device) -> None:
    here = torch.ones(2, device=device)
    for source in (torch.ones(3), torch.ones(3, device=other_device)):
        for given in (source, source.untyped_storage()):
            with pytest.raises(RuntimeError, match="storage on different device"):
                here.set_(given)
    with pytest.raises(RuntimeError, match="storage on different device"):
        torch.ones(2).set_(here)
    assert here.tolist() == [1.0, 1.0]


def test_manual_seed_gives_the_numbers_of_the_hardware(device: torch.device) -> None:
    torch.manual_seed(11)
    right = torch.randn(8), torch.rand(8), torch.randperm(8)
    torch.manual_seed(11)
    ours = (
        torch.randn(8, device=device),
        torch.rand(8, device=device),
        torch.randperm(8, device=device),
    )
    assert [t.tolist() for t in ours] == [t.tolist() for t in right]
    state = torch.sky.get_rng_state(device)
    first = torch.rand(4, device=device).tolist()
    torch.sky.set_rng_state(state, device)
    assert torch.rand(4, device=device).tolist() == first


def test_a_seed_set_before_there_was_a_device_holds_for_it() -> None:
    torch.manual_seed(13)
    right = torch.randn(4)
    with sky.Compute(options=sky.Options(console=False)) as compute:
        torch.manual_seed(13)
        device = compute.device("cpu")
        assert torch.randn(4, device=device).tolist() == right.tolist()
        assert torch.Generator(device).initial_seed() == torch.Generator().initial_seed()


def test_a_generator_of_ones_own(device: torch.device) -> None:
    ours = torch.Generator(device).manual_seed(5)
    right = torch.Generator().manual_seed(5)
    for _ in range(2):
        a = torch.randn(4, device=device, generator=ours)
        assert a.tolist() == torch.randn(4, generator=right).tolist()
    with pytest.raises(RuntimeError, match="Expected a 'sky' device type for generator"):
        torch.randn(4, device=device, generator=right)


@pytest.mark.parametrize("mebibytes", [1, 17, 40])
def test_large_tensors_come_and_go_whole(device: torch.device, mebibytes: int) -> None:
    x = torch.arange(mebibytes << 18, dtype=torch.int32)
    assert torch.equal(x.to(device).cpu(), x)
    assert torch.equal(x.to(device)[1::3].cpu(), x[1::3])


def test_autocast_lowers_and_keeps_what_it_should(device: torch.device) -> None:
    x = torch.randn(4, 4, device=device)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert torch.softmax(x @ x, 0).dtype is torch.float32
    assert (x @ x).dtype is torch.float32


def test_unique_nonzero_and_masks_have_their_true_size(device: torch.device) -> None:
    for x in (torch.tensor([3, 1, 3, 2]), torch.tensor([5, 5, 5, 5])):
        ours = x.to(device)
        for get in (
            lambda t: t.unique(return_inverse=True, return_counts=True),
            lambda t: t.unique_consecutive(),
            lambda t: (t > 2).nonzero(),
            lambda t: t[t > 2],
            lambda t: t.bincount(),
        ):
            torch.testing.assert_close(
                torch.utils._pytree.tree_map(torch.Tensor.cpu, get(ours)), get(x)
            )


def test_complex_scalars_and_lazy_conjugates(device: torch.device) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    ours = x.to(device)
    assert (ours * (2 - 1j) + 1j).tolist() == (x * (2 - 1j) + 1j).tolist()
    assert torch.full((2,), 1 + 1j, device=device).tolist() == [1 + 1j, 1 + 1j]
    assert ours.conj().tolist() == x.conj().tolist()
    assert torch.dot(ours.conj(), ours).item() == torch.dot(x.conj(), x).item()
    assert ours.conj().imag.tolist() == x.conj().imag.tolist()


def test_copy_broadcasts(device: torch.device) -> None:
    x = torch.zeros(3, 4, device=device)
    assert x.copy_(torch.arange(4.0)).tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert x.copy_(torch.ones(3, 1, device=device)).sum().item() == 12.0
    host = torch.zeros(2, 3)
    assert host.copy_(torch.arange(3.0, device=device)).tolist() == [[0.0, 1.0, 2.0]] * 2


def test_cat_of_300_views(device: torch.device) -> None:
    x = torch.arange(900.0, device=device)
    assert torch.cat([x[3 * i : 3 * i + 3] for i in range(300)]).tolist() == list(range(900))


def test_a_resized_out_does_not_confuse_what_comes_after(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    for _ in range(3):
        out = torch.empty(0, device=device)
        torch.add(x, 1, out=out)
        assert out.tolist() == [1.0, 2.0, 3.0]
        out.resize_(0)
        assert torch.cat([out, x]).tolist() == [0.0, 1.0, 2.0]


def test_a_killed_worker_raises(nothing_left: None) -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        device = compute.device("cpu")
        x = torch.ones(4, device=device)
        torch.sky.synchronize(device)
        # Compilers leave such tensors behind; the error does not look into them.
        traced = FakeTensorMode().from_tensor(x)
        (process,) = device_processes(compute)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"{device}.* is gone"):
            for _ in range(1000):
                x = x + 1
            x.sum().item()
        with pytest.raises(RuntimeError, match=r"gone|no device"):
            (x + 1).cpu()
        assert traced.device == device
        torch.manual_seed(0)  # seeds what is left, and does not stumble over what is gone


def test_a_training_step_waits_for_nothing_but_the_value_read(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(6, 4), torch.randint(2, (6,))

    def step(*, reads: bool) -> int:
        before = sky.device_stats(device).waits
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if reads:
            loss.item()
        return sky.device_stats(device).waits - before

    step(reads=True)
    step(reads=True)
    assert [step(reads=reads) for reads in (False, True, False, True)] == [0, 1, 0, 1]


def _reads_all_the_time(x: torch.Tensor) -> None:
    for _ in range(2000):
        x.sum().item()


def test_a_loop_of_waits_is_told_once_with_its_line() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        x = torch.ones(3, device=compute.device("cpu"))
        with pytest.warns(UserWarning, match="this loop waits for sky:") as told:
            _reads_all_the_time(x)
    (warning,) = told
    assert warning.filename == __file__
    assert warning.lineno == _reads_all_the_time.__code__.co_firstlineno + 2


def test_that_warning_may_be_an_error() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        x = torch.ones(3, device=compute.device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="this loop waits for sky:"):
                _reads_all_the_time(x)
        assert x.sum().item() == 3.0
