"""``ipu_print_tensor``: what a run writes on the process's stderr, to the last character."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import ipu_print_tensor
from tests.options import make_options


class Function(nn.Module):
    """A model made of a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


@pytest.fixture
def printed(capfd):
    """Compile and run a model for inference; return what the run wrote on stderr."""

    def run(function, *inputs, d=1):
        model = poptorch.inferenceModel(Function(function), make_options(d))
        model.compile(*inputs)
        assert capfd.readouterr() == ("", ""), "compiling must not print"
        model(*inputs)
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return run


def shown(value, **options):
    """Return a model function that prints its input under the title ``t``."""

    def function(x):
        return ipu_print_tensor(x, "t", **options)

    return function, value


# Layout by rank


def test_a_scalar(printed):
    text = printed(lambda x: ipu_print_tensor(x.sum(), "total"), torch.tensor([1.5, 2.0]))
    assert text == "total: 3.500\n"


def test_a_vector(printed):
    assert printed(*shown(torch.tensor([1.5, -2.5, 3.25]))) == "t: ( 1.500,-2.500, 3.250)\n"


def test_a_matrix(printed):
    text = printed(*shown(torch.tensor([[1.5, 2.5], [3.5, 4.5]])))
    assert text == "t: (\n (1.500,2.500)\n (3.500,4.500)\n)\n"


def test_rank_three(printed):
    text = printed(*shown(torch.arange(8).view(2, 2, 2)))
    assert text == "t: (\n (\n  (0,1)\n  (2,3)\n )\n (\n  (4,5)\n  (6,7)\n )\n)\n"


def test_integers_are_right_aligned(printed):
    assert printed(*shown(torch.tensor([6, 9, 12]))) == "t: ( 6, 9,12)\n"


def test_negative_integers(printed):
    assert printed(*shown(torch.tensor([-100, 5]))) == "t: (-100,   5)\n"


def test_a_column(printed):
    assert printed(*shown(torch.tensor([[1], [20]]))) == "t: (\n ( 1)\n (20)\n)\n"


# Element types


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_integer_types(printed, dtype):
    assert printed(*shown(torch.tensor([1, 2, 30], dtype=dtype))) == "t: ( 1, 2,30)\n"


def test_bools_are_zeros_and_ones(printed):
    assert printed(*shown(torch.tensor([True, False, True]))) == "t: (1,0,1)\n"


def test_half(printed):
    assert printed(*shown(torch.tensor([0.5, 1.5]).half())) == "t: (0.500,1.500)\n"


def test_double_is_printed_as_the_float_that_it_becomes(printed):
    text = printed(*shown(torch.tensor([0.1], dtype=torch.double), float_format="none"))
    assert text == "t: (0.1)\n"


def test_no_value_is_left_out_of_a_transposed_tensor(printed):
    matrix = torch.arange(6).view(2, 3)
    text = printed(lambda x: ipu_print_tensor(x.t(), "t"), matrix)
    assert text == "t: (\n (0,3)\n (1,4)\n (2,5)\n)\n"


# Formats


@pytest.mark.parametrize(
    "options, text",
    [
        ({"digits": 8}, "1.4962566"),
        ({"digits": 2}, "1.5"),
        ({"digits": 1}, "1.5"),
        ({"digits": 4}, "1.496"),
        ({"digits": 0}, "1.4962566"),
        ({"digits": 8, "float_format": "scientific"}, "1.4962566e+00"),
        ({"digits": 3, "float_format": "scientific"}, "1.50e+00"),
        ({"digits": 3, "float_format": "fixed"}, "1.50"),
        ({"digits": 3, "float_format": "none"}, "1.4962566"),
    ],
)
def test_digits_and_formats(printed, options, text):
    assert printed(*shown(torch.tensor([1.4962566]), **options)) == f"t: ({text})\n"


def test_digits_are_those_of_the_largest_element(printed):
    assert printed(*shown(torch.tensor([123.456, 1.0]))) == "t: (123.5,  1.0)\n"


def test_zero_with_eight_digits(printed):
    assert printed(*shown(torch.zeros(1), digits=8)) == "t: (0.0000000)\n"


def test_one_decimal_is_always_kept(printed):
    assert printed(*shown(torch.tensor([123456.0]), digits=4)) == "t: (123456.0)\n"


@pytest.mark.parametrize(
    "values, text",
    [
        ([1e8, 1e8], "1.000e+08,1.000e+08"),
        ([9.9e7, 9.9e7], "99000000.0,99000000.0"),
        ([5e-5, 5e-5], "5.000e-05,5.000e-05"),
        ([2e-4, 2e-4], "0.000,0.000"),
        ([1001.0, 1.0], "1.001e+03,1.000e+00"),
        ([1000.0, 1.0], "1000.0,   1.0"),
        ([1000.0, 0.0], "1000.0,   0.0"),
        ([0.0, 0.0], "0.000,0.000"),
        ([-5000.0, 1.0], "-5.000e+03, 1.000e+00"),
    ],
)
def test_auto_chooses_scientific_for_wide_ranges(printed, values, text):
    assert printed(*shown(torch.tensor(values))) == f"t: ({text})\n"


def test_fixed_never_has_an_exponent(printed):
    text = printed(*shown(torch.tensor([1e9, 1e-9]), float_format="fixed"))
    assert text == "t: (1000000000.0,         0.0)\n"


def test_none_is_not_aligned(printed):
    text = printed(*shown(torch.tensor([100.0, 0.5, 2.25]), float_format="none"))
    assert text == "t: (100,0.5,2.25)\n"


def test_infinities_and_nan(printed):
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    assert printed(*shown(values)) == "t: (  inf, -inf,  nan,1.000)\n"


def test_only_the_first_character_of_brackets_and_separator_counts(printed):
    function, value = shown(
        torch.tensor([[1, 2]]), separator="; ", open_bracket="[[", close_bracket="]x"
    )
    assert printed(function, value) == "t: [\n [1;2]\n]\n"


# Size


def test_summarising_above_the_threshold(printed):
    text = printed(*shown(torch.arange(10), summarise_threshold=9, edge_items=2))
    assert text == "t: (0,1,...,8,9)\n"


def test_no_summary_at_the_threshold(printed):
    text = printed(*shown(torch.arange(10), summarise_threshold=10, edge_items=2))
    assert text == "t: (0,1,2,3,4,5,6,7,8,9)\n"


def test_threshold_zero_never_summarises(printed):
    text = printed(*shown(torch.arange(1500) % 10, summarise_threshold=0, max_line_width=0))
    assert text == "t: (" + ",".join(str(i % 10) for i in range(1500)) + ")\n"


def test_the_default_threshold_is_a_thousand(printed):
    assert printed(*shown(torch.zeros(1001).int())) == "t: (0,0,0,...,0,0,0)\n"
    assert "..." not in printed(*shown(torch.zeros(1000).int()))


def test_only_long_dimensions_are_summarised(printed):
    matrix = torch.arange(12).view(6, 2)
    text = printed(*shown(matrix, summarise_threshold=5, edge_items=1))
    assert text == "t: (\n ( 0, 1)\n ...\n (10,11)\n)\n"


def test_summarising_both_dimensions(printed):
    matrix = torch.arange(36).view(6, 6)
    text = printed(*shown(matrix, summarise_threshold=5, edge_items=2))
    rows = ["( 0, 1,..., 4, 5)", "( 6, 7,...,10,11)", "(24,25,...,28,29)", "(30,31,...,34,35)"]
    expected = f"t: (\n {rows[0]}\n {rows[1]}\n ...\n {rows[2]}\n {rows[3]}\n)\n"
    assert text == expected


def test_a_wide_row_breaks_behind_a_separator(printed):
    text = printed(*shown(torch.arange(10).view(1, 10), max_line_width=10))
    assert text == "t: (\n (0,1,2,3,\n   4,5,6,\n   7,8,9)\n)\n"
    assert all(len(line) <= 10 for line in text.splitlines())


def test_a_wide_vector_breaks_with_the_title_counted(printed):
    text = printed(*shown(torch.arange(6), max_line_width=9))
    assert text == "t: (0,1,\n  2,3,4,\n  5)\n"


def test_the_default_width_is_eighty(printed):
    text = printed(*shown(torch.full((1, 30), 11)))
    lines = text.splitlines()
    assert len(lines) == 4
    assert 77 < len(lines[1]) <= 80


def test_width_zero_never_breaks(printed):
    text = printed(*shown(torch.arange(100, 200).view(1, 100), max_line_width=0))
    assert text.count("\n") == 3


# Titles and names


def test_an_empty_title_is_the_name_of_the_printed_tensor(printed):
    text = printed(lambda x: ipu_print_tensor(x), torch.tensor([1]))
    assert text == "input: (1)\n"


def test_an_empty_title_names_the_op_in_its_module(printed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(1, 1)
            nn.init.ones_(self.l1.weight)
            nn.init.zeros_(self.l1.bias)

        def forward(self, x):
            return ipu_print_tensor(self.l1(x))

    assert printed(Net(), torch.ones(1, 1)) == "_function/l1/Gemm:0: (\n (1.000)\n)\n"


def test_two_prints_in_the_order_of_the_data(printed):
    def function(x):
        x = ipu_print_tensor(x, "first")
        return ipu_print_tensor(x + 1, "second")

    assert printed(function, torch.tensor([1])) == "first: (1)\nsecond: (2)\n"


def test_printing_what_was_printed(printed):
    def function(x):
        return ipu_print_tensor(ipu_print_tensor(x, "once"), "twice")

    assert printed(function, torch.tensor([7])) == "once: (7)\ntwice: (7)\n"


# When


def test_once_per_micro_batch_and_call(capfd):
    model = poptorch.inferenceModel(Function(lambda x: ipu_print_tensor(x, "t")), make_options(3))
    model(torch.tensor([1, 2, 3]))
    assert capfd.readouterr().err == "t: (1)\nt: (2)\nt: (3)\n"
    model(torch.tensor([4, 5, 6]))
    assert capfd.readouterr().err == "t: (4)\nt: (5)\nt: (6)\n"


def test_a_print_whose_result_is_unused_is_removed(printed):
    def function(x):
        ipu_print_tensor(x, "unused")
        return x + 1

    assert printed(function, torch.tensor([1])) == ""


def test_a_print_of_a_constant_still_prints_every_time(printed):
    def function(x):
        return x + ipu_print_tensor(torch.ones(1, device=x.device), "t")

    assert printed(function, torch.zeros(2), d=2) == "t: (1.000)\nt: (1.000)\n"


def test_nothing_is_printed_outside_of_a_trace(capfd):
    x = torch.tensor([1.0])
    assert ipu_print_tensor(x, "t") is x
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [None, 3, "text", [1.0]], ids=str)
def test_what_is_no_tensor(value):
    with pytest.raises(poptorch.Error, match=r"needs a torch\.Tensor"):
        ipu_print_tensor(value)


def test_an_unknown_format():
    with pytest.raises(KeyError, match="float_format 'hex' is not one of auto, fixed"):
        ipu_print_tensor(torch.ones(1), float_format="hex")


def test_python_prints_happen_once_while_compiling(capfd):
    def function(x):
        print("traced", x.shape)
        return x + 1

    model = poptorch.inferenceModel(Function(function), make_options())
    model(torch.zeros(2))
    model(torch.zeros(2))
    assert capfd.readouterr().out == "traced torch.Size([2])\n"


def test_printing_a_device_tensor_shows_no_values(capfd):
    def function(x):
        print(x)
        print(f"{x}")
        return x + 1

    poptorch.inferenceModel(Function(function), make_options())(torch.full((2,), 77.0))
    out = capfd.readouterr().out
    assert "77" not in out
    assert "(2,)" in out


# Training


class Scale(nn.Module):
    """Loss = sum(w * x), printed at three places."""

    def __init__(self, title="", **options):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))
        self._title, self._options = title, options

    def forward(self, x):
        with poptorch.NameScope("product"):
            product = self.w * x
        product = ipu_print_tensor(product, self._title, **self._options)
        return poptorch.identity_loss(product * 3, "sum")


def train(net, x, d=1, ga=1, **settings):
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0, **settings)
    model = poptorch.trainingModel(net, make_options(d, ga), optimizer)
    model.compile(x)
    return model


def test_the_gradient_is_printed_too(capfd):
    x = torch.tensor([5.0])
    train(Scale("it"), x)(x)
    assert capfd.readouterr().err == "it: (10.00)\nit_gradient: (3.000)\n"


def test_the_gradient_of_an_untitled_print(capfd):
    x = torch.tensor([5.0])
    train(Scale(), x)(x)
    assert capfd.readouterr().err == ("product/Mul:0: (10.00)\nGradient___product/Mul:0: (3.000)\n")


def test_the_gradient_is_multiplied_by_the_loss_scale(capfd):
    x = torch.tensor([5.0])
    train(Scale("it"), x, loss_scaling=16.0)(x)
    assert capfd.readouterr().err == "it: (10.00)\nit_gradient: (48.00)\n"


def test_no_gradient_when_not_asked_for(capfd):
    x = torch.tensor([5.0])
    train(Scale("it", print_gradient=False), x)(x)
    assert capfd.readouterr().err == "it: (10.00)\n"


def test_no_gradient_where_none_flows(capfd):
    class Net(Scale):
        def forward(self, x):
            x = ipu_print_tensor(x, "x")
            return poptorch.identity_loss(self.w * x, "sum")

    x = torch.tensor([5.0])
    train(Net(), x)(x)
    assert capfd.readouterr().err == "x: (5.000)\n"


def test_no_gradient_in_inference(capfd):
    x = torch.tensor([5.0])
    poptorch.inferenceModel(Scale("it"), make_options())(x)
    assert capfd.readouterr().err == "it: (10.00)\n"


def test_values_and_gradients_per_micro_batch(capfd):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    train(Scale("it"), x, d=2, ga=2)(x)
    expected = [f"it: ({2 * v:.3f})\nit_gradient: (3.000)\n" for v in (1, 2, 3, 4)]
    assert capfd.readouterr().err == "".join(expected)


def test_a_printed_parameter(capfd):
    class Net(Scale):
        def forward(self, x):
            return poptorch.identity_loss(ipu_print_tensor(self.w, "w") * x, "sum")

    x = torch.tensor([5.0, 7.0])
    net = Net()
    model = poptorch.trainingModel(
        net, make_options(2), poptorch.optim.SGD(net.parameters(), lr=0.5)
    )
    model(x)
    assert capfd.readouterr().err == (
        "w: (2.000)\nw_gradient: (5.000)\nw: (-0.5000)\nw_gradient: (7.000)\n"
    ).replace("-0.5000", "-0.500")
    assert net.w.tolist() == [-4.0]


def test_the_loss_can_be_printed(capfd):
    class Net(Scale):
        def forward(self, x):
            return ipu_print_tensor(poptorch.identity_loss(self.w * x, "sum"), "loss")

    x = torch.tensor([5.0])
    loss = train(Net(), x, loss_scaling=4.0)(x)
    assert loss.shape == ()
    assert capfd.readouterr().err == "loss: 10.00\nloss_gradient: 4.000\n"


@pytest.mark.parametrize("prints", [1, 2])
def test_the_loss_of_a_function_of_torch(capfd, prints):
    class Net(Scale):
        def forward(self, x):
            loss = nn.functional.mse_loss(self.w * x, x)
            for _ in range(prints):
                loss = ipu_print_tensor(loss)
            return x, loss

    x, net = torch.tensor([5.0]), Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    model(x)
    text = capfd.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in text] == ["25.00"] * prints + ["1.000"] * prints
    assert text[0].startswith("IdentityLoss:0: ") or text[0].startswith("Mse")
    assert text[-1] == f"Gradient___{text[0].replace('25.00', '1.000')}"
    torch.testing.assert_close(net.w.detach(), torch.tensor([2.0 - 0.5 * 2 * 5 * 5]))


def test_a_print_of_the_loss_that_nobody_uses_is_removed(capfd):
    class Net(Scale):
        def forward(self, x):
            loss = poptorch.identity_loss(self.w * x, "sum")
            ipu_print_tensor(loss, "loss")
            return loss

    x = torch.tensor([5.0])
    train(Net(), x)(x)
    assert capfd.readouterr().err == ""


def test_printing_changes_no_value(capfd):
    class Net(nn.Module):
        def __init__(self, prints):
            super().__init__()
            self.fc1 = nn.Linear(4, 5)
            self.fc2 = nn.Linear(5, 3)
            self._prints = prints

        def forward(self, x, y):
            show = ipu_print_tensor if self._prints else (lambda t, title: t)
            x = show(self.fc1(show(x, "x")), "fc1")
            x = show(self.fc2(show(torch.relu(x), "relu")), "fc2")
            return show(x, "out"), show(nn.functional.cross_entropy(x, y), "loss")

    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    net = Net(prints=False)
    other = Net(prints=True)
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    results = []
    for model in (net, other):
        executor = poptorch.trainingModel(
            model, make_options(2, 3), poptorch.optim.SGD(model.parameters(), lr=0.5)
        )
        results.append([executor(x, y) for _ in range(2)])
    for quiet, loud in zip(*results, strict=True):
        assert torch.equal(quiet[0], loud[0])
        assert torch.equal(quiet[1], loud[1])
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert capfd.readouterr().err.count("relu_gradient: (") == 12


# Losses that nobody reads


class Trains(nn.Module):
    """Trains a weight with a loss that a function makes of it; nobody reads the loss."""

    def __init__(self, loss):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self._loss = loss

    def in_a_loop(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)

        @poptorch.function
        def train():
            def body():
                optimizer.zero_grad()
                self._loss(self.weight).backward()
                optimizer.step()

            poptorch.repeat(2, body)

        train()
        train.destroy()

    def forward(self, x):
        poptorch.identity_loss(self._loss(self.weight), "none")
        return x * 2


def repeated(weight):
    (value,) = poptorch.for_loop(2, lambda x: ipu_print_tensor(x, "w", False), [weight])
    return value.sum()


def changed_in_place(weight):
    total = torch.zeros_like(weight)
    total += ipu_print_tensor(weight, "w", False)
    return total.sum()


BEHIND = {
    "the loss": lambda weight: ipu_print_tensor(weight.sum(), "w", False),
    "in front of it": lambda weight: ipu_print_tensor(weight, "w", False).sum(),
    "in a loop of the body": repeated,
    "changed in place": changed_in_place,
}


@pytest.mark.parametrize("loss", BEHIND.values(), ids=BEHIND)
def test_what_a_loss_depends_on_is_printed_though_nobody_reads_the_loss(capfd, loss):
    Trains(loss).in_a_loop()
    iterations = capfd.readouterr().err.count("w: ")
    assert iterations == (4 if loss is repeated else 2)
    model = Trains(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    poptorch.trainingModel(model, make_options(2), optimizer)(torch.ones(2))
    assert capfd.readouterr().err.count("w: ") == iterations


def test_a_printed_loss_of_a_loop_shows_its_value_and_its_gradient(capfd):
    Trains(lambda weight: ipu_print_tensor(weight.sum(), "loss")).in_a_loop()
    assert capfd.readouterr().err == (
        "loss: 3.000\nloss_gradient: 1.000\nloss: 2.000\nloss_gradient: 1.000\n"
    )
