"""Models with fewer bits of float32 operands, as the settings of PyTorch ask for."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.reference import Interpreter
from tests.parity.compare import quiet_options

MKLDNN = torch.backends.mkldnn
OF_SETTING = {"high": "tf32", "medium": "bf16"}
# Largest error as a share of the largest number, through several layers and their gradients.
SHARE = {"tf32": 3e-4, "bf16": 0.05}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Leave PyTorch's settings as they are by default."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    MKLDNN.set_flags(True)
    for group in (MKLDNN.matmul, MKLDNN.conv, MKLDNN.rnn):
        group.fp32_precision = "none"


class Everything(nn.Module):
    """Convolutions, an LSTM, a GRU, attention and linear layers, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.lstm = nn.LSTM(64, 64)
        self.gru = nn.GRU(64, 64)
        self.fc = nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x).flatten(2).permute(2, 0, 1)
        y = self.gru(self.lstm(y)[0])[0].transpose(0, 1)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        y = self.fc(y)
        return y, poptorch.identity_loss(y.square().mean(), "none")


def inputs() -> torch.Tensor:
    return torch.randn(4, 3, 12, 12)


def trained(x: torch.Tensor, module: nn.Module | None = None) -> poptorch.PoplarExecutor:
    module = module or Everything()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, quiet_options(), optimizer)
    model.compile(x)
    return model


def precisions(model: poptorch.PoplarExecutor, host: bool = False) -> dict[str, set[str]]:
    """Return the precisions of the ops of each kind that has products; "all" is all bits."""
    found: dict[str, set[str]] = {}
    for line in model.program(host=host).splitlines():
        call = line.split("  #")[0].split(" = ")[-1]
        kind = call.split("(")[0].strip()
        if kind.startswith(("matmul", "convolution", "recurrent", "attention", "sgd_product")):
            mode = next((f" {m}" for m in ("lstm", "gru") if f"mode='{m}'" in call), "")
            value = call.split("precision='")[1].split("'")[0] if "precision=" in call else "all"
            found.setdefault(kind + mode, set()).add(value)
    return found


def test_by_default_all_bits_count():
    model = trained(inputs())
    assert "precision=" not in model.program() + model.program(host=True)
    assert "operands as" not in str(model.compile_log())
    assert set().union(*precisions(model).values()) == {"all"}


@pytest.mark.parametrize("setting", OF_SETTING)
def test_the_setting_of_matrix_products(setting):
    """As in PyTorch: convolutions and LSTMs have settings of their own."""
    torch.set_float32_matmul_precision(setting)
    model = trained(inputs())
    reduced = {OF_SETTING[setting]}
    assert precisions(model) == {
        "convolution": {"all"},
        "convolution_grad_weight": {"all"},
        "recurrent lstm": {"all"},
        "recurrent_grad lstm": {"all"},
        "recurrent gru": reduced,
        "recurrent_grad gru": reduced,
        "matmul": reduced,
    }
    fitted = precisions(model, host=True)
    assert fitted["attention"] == fitted["attention_grad"] == reduced


def _conv(value: str) -> None:
    MKLDNN.conv.fp32_precision = value


def _rnn(value: str) -> None:
    MKLDNN.rnn.fp32_precision = value


def _matmul(value: str) -> None:
    MKLDNN.matmul.fp32_precision = value


@pytest.mark.parametrize("value", ["tf32", "bf16"])
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (_conv, {"convolution", "convolution_grad_weight"}),
        (_rnn, {"recurrent lstm", "recurrent_grad lstm"}),
        (_matmul, {"recurrent gru", "recurrent_grad gru", "matmul"}),
    ],
)
def test_settings_of_one_kind(change: Callable[[str], None], kinds, value):
    change(value)
    found = precisions(trained(inputs()))
    assert {kind for kind, values in found.items() if values == {value}} == kinds
    assert {kind for kind, values in found.items() if values == {"all"}} == found.keys() - kinds


def test_settings_of_all_kinds_are_inherited():
    torch.backends.fp32_precision = "bf16"
    MKLDNN.conv.fp32_precision = "ieee"
    found = precisions(trained(inputs()))
    assert {kind for kind, values in found.items() if values != {"bf16"}} == {
        "convolution",
        "convolution_grad_weight",
    }


def test_without_onednn_all_bits_count():
    """As in PyTorch: only oneDNN's code knows the settings."""
    torch.set_float32_matmul_precision("medium")
    MKLDNN.set_flags(False)
    model = trained(inputs())
    assert set().union(*precisions(model).values()) == {"all"}


class Changing(nn.Module):
    """Two layers; the second one runs under another setting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        before = MKLDNN.matmul.fp32_precision
        MKLDNN.matmul.fp32_precision = "bf16"
        y = self.second(y)
        MKLDNN.matmul.fp32_precision = before
        return y, poptorch.identity_loss(y.sum(), "none")


def test_settings_inside_of_forward():
    model = trained(torch.randn(3, 4), Changing())
    lines = [line for line in model.program().splitlines() if "matmul(" in line]
    assert len(lines) == 5  # and the gradients, after the setting is back
    assert ["precision='bf16'" in line for line in lines] == [False, True, False, False, False]


@pytest.mark.parametrize("whole", ["high", "medium"])
def test_values_and_gradients(whole):
    """The errors against float64 are those of the rounded operands; they are none at "highest"."""
    x, module = inputs(), Everything()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    wide = Everything().double()
    wide.load_state_dict(state)
    y, loss = wide(x.double())
    loss.backward()
    expected = {name: p.double() - 0.1 * p.grad for name, p in wide.named_parameters()}
    torch.set_float32_matmul_precision(whole)
    torch.backends.fp32_precision = OF_SETTING[whole]
    model = trained(x, module)
    assert set().union(*precisions(model).values()) == {OF_SETTING[whole]}
    ours = model(x)[0]
    share = SHARE[OF_SETTING[whole]]
    assert (ours.double() - y).abs().max() <= share * y.abs().max()
    for name, parameter in module.named_parameters():
        moved = (expected[name] - state[name].double()).abs().max()
        error = (parameter.detach().double() - expected[name]).abs().max()
        assert error <= share * moved + 2**-23 * state[name].abs().max(), name


def test_the_error_is_not_larger_than_that_of_eager():
    """At each setting, for the products of a linear layer."""
    x, module = torch.randn(512, 300), nn.Linear(300, 200)
    with torch.no_grad():
        exact = x.double() @ module.weight.double().T + module.bias.double()
    errors, allowed = {}, {"highest": 0.0, "high": 2**-12, "medium": 2**-8}
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        with torch.no_grad():
            eager = (module(x).double() - exact).norm() / exact.norm()
        model = poptorch.inferenceModel(module, quiet_options())
        ours = (model(x).double() - exact).norm() / exact.norm()
        errors[setting] = ours.item()
        # TensorFloat-32 has 11 bits, bfloat16 8. Without matrix units, eager PyTorch uses all bits.
        assert ours <= max(1.2 * eager.item(), allowed[setting])
    assert errors["highest"] < 1e-6
    if _native.multiplies_tiles(1):
        assert errors["highest"] < errors["medium"]
    if _native.multiplies_tiles(2):
        assert errors["highest"] < errors["high"] < errors["medium"]


def test_the_setting_at_compilation_counts():
    x, module = torch.randn(256, 300), nn.Linear(300, 200)
    exact = poptorch.inferenceModel(module, quiet_options())
    exact.compile(x)
    before = exact(x)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(exact(x), before)
    reduced = poptorch.inferenceModel(module, quiet_options())
    found = reduced(x)
    assert torch.equal(found, before) == (not _native.multiplies_tiles(1))
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(reduced(x), found)


def test_a_file_keeps_the_precision(tmp_path):
    x, module = torch.randn(256, 300), nn.Linear(300, 200)
    torch.set_float32_matmul_precision("medium")
    model = poptorch.inferenceModel(module, quiet_options())
    expected = model(x)
    model.save(str(tmp_path / "model.popsim"))
    torch.set_float32_matmul_precision("highest")
    loaded = poptorch.load(str(tmp_path / "model.popsim"))
    assert precisions(loaded) == {"matmul": {"bf16"}}
    assert torch.equal(loaded(x), expected)
    assert "1 ops with float32 operands as bf16" in str(loaded.compile_log())


def test_an_executable_of_another_precision_is_refused_until_the_setting_is_back(tmp_path):
    x, module = torch.randn(256, 300), nn.Linear(300, 200)
    torch.set_float32_matmul_precision("medium")
    model = poptorch.inferenceModel(module, quiet_options())
    model.compileAndExport(str(tmp_path / "model.poptorch"), x)
    expected = model(x)
    torch.set_float32_matmul_precision("highest")
    second = poptorch.inferenceModel(module, quiet_options())
    with pytest.raises(poptorch.Error, match=r"precision='bf16'.*set_float32_matmul_precision"):
        second.loadExecutable(str(tmp_path / "model.poptorch"))
    torch.set_float32_matmul_precision("medium")
    second.loadExecutable(str(tmp_path / "model.poptorch"))
    assert torch.equal(second(x), expected)


def test_the_cache_keeps_programs_of_each_precision(tmp_path):
    x, module = torch.randn(256, 300), nn.Linear(300, 200)

    def compiled() -> poptorch.PoplarExecutor:
        options = quiet_options().enableExecutableCaching(str(tmp_path))
        model = poptorch.inferenceModel(module, options)
        model.compile(x)
        return model

    for setting in ("highest", "medium", "high", "highest", "medium"):
        torch.set_float32_matmul_precision(setting)
        wanted = OF_SETTING.get(setting, "all")
        assert precisions(compiled()) == {"matmul": {wanted}}
    assert len(list(tmp_path.iterdir())) == 3


def test_the_compile_log_names_the_precision():
    torch.set_float32_matmul_precision("medium")
    log = str(trained(inputs()).compile_log())
    assert "float32 operands as bf16" in log


@pytest.mark.parametrize("setting", OF_SETTING)
def test_the_reference_agrees(setting):
    torch.set_float32_matmul_precision(setting)
    x = inputs()
    model = trained(x)
    interpreter = Interpreter.like(model, wide=True)
    interpreter.run([x])
    ours, exact = model(x)[0], interpreter.read("fc/Add:0")
    error = (ours.double() - exact.reshape(ours.shape)).abs().max() / exact.abs().max()
    assert error <= SHARE[OF_SETTING[setting]]


def test_costs_do_not_change():
    x = inputs()
    exact = trained(x).estimate()
    torch.set_float32_matmul_precision("medium")
    assert str(trained(x).estimate()) == str(exact)


def test_other_dtypes_stay_as_they_are():
    torch.backends.fp32_precision = "bf16"
    model = poptorch.inferenceModel(nn.Linear(4, 4).half(), quiet_options())
    model.compile(torch.randn(2, 4).half())
    assert precisions(model) == {"matmul": {"all"}}


class OfPyTorch(nn.Module):
    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.addbmm(x, a, b)


def test_kernels_of_pytorch_use_all_bits():
    inputs = torch.randn(64, 96), torch.randn(4, 64, 200), torch.randn(4, 200, 96)
    model = poptorch.inferenceModel(OfPyTorch(), quiet_options())
    expected = model(*inputs)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(model(*inputs), expected)
    assert torch.equal(poptorch.inferenceModel(OfPyTorch(), quiet_options())(*inputs), expected)
    assert MKLDNN.enabled
