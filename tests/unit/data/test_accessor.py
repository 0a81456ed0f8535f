"""``AsynchronousDataAccessor``: what it delivers, and when."""

import itertools
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import popsim_torch as poptorch
from popsim_torch.arguments.parsers import ICustomArgParser, registerCustomArgParser
from popsim_torch.data.accessor import AsynchronousDataAccessor
from popsim_torch.dataloader import DataLoader
from popsim_torch.enums import DataLoaderMode, SharingStrategy
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.options import Options
from popsim_torch.queue_state import loaders


def make(dataset, **arguments):
    """An accessor that starts quickly."""
    return AsynchronousDataAccessor(dataset, sharing_strategy=SharingStrategy.Fork, **arguments)


class Numbers:
    """The tensors 0 to n - 1, loaded again in each pass, and a record of the loads of each pass."""

    def __init__(self, count):
        self.count = count
        self.log = torch.full((10000,), -1).share_memory_()
        self.num_logged = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self):
        for i in range(self.count):
            self.log[self.num_logged] = i
            self.num_logged += 1
            yield torch.tensor(i)

    def loaded(self):
        return self.log[: int(self.num_logged)].tolist()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.002)


def numbers_of(accessor):
    return [int(element) for element in accessor]


# Elements


def test_is_public():
    assert poptorch.AsynchronousDataAccessor is AsynchronousDataAccessor


def test_elements_come_in_order_as_often_as_asked():
    accessor = make(Numbers(20))
    for _ in range(3):
        assert numbers_of(accessor) == list(range(20))


@pytest.mark.parametrize("buffer_size", [1, 2, 50])
def test_any_buffer_size_delivers_the_same(buffer_size):
    accessor = make(Numbers(20), buffer_size=buffer_size)
    assert numbers_of(accessor) == numbers_of(accessor) == list(range(20))


def test_sequences_come_back_as_lists():
    accessor = make([(torch.tensor(1), torch.ones(2, 3)), (torch.tensor(2), torch.zeros(2, 3))])
    first, second = accessor
    assert type(first) is list
    assert first[0] == 1
    assert torch.equal(first[1], torch.ones(2, 3))
    assert second[0] == 2


def test_dicts_come_back_as_dicts():
    (element,) = make([{"x": torch.arange(3), "y": torch.tensor(True)}])
    assert type(element) is dict
    assert element["x"].tolist() == [0, 1, 2]
    assert element["y"].dtype is torch.bool


def test_values_survive_in_every_element_type_and_order_of_memory():
    values = [
        torch.randn(3, 4, 2).permute(2, 0, 1),
        torch.randn(5).half(),
        torch.randn(5).bfloat16(),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.randn(2, dtype=torch.complex128),
        torch.randn(4, requires_grad=True),
        torch.empty(0, 3),
        torch.ones(1, 3).expand(4, 3),
    ]
    (element,) = make([values])
    for actual, expected in zip(element, values, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=0, equal_nan=True)


def test_types_that_only_the_worker_knows_do_not_matter():
    pair = namedtuple("pair", "x y")
    assert list(make([pair(torch.tensor(1), torch.tensor(2))])) == [[1, 2]]


class Named:
    def __init__(self, tensor, name):
        self.tensor = tensor
        self.name = name


class NamedParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.tensor

    def reconstruct(self, original_structure, tensor_iterator):
        return Named(next(tensor_iterator), original_structure.name)


@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
def test_registered_types_are_reconstructed(strategy):
    registerCustomArgParser(Named, NamedParser())
    try:
        data = [Named(torch.tensor(i), "mine") for i in range(3)]
        elements = list(AsynchronousDataAccessor(data, sharing_strategy=strategy))
    finally:
        registerCustomArgParser(Named, None)
    assert [element.tensor.item() for element in elements] == [0, 1, 2]
    assert {element.name for element in elements} == {"mine"}


def test_elements_can_be_kept():
    accessor = make([torch.full((1000,), float(i)) for i in range(40)])
    for _ in range(2):
        kept = list(accessor)
        assert [element.mean() for element in kept] == list(range(40))


def test_elements_outlive_the_accessor():
    accessor = make(Numbers(2))
    first = next(accessor)
    accessor.terminate()
    del accessor
    assert first == 0


def test_a_loop_is_not_given_copies():
    accessor = make([torch.full((1000,), float(i)) for i in range(40)])
    places = set()
    for element in accessor:
        places.add(element.data_ptr())
    assert len(places) <= 3 + 2  # the slots of the ring


def test_elements_belong_to_the_caller():
    data = [torch.zeros(3) for _ in range(10)]
    accessor = make(data)
    for _ in range(2):
        for element in accessor:
            assert element.sum() == 0
            element.fill_(1)


def test_the_random_state_is_that_of_the_caller():
    class Random:
        def __iter__(self):
            yield torch.rand(4)

    torch.manual_seed(3)
    accessor = make(Random())
    assert torch.equal(next(accessor), torch.rand(4))


# Datasets


class ByIndex(Dataset):
    def __init__(self, end):
        self.end = end

    def __getitem__(self, index):
        if index == 3:
            raise self.end
        return torch.tensor(index)


@pytest.mark.parametrize("end", [IndexError, StopIteration])
def test_datasets_without_iter_end_at_an_exception(end):
    accessor = make(ByIndex(end))
    assert numbers_of(accessor) == numbers_of(accessor) == [0, 1, 2]


def test_a_pytorch_loader_can_be_wrapped():
    data = TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=5, num_workers=2, persistent_workers=True)
    list(loader)  # the loader has its own workers now
    accessor = make(loader)
    assert [x.tolist() for (x,) in accessor] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [x.tolist() for (x,) in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert len(accessor) == 2


def test_a_poptorch_loader_can_be_wrapped():
    loader = DataLoader(Options().deviceIterations(2), list(range(9)), batch_size=2)
    assert [batch.tolist() for batch in make(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_loader_that_is_asynchronous_already_is_refused():
    loader = DataLoader(
        Options(),
        list(range(4)),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": SharingStrategy.Fork},
    )
    with pytest.raises(Error, match="already has an accessor"):
        make(loader)


def test_a_loader_with_a_short_last_batch_needs_rebatching():
    loader = DataLoader(Options(), list(range(8)), batch_size=3, drop_last=False)
    with pytest.raises(UsageAssertionError, match="Pass rebatched_size"):
        make(loader)
    assert [batch.tolist() for batch in make(loader, rebatched_size=4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_length_is_that_of_the_dataset():
    accessor = make(TensorDataset(torch.arange(3)))
    assert len(accessor) == 3
    accessor.terminate()
    assert len(accessor) == 3


def test_no_length_without_one_of_the_dataset():
    with pytest.raises(TypeError):
        len(make(Numbers(3)))


# Passes


def test_leaving_a_pass_early_starts_the_next_one_from_the_beginning():
    accessor = make(Numbers(30))
    for length in (1, 2, 3, 7, 29, 30):
        assert [int(x) for x in itertools.islice(accessor, length)] == list(range(length))
        assert numbers_of(accessor) == list(range(30))


@pytest.mark.parametrize("arguments", [{"load_indefinitely": False}, {"early_preload": True}])
def test_other_ways_to_load_ahead_deliver_the_same(arguments):
    accessor = make(Numbers(10), **arguments)
    assert numbers_of(accessor) == numbers_of(accessor) == list(range(10))
    assert [int(x) for x in itertools.islice(accessor, 4)] == [0, 1, 2, 3]
    assert numbers_of(accessor) == list(range(10))


def test_iter_returns_the_accessor():
    accessor = make(Numbers(3))
    assert iter(accessor) is accessor


def test_next_needs_no_iter():
    accessor = make(Numbers(2))
    assert next(accessor) == 0
    assert next(accessor) == 1


def test_a_finished_pass_stays_finished():
    accessor = make(Numbers(2))
    list(accessor)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(accessor)
    assert numbers_of(accessor) == [0, 1]


def test_a_pass_that_was_never_advanced_is_not_started_again():
    data = Numbers(3)
    accessor = make(data, load_indefinitely=False)
    for _ in range(5):
        iter(accessor)
    assert numbers_of(accessor) == [0, 1, 2]
    assert data.loaded() == [0, 1, 2]


def test_one_shot_iterators_have_one_pass():
    accessor = make(iter([torch.tensor(0), torch.tensor(1)]))
    assert numbers_of(accessor) == [0, 1]
    assert numbers_of(accessor) == []
    assert numbers_of(accessor) == []


def test_only_the_first_element_is_loaded_before_the_first_pass():
    data = Numbers(9)
    accessor = make(data)
    assert data.loaded() == [0]
    time.sleep(0.05)
    assert data.loaded() == [0]
    assert numbers_of(accessor) == list(range(9))


def test_early_preload_fills_the_buffer():
    data = Numbers(100)
    accessor = make(data, buffer_size=3, early_preload=True)
    wait_until(lambda: len(data.loaded()) >= 3)
    assert numbers_of(accessor) == list(range(100))


def test_the_next_pass_is_loaded_ahead():
    data = Numbers(4)
    accessor = make(data)
    assert numbers_of(accessor) == [0, 1, 2, 3]
    wait_until(lambda: len(data.loaded()) >= 6)
    assert data.loaded()[:6] == [0, 1, 2, 3, 0, 1]
    assert numbers_of(accessor) == [0, 1, 2, 3]


def test_the_next_pass_can_wait():
    data = Numbers(4)
    accessor = make(data, load_indefinitely=False)
    assert numbers_of(accessor) == [0, 1, 2, 3]
    time.sleep(0.05)
    assert data.loaded() == [0, 1, 2, 3]
    assert numbers_of(accessor) == [0, 1, 2, 3]


# Rebatching


@pytest.mark.parametrize("sizes", [[1] * 10, [10], [3, 3, 4], [2, 0, 7, 1], [4, 4, 2]])
def test_rebatching_cuts_and_joins(sizes):
    chunks = torch.arange(20).view(10, 2).split(sizes)
    accessor = make([(chunk, -chunk[:, 0]) for chunk in chunks], rebatched_size=4)
    for _ in range(2):
        elements = list(accessor)
        assert [x[:, 0].tolist() for x, _ in elements] == [[0, 2, 4, 6], [8, 10, 12, 14]]
        assert all(torch.equal(y, -x[:, 0]) for x, y in elements)


def test_rebatching_copes_with_data_that_reuses_its_memory():
    class Reuses:
        def __iter__(self):
            tensor = torch.zeros(3)
            for i in range(8):
                yield tensor.fill_(i)

    elements = list(make(Reuses(), rebatched_size=4))
    assert [e.tolist() for e in elements[:3]] == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]


def test_length_when_rebatched():
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=3)
    assert len(make(loader, rebatched_size=4)) == 4 * 3 // 4
    with pytest.raises(TypeError, match="no batch_size"):
        len(make([torch.ones(4)], rebatched_size=4))


@pytest.mark.parametrize("size", [1, 0, -3, "a", 2.0, True, [4]])
def test_rebatched_size_exceeds_one(size):
    with pytest.raises(UsageAssertionError, match="must be None or an int that exceeds 1"):
        make([torch.ones(4)], rebatched_size=size)


# Errors


class Fails:
    def __init__(self, *numbers):
        self.numbers = numbers

    def __iter__(self):
        yield from map(torch.tensor, self.numbers)
        raise OSError("disk is on fire")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "the dataset is empty"),
        (Fails(), "OSError: disk is on fire"),
        ([1, 2], "an element of the dataset is a int"),
        ([[torch.ones(1), [torch.ones(1)]]], "must be flat containers"),
        (7, "'int' object is not iterable"),
    ],
)
def test_a_bad_first_element_is_an_error_at_construction(data, text, capfd):
    with pytest.raises(Error, match="worker thread failed to start") as caught:
        make(data)
    assert text in str(caught.value)
    printed = capfd.readouterr().err
    assert printed.startswith("Traceback")
    assert text in printed


def test_too_few_samples_for_one_batch_are_an_empty_dataset(capfd):
    with pytest.raises(Error, match="has too few samples"):
        make([torch.ones(3)], rebatched_size=4)
    assert "too few" in capfd.readouterr().err


def test_a_later_error_comes_behind_the_elements_before_it(capfd):
    accessor = make(Fails(0, 1, 2))
    assert [int(next(accessor)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(AssertionError, match=r"died of OSError: disk is on fire") as caught:
        next(accessor)
    assert isinstance(caught.value, Error)
    assert "disk is on fire" in capfd.readouterr().err
    for use in (iter, next):
        with pytest.raises(UsageAssertionError, match="was terminated"):
            use(accessor)


@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(1), torch.ones(2).double(), torch.ones(2, 1), torch.tensor(1.0)],
)
def test_elements_have_one_shape_and_type(other, capfd):
    accessor = make([torch.ones(2), other])
    assert torch.equal(next(accessor), torch.ones(2))
    with pytest.raises(UsageAssertionError, match="must have the same dtypes and shapes"):
        next(accessor)


@pytest.mark.parametrize(
    "chunks",
    [
        [torch.ones(2), torch.ones(2, 1)],
        [torch.ones(2), torch.ones(2).int()],
        [torch.ones(2), torch.tensor(1.0)],
        [torch.tensor(1.0)],
        [(torch.ones(2), torch.ones(3))],
    ],
)
def test_batches_that_cannot_be_joined_are_an_error(chunks, capfd):
    with pytest.raises(Error, match="failed to start: UsageValueError"):
        make([*chunks, *chunks], rebatched_size=6)


def test_data_that_cannot_be_pickled():
    with pytest.raises(Error, match=r"failed to start.*SharingStrategy\.Fork"):
        AsynchronousDataAccessor([lambda: 0])
    assert numbers_of(make([torch.tensor(1)])) == [1]


@pytest.mark.parametrize("buffer_size", [0, -1, 1.5])
def test_buffer_size_is_a_positive_int(buffer_size):
    with pytest.raises(ValueError, match="must be an int of at least 1"):
        make([torch.ones(1)], buffer_size=buffer_size)


def test_sharing_strategy_must_be_the_enum():
    with pytest.raises(UsageAssertionError, match="sharing_strategy=2 is not"):
        AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=2)


# How full it is


def state_when(accessor, condition):
    """Take elements, slowly, until the state of the accessor meets a condition; return it."""
    for _ in range(50):
        next(accessor)
        state = accessor._queue_state()
        if condition(state):
            return state
        time.sleep(0.01)
    raise AssertionError(state)


class Slow:
    """Tensors that take their time."""

    def __iter__(self):
        for i in range(100):
            time.sleep(0.005)
            yield torch.tensor(i)


def test_the_worker_waits_for_a_loop_that_is_slow():
    accessor = make(Numbers(100), buffer_size=3)
    assert accessor not in loaders()
    iter(accessor)
    assert accessor in loaders()
    state = state_when(accessor, lambda state: state.ready == 3)
    assert (state.name, state.depth) == ("AsynchronousDataAccessor", 3)
    waits = state.waits
    state = state_when(accessor, lambda state: state.seconds_full > 0.02)
    assert state.waits == waits
    accessor.terminate()
    assert accessor._queue_state() is None


def test_a_loop_waits_for_data_that_is_slow():
    accessor = make(Slow(), buffer_size=3)
    for _ in range(20):
        next(accessor)
    state = accessor._queue_state()
    assert state.ready == 0 and state.waits >= 15
    assert state.seconds_waited > 0.05
    accessor.terminate()


def test_a_loader_says_how_full_it_is():
    data = TensorDataset(torch.arange(64.0))
    loader = DataLoader(
        Options(),
        data,
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": SharingStrategy.Fork, "buffer_size": 2},
    )
    for _ in loader:
        time.sleep(0.005)
    (state,) = [one._queue_state() for one in loaders() if one is loader._accessor]
    assert (state.name, state.depth) == ("DataLoader", 2)
    assert state.ready <= 2
    loader.terminate()
