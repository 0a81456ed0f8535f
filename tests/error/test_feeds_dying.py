"""When a dataset's thread ends, for any reason, no loop waits for it."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds import producer
from tests.error.running_loops import no_thread_stays, passing  # noqa: F401

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]


class Speechless(Exception):
    """An error whose message cannot be read."""

    def __str__(self):
        raise ValueError("no text")


class Exits(Exception):
    """An error whose message ends the program when it is read."""

    def __str__(self):
        raise SystemExit


class Unfinished(Error):
    """An error of the package's class whose constructor has not run."""

    def __init__(self):
        pass


def failing(error):
    """Return a dataset whose element 2 raises an error."""

    def items():
        yield torch.zeros(2)
        yield torch.ones(2)
        raise error

    return items


CASES = {
    "no text": (Speechless(), r"element 2 .*Speechless: \(its message cannot be shown: __str__"),
    "a text that exits": (
        Exits(),
        r"element 2 .*Exits: \(its message .*: __str__ raises SystemExit",
    ),
    "no UTF-8": (OSError("file \udcff"), r"element 2 .*OSError: file \\udcff"),
    "an error of ours, no UTF-8": (Error("file \udcff"), r"file \\udcff"),
    "an error of ours, half made": (Unfinished(), "has ended, and could not say why"),
    "exit": (SystemExit("gone"), "element 2 .*SystemExit: gone"),
    "interrupt": (KeyboardInterrupt(), "element 2 .*KeyboardInterrupt"),
    "memory": (MemoryError(), "element 2 .*MemoryError"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("error", "text"), CASES.values(), ids=CASES)
def test_the_dataset_raises(error, text):
    infeed, outfeed = poptorch.InfeedQueue(failing(error)), poptorch.OutfeedQueue()
    with infeed, pytest.raises(Error, match=text):
        passing(infeed, outfeed, 5)()
    assert outfeed.dequeue()[:, 0].tolist() == [0, 1]


def test_the_first_element_fails_without_a_text():
    def items():
        raise Speechless
        yield

    with (
        poptorch.InfeedQueue(items) as infeed,
        pytest.raises(Error, match=r"at element 0 .*cannot"),
    ):
        passing(infeed, poptorch.OutfeedQueue(), 5)()


def test_the_thread_dies_before_it_begins(monkeypatch):
    def die():
        raise RuntimeError("no threads today")

    monkeypatch.setattr(producer._native, "use_one_thread", die)
    infeed = poptorch.InfeedQueue(failing(ValueError("never reached")))
    with infeed, pytest.raises(Error, match=r"element 0 .*no threads today"):
        passing(infeed, poptorch.OutfeedQueue(), 5)()


def test_our_frames_of_a_failure_keep_no_dataset():
    class Items:
        def __init__(self):
            self.left = 2

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise ValueError("broken")
            return torch.zeros(2)

    with poptorch.InfeedQueue(Items) as infeed:
        with pytest.raises(Error, match="broken"):
            passing(infeed, poptorch.OutfeedQueue(), 5)()
        step = infeed._failure().__traceback__
        frames = []
        while step is not None:
            frames.append(step.tb_frame)
            step = step.tb_next
    assert [frame.f_code.co_name for frame in frames] == ["_run", "__next__"]
    held = [value for frame in frames[:1] for value in frame.f_locals.values()]
    held += [item for value in held if isinstance(value, list) for item in value]
    assert not any(isinstance(value, Items) for value in held)


LAYOUTS = [torch.strided, torch.jagged]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
class TestNestedTensors:
    @pytest.fixture
    def nested(self, layout):
        parts = [torch.ones(2), torch.ones(3)]
        return torch.nested.nested_tensor(parts, layout=layout)

    def test_in_data(self, nested):
        for data, number in (([nested], ""), ([torch.ones(2), nested], " 1")):
            infeed = poptorch.InfeedQueue(data)
            text = f"the element is a nested|element{number} is a nested tensor. Elements are dense"
            with infeed, pytest.raises(Error, match=text):
                passing(infeed, poptorch.OutfeedQueue(), 2)()

    def test_enqueued(self, nested):
        outfeed = poptorch.OutfeedQueue()

        @poptorch.function
        def program():
            poptorch.repeat(2, lambda: outfeed.enqueue({"x": nested}))

        with pytest.raises(UsageTypeError, match=r"the element\['x'\] is a nested tensor.*Pad it"):
            program()

    def test_carried_or_an_argument(self, nested):
        @poptorch.function
        def carries():
            return poptorch.repeat(2, lambda x: x + 1, nested)

        @poptorch.function
        def takes(x):
            return poptorch.repeat(2, lambda y: y + 1, 1.0)

        with pytest.raises(UsageTypeError, match=r"inputs\[0\] is a nested tensor. Carried"):
            carries()
        with pytest.raises(UsageTypeError, match=r"takes.*argument 0 is a nested tensor"):
            takes(nested)

    def test_a_nested_tensor_of_equal_parts_is_a_dataset(self, layout):
        parts = [torch.zeros(2), torch.ones(2)]
        outfeed = poptorch.OutfeedQueue()
        nested = torch.nested.nested_tensor(parts, layout=layout)
        with poptorch.InfeedQueue(nested) as infeed:
            passing(infeed, outfeed, 2)()
        assert outfeed.dequeue().tolist() == [[0, 0], [1, 1]]
