"""Models and arrays out and back: what arrives is what was sent, and belongs to who got it."""

import copy

import numpy as np
import pytest

import skyward as sky

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from .conftest import other_case  # noqa: E402

QUIET = sky.Options(console=False)
LARGE = 1 << 19
"""Elements of a tensor that travels as a blob and not inside the frame."""


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=other_case)])
def compute(request, sharing):
    """One node, so that every call meets what earlier ones left behind."""
    pool = sky.Compute(sky.Local(transport=request.param), options=QUIET)
    with sharing(pool) as entered:
        yield entered


class Classifier(nn.Module):
    """A class of this module, which no worker can import."""

    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5)
        )
        self.head = nn.Linear(width, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.head(self.features(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.out = nn.Linear(12, 50, bias=False)
        self.out.weight = self.embed.weight


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 8, generator=generator)
    y = (x[:, :3].argmax(1)).long()
    return x, y


@sky.function
def train(model, x, y, epochs):
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.cpu()


@torch.no_grad()
def accuracy(model, x, y):
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# Models.


def test_a_model_goes_out_untrained_and_comes_back_trained(compute):
    torch.manual_seed(1)
    model = Classifier()
    before = copy.deepcopy(model.state_dict())
    x, y = problem()

    trained = train(model, x, y, epochs=60) >> compute

    assert type(trained) is Classifier
    assert accuracy(trained, x, y) > 0.9 > accuracy(model, x, y)
    assert same(model.state_dict(), before), "the model here must not change"
    assert same(trained.state_dict(), train.local(copy.deepcopy(model), x, y, 60).state_dict())


def test_buffers_and_modes_come_back_too(compute):
    x, y = problem()

    trained = train(Classifier(), x, y, epochs=3) >> compute

    assert trained.training
    assert int(trained.steps) == 3
    assert int(trained.features[1].num_batches_tracked) == 3
    assert not torch.equal(trained.features[1].running_mean, torch.zeros(16))
    trained.eval()
    assert torch.equal(trained(x), trained(x)), "dropout must be off in eval mode"
    trained.train()
    assert not torch.equal(trained(x), trained(x)), "and on in training mode"


def test_a_model_in_eval_mode_stays_in_it(compute):
    evaluate = sky.function(lambda model, x: (model.training, model(x), model))
    model, (x, _) = Classifier().eval(), problem()

    training, output, back = evaluate(model, x) >> compute

    assert not training
    assert not back.training
    assert torch.equal(output, model(x))


def test_a_model_that_came_back_can_be_trained_further_here_and_there(compute):
    x, y = problem()
    trained = train(Classifier(), x, y, epochs=1) >> compute

    here = train.local(copy.deepcopy(trained), x, y, 5)
    there = train(trained, x, y, epochs=5) >> compute

    assert same(here.state_dict(), there.state_dict())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in there.parameters())


def test_frozen_parameters_stay_frozen(compute):
    model = Classifier()
    model.head.weight.requires_grad_(False)

    back = sky.function(lambda model: model)(model) >> compute

    assert [p.requires_grad for p in back.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert all(isinstance(parameter, nn.Parameter) for parameter in back.parameters())


def test_shared_weights_stay_shared(compute):
    @sky.function
    def step(model):
        shared = model.out.weight is model.embed.weight
        with torch.no_grad():
            model.embed.weight += 1
        return shared, model

    model = Tied()
    shared, back = step(model) >> compute

    assert shared
    assert back.out.weight is back.embed.weight
    assert torch.equal(back.out.weight, model.out.weight + 1)
    with torch.no_grad():
        back.embed.weight.zero_()
    assert not back.out.weight.any()


def test_an_optimiser_goes_along_with_its_state_and_its_model(compute):
    @sky.function
    def resume(model, optimiser, x, y):
        assert optimiser.param_groups[0]["params"][0] is next(model.parameters())
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        return model, optimiser

    x, y = problem()
    model = Classifier().eval()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    here, here_optimiser = copy.deepcopy((model, optimiser))

    for _ in range(3):
        model, optimiser = resume(model, optimiser, x, y) >> compute
        here, here_optimiser = resume.local(here, here_optimiser, x, y)

    assert optimiser.param_groups[0]["params"][0] is next(model.parameters())
    states = list(zip(optimiser.state.values(), here_optimiser.state.values(), strict=True))
    assert len(states) == len(list(model.parameters()))
    assert all(same(there, local) for there, local in states)
    assert same(model.state_dict(), here.state_dict())


def test_a_state_dict_goes_out_and_back(compute):
    model, other = Classifier(), Classifier()
    back = sky.function(lambda state: state)(model.state_dict()) >> compute

    other.load_state_dict(back)

    assert same(other.state_dict(), model.state_dict())


@other_case
def test_a_broadcast_gives_every_caller_a_model_of_its_own():
    with sky.Compute(nodes=2, options=QUIET) as pool:
        first, second = sky.function(lambda model: model)(Classifier(width=64)) @ pool

    assert same(first.state_dict(), second.state_dict())
    with torch.no_grad():
        first.head.weight.zero_()
    assert second.head.weight.any()


# Tensors, as they are.

TENSORS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "strided": lambda: torch.arange(40)[3:31:4],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "half": lambda: torch.randn(5).half(),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "large": lambda: torch.randn(LARGE),
    "part of a large one": lambda: torch.randn(4, LARGE)[1, 5:-5],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(compute, name):
    tensor = TENSORS[name]()

    back = sky.function(lambda tensor: tensor)(tensor) >> compute

    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_views_of_one_storage_stay_views_of_one_storage(compute):
    @sky.function
    def write_through(base, view):
        view[0] = 7
        return base, view

    base = torch.zeros(10)
    back, view = write_through(base, base[4:]) >> compute

    assert back[4] == 7
    view[1] = 8
    assert back[5] == 8
    assert not base.any()


def test_a_small_view_does_not_drag_its_whole_storage_along(compute):
    base = torch.zeros(8 * LARGE)
    before = compute.stats().bytes_received

    back = sky.function(lambda tensor: tensor[:10] + 1)(base[:10]) >> compute

    assert torch.equal(back, torch.ones(10))
    assert compute.stats().bytes_received - before < 100_000


# Whose it is.


@sky.function
def overwrite(array, value):
    """Returns what was there, and leaves something else behind."""
    found = float(array[0])
    array[:] = value
    return found, float(array.sum())


@pytest.mark.parametrize("size", [16, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_what_a_worker_does_to_its_argument_is_seen_nowhere_else(compute, kind, size):
    data = torch.ones(size) if kind == "tensor" else np.ones(size, np.float32)

    for value in (5, 6, 7):
        assert overwrite(data, value) >> compute == (1.0, value * size)

    assert float(data.sum()) == size


@pytest.mark.parametrize("size", [16, LARGE], ids=["small", "large"])
def test_a_write_through_a_numpy_view_is_seen_by_the_next_call(compute, size):
    """No version counter of torch's notices such a write."""
    tensor = torch.zeros(size)
    view = tensor.numpy()
    total = sky.function(lambda tensor: float(tensor.sum()))

    seen = []
    for value in range(5):
        view[size // 2] = value
        seen.append(total(tensor) >> compute)

    assert seen == [0, 1, 2, 3, 4]


def test_a_write_between_two_submissions_is_seen_by_the_second_only(compute):
    tensor = torch.zeros(LARGE)
    total = sky.function(lambda tensor: float(tensor.sum()))

    futures = []
    for value in range(5):
        tensor.fill_(value)
        futures.append(total(tensor) > compute)

    assert [future.result(100) for future in futures] == [value * LARGE for value in range(5)]


def test_an_unchanged_large_tensor_is_not_sent_again(compute):
    tensor = torch.randn(LARGE)
    total = sky.function(lambda tensor: float(tensor.sum()))
    first = total(tensor) >> compute
    before = compute.stats().bytes_sent

    for _ in range(5):
        assert total(tensor) >> compute == first

    assert compute.stats().bytes_sent - before < 50_000


@pytest.mark.parametrize("size", [16, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_results_can_be_written_to_and_are_independent_of_each_other(compute, kind, size):
    @sky.function
    def ones(size):
        made = torch.ones(size)
        return made if kind == "tensor" else made.numpy()

    results = [ones(size) >> compute for _ in range(3)]
    results += [(ones(size) > compute).result(100)]

    for number, result in enumerate(results):
        result[:] = number
    assert [float(result.sum()) for result in results] == [size * n for n in range(4)]
    assert float((ones(size) >> compute).sum()) == size


@pytest.mark.parametrize("size", [16, LARGE], ids=["small", "large"])
def test_parts_of_one_result_are_independent_of_each_other(compute, size):
    pair = sky.function(lambda size: (np.ones(size), np.ones(size), torch.ones(size)))

    first, second, third = pair(size) >> compute
    first[:] = 2
    third[:] = 3

    assert float(second.sum()) == size
    assert float(first.sum()) == 2 * size


def test_a_result_outlives_the_call_the_worker_and_the_pool():
    with sky.Compute(options=QUIET) as pool:
        made = sky.function(lambda n: np.arange(n))(LARGE) >> pool
        for _ in range(20):  # would reuse its memory, were it free
            sky.function(lambda n: np.zeros(n, np.int64))(LARGE) >> pool

    assert np.array_equal(made, np.arange(LARGE))
    made += 1
    assert int(made[0]) == 1


def test_a_result_may_be_sent_out_again(compute):
    double = sky.function(lambda tensor: tensor * 2)
    value = torch.ones(LARGE)

    for _ in range(5):
        value = double(value) >> compute

    assert torch.equal(value, torch.full((LARGE,), 32.0))


def test_the_same_tensor_twice_in_a_call_is_one_tensor_there(compute):
    tensor = torch.zeros(LARGE)
    same_object = sky.function(lambda a, b: (a is b, a.data_ptr() == b.data_ptr()))

    assert same_object(tensor, tensor) >> compute == (True, True)


def test_a_tensor_with_a_gradient_history_arrives_as_a_leaf_of_its_own(compute):
    weight = torch.ones(3, requires_grad=True)
    back = sky.function(lambda tensor: tensor)(weight) >> compute

    assert back.requires_grad
    assert back.is_leaf
    (back * 2).sum().backward()
    assert torch.equal(back.grad, torch.full((3,), 2.0))
    assert weight.grad is None


def test_threads_of_one_process_do_not_share_an_argument():
    worker = sky.Worker(concurrency=2, executor="thread")
    array = np.ones(LARGE, np.float32)

    with sky.Compute(worker=worker, options=QUIET) as pool:
        calls = [overwrite(array, value) for value in range(6)]
        assert sky.gather(*calls) >> pool == [(1.0, value * LARGE) for value in range(6)]
