"""Complex numbers on the device, against eager PyTorch in double precision."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.reference import Interpreter
from tests.options import make_options
from tests.parity.complex_models import MODELS, ComplexLayers, NeuralOperator

WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
OutputMode = poptorch.OutputMode


def widened(module):
    """Return a copy with double precision in all parameters and buffers."""
    twin = copy.deepcopy(module)
    for one in twin.modules():
        for name, parameter in one.named_parameters(recurse=False):
            setattr(one, name, nn.Parameter(parameter.detach().to(WIDE[parameter.dtype])))
        for name, buffer in one.named_buffers(recurse=False):
            one.register_buffer(name, buffer.to(WIDE[buffer.dtype]))
    return twin


def wide(x):
    return x.to(WIDE[x.dtype])


def assert_close(ours, expected, what=""):
    expected = expected.detach().resolve_conj()
    assert ours.dtype == {v: k for k, v in WIDE.items()}.get(expected.dtype, expected.dtype), what
    torch.testing.assert_close(
        ours.detach(), expected.to(ours.dtype), **CLOSE, msg=lambda text: f"{what}: {text}"
    )


class WideTrainer:
    """Trains a copy of a model in double precision, with micro-batches along the first axis."""

    def __init__(self, module, optimizer, accumulation=1, max_grad_norm=None):
        self.twin = widened(module)
        self.optimizer = optimizer(self.twin.parameters())
        self.accumulation = accumulation
        self.max_grad_norm = max_grad_norm

    def step(self, *inputs):
        """Update once; return outputs, losses and gradients of the micro-batches."""
        self.optimizer.zero_grad()
        outputs, losses, gradients = [], [], []
        for part in zip(*(wide(x).chunk(self.accumulation) for x in inputs), strict=True):
            before = {n: p.grad.clone() for n, p in self.named()}
            y, loss = self.twin(*part)
            loss.backward()
            outputs.append(y.detach())
            losses.append(loss.detach())
            gradients.append({n: p.grad - before.get(n, 0) for n, p in self.named()})
        for _, parameter in self.named():
            # Eager optimizers refuse some gradients with a pending conjugation.
            parameter.grad = parameter.grad.resolve_conj() / self.accumulation
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.twin.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return torch.cat(outputs), torch.stack(losses), gradients

    def named(self):
        """Return the parameters that have a gradient."""
        return [(n, p) for n, p in self.twin.named_parameters() if p.grad is not None]


def anchor_gradients(options, module, mode=None):
    for name, _ in module.named_parameters():
        options.anchorTensor(name, f"Gradient___{name}", mode)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_eager_in_double_precision(name):
    torch.manual_seed(3)
    module = MODELS[name]()
    options = make_options()
    anchor_gradients(options, module)
    # Logarithms of small magnitudes make errors of one step grow.
    rate = 0.002 if name == "SpectralLoss" else 0.02
    reference = WideTrainer(module, lambda p: torch.optim.Adam(p, lr=rate))
    device = poptorch.trainingModel(module, options, torch.optim.Adam(module.parameters(), lr=rate))
    for step in range(10):
        batch = module.batch(4)
        y, loss = device(*batch)
        expected, losses, gradients = reference.step(*batch)
        assert_close(y, expected, f"output of step {step}")
        assert_close(loss, losses[0], f"loss of step {step}")
        for parameter, gradient in gradients[0].items():
            ours = device.getAnchoredTensor(parameter)
            assert_close(ours, gradient, f"gradient of {parameter} in step {step}")
    for parameter, value in reference.twin.state_dict().items():
        assert_close(module.state_dict()[parameter], value, parameter)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "weight decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_treat_complex_weights_as_pairs(name, accumulation, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    torch.manual_seed(4)
    module = ComplexLayers()
    reference = WideTrainer(module, OPTIMIZERS[name], accumulation)
    device = poptorch.trainingModel(
        module, make_options(ga=accumulation), OPTIMIZERS[name](module.parameters())
    )
    for _ in range(5):
        batch = module.batch(2 * accumulation)
        device(*batch)
        reference.step(*batch)
    for parameter, value in reference.twin.state_dict().items():
        assert_close(module.state_dict()[parameter], value, parameter)


def test_clipping_counts_both_parts():
    torch.manual_seed(5)
    module = ComplexLayers()
    reference = WideTrainer(module, lambda p: torch.optim.SGD(p, lr=0.1), max_grad_norm=0.1)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1, max_grad_norm=0.1)
    device = poptorch.trainingModel(module, make_options(), optimizer)
    for _ in range(3):
        batch = module.batch(2)
        device(*batch)
        reference.step(*batch)
    assert_close(module.w1, reference.twin.w1)


@pytest.mark.parametrize("mode", ["All", "Sum", "Final", "EveryN"])
def test_anchors_are_complex_in_every_mode(mode):
    torch.manual_seed(6)
    module, (d, ga) = ComplexLayers(), (4, 2)
    options = make_options(d, ga)
    period = 2 if mode == "EveryN" else None
    options.anchorTensor("g", "Gradient___w1", OutputMode[mode], period)
    options.outputMode(OutputMode[mode], period)
    reference = WideTrainer(module, lambda p: torch.optim.SGD(p, lr=0.05), ga)
    device = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.05))
    batch = module.batch(2 * d * ga)
    y, _ = device(*batch)
    found = device.getAnchoredTensor("g")
    outputs, gradients = [], []
    for part in zip(*(x.chunk(d) for x in batch), strict=True):
        out, _, of_step = reference.step(*part)
        outputs += out.chunk(ga)
        gradients += [one["w1"] for one in of_step]
    if mode == "Sum":
        assert_close(found, sum(gradients))
        assert_close(y, sum(outputs))
        return
    kept = range(d * ga)
    if mode == "Final":
        kept = [d * ga - 1]
    if mode == "EveryN":
        kept = [i for i in kept if i // ga % 2 == 1]
    assert_close(found, torch.cat([gradients[i] for i in kept]))
    assert_close(y, torch.cat([outputs[i] for i in kept]))


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def computed(function, *inputs):
    return poptorch.inferenceModel(Calls(function), make_options())(*inputs)


def check(function, *inputs):
    ours, expected = computed(function, *inputs), function(*inputs)
    expected = expected.resolve_conj().resolve_neg()
    assert ours.dtype == expected.dtype
    assert not ours.is_conj()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


Z = torch.randn(3, 4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(7))
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(8))
FUNCTIONS = {
    "conj": lambda z: z.conj(),
    "conj of conj": lambda z: (z.conj() * 2).conj(),
    "imag of conj": lambda z: z.conj().imag,
    "real of conj transposed": lambda z: z.mH.real.contiguous(),
    "conj is not a view in place": lambda z: torch.add(z.clone().conj_physical_(), 1j),
    "parts": lambda z: z.real * z.imag,
    "abs": lambda z: z.abs(),
    "angle": lambda z: z.angle(),
    "sgn": lambda z: z.sgn(),
    "power": lambda z: z**3 + z**0.5,
    "complex number": lambda z: (z + 1j) * (2 - 1j) / 0.5j,
    "filled": lambda z: torch.full((3, 4), 1 - 2j, device=z.device) + z,
    "negative zero": lambda z: torch.full((3,), complex(0.0, -0.0), device=z.device).angle(),
    "exp": lambda z: torch.exp(z).log(),
    "comparison": lambda z: z == z.conj(),
    "comparison with a number": lambda z: z.real == 1j,
    "where": lambda z: torch.where(z.real > 0, z, z.conj()),
    "masked": lambda z: z.masked_fill(z.imag > 0, 1j),
    "matmul": lambda z: z @ z.mH,
    "matmul of conj": lambda z: z.conj() @ z.T,
    "solve": lambda z: torch.linalg.solve(z @ z.mH, z),
    "dot": lambda z: torch.vdot(z[0], z[1]) + torch.dot(z[0], z[1]),
    "norm": lambda z: torch.linalg.norm(z),
    "covariance": lambda z: torch.cov(z),
    "weighted covariance": lambda z: torch.cov(z, aweights=z[0].abs(), correction=0),
    "float power": lambda z: torch.float_power(z, 1.5).to(torch.complex64),
    "renorm": lambda z: torch.renorm(z, 2, 0, 1.0),
    "sum and mean": lambda z: z.sum(0) + z.mean(0) + z.prod(0),
    "cumsum": lambda z: z.cumsum(1),
    "cat and stack": lambda z: torch.stack([torch.cat([z, z.conj()]), torch.cat([z, z])]),
    "index": lambda z: z[[0, 2], 1:] * z[1, ::2][0],
    "flip and roll": lambda z: z.flip(0).roll(1, 1),
    "written slices": lambda z: torch.zeros_like(z).index_copy(
        0, torch.tensor([2, 0], device=z.device), z[:2]
    ),
    "view as real": lambda z: torch.view_as_real(z).flatten(1),
    "view as complex": lambda z: torch.view_as_complex(torch.view_as_real(z) * 2),
    "view at an odd place": lambda z: torch.view_as_complex(
        torch.view_as_real(z).flatten()[1:-1].unflatten(0, (-1, 2)).clone()
    ),
    "view of dtype": lambda z: z.view(torch.float32).view(torch.complex64),
    "to real": lambda z: z.real.to(torch.complex64) - z,
    "convolution": lambda z: torch.nn.functional.conv1d(z[None], z[None]),
    "einsum": lambda z: torch.einsum("ij,kj->ik", z, z.conj()),
    "fft": lambda z: torch.fft.fft(z),
    "ifft": lambda z: torch.fft.ifft(z, n=6, norm="ortho"),
    "fft2": lambda z: torch.fft.fft2(z),
    "fftn": lambda z: torch.fft.fftn(z, dim=(0,)),
    "ifftn": lambda z: torch.fft.ifftn(z),
    "hfft": lambda z: torch.fft.hfft(z),
    "irfft": lambda z: torch.fft.irfft(z, n=7),
    "irfft2": lambda z: torch.fft.irfft2(z),
    "fftshift": lambda z: torch.fft.ifftshift(torch.fft.fftshift(z) * 1j),
    "random": lambda z: torch.randn_like(z) * 0 + torch.rand(4, dtype=torch.cfloat).sum() * 0,
}


# Their gradients have rules of their own in a trace.
DIFFERENTIATED = {
    "times a number": lambda z: z * 2j + 1.5j * z,
    "divided by a number": lambda z: z / (1 + 2j) - 3j / z,
    "times a number, twice": lambda z: (z * 1j).exp() * (2 - 1j),
    "covariance": lambda z: torch.cov(z),
    "weighted covariance": lambda z: torch.cov(z, aweights=z.detach()[0].abs()),
    "float power": lambda z: torch.float_power(z, 1.5),
    "float power in place": lambda z: (z * 1).float_power_(2j),
    "renorm": lambda z: torch.renorm(z, 2, 0, 1.0),
    "renorm in place": lambda z: (z * 2).renorm_(1.5, -1, 2.0),
    "singular vectors": lambda z: torch.linalg.multi_dot(
        torch.linalg.svd(z, full_matrices=False)[::2]
    ),
}


class PartsOf(nn.Module):
    """The loss of a function of a complex weight."""

    def __init__(self, function, dtype=torch.cfloat):
        super().__init__()
        self.function = function
        self.z = nn.Parameter(Z.to(dtype))

    def forward(self):
        parts = torch.view_as_real(self.function(self.z).resolve_conj())
        numbers = torch.arange(parts.numel(), device=parts.device).reshape(parts.shape)
        return poptorch.identity_loss((parts * (numbers * 0.7).cos()).sum(), "none")


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name):
    wide_model = PartsOf(DIFFERENTIATED[name], torch.cdouble)
    wide_model().backward()
    model = PartsOf(DIFFERENTIATED[name])
    options = make_options().anchorTensor("gradient", "Gradient___z")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    training()
    ours = training.getAnchoredTensor("gradient")
    assert ours.dtype == torch.cfloat
    torch.testing.assert_close(ours.to(torch.cdouble), wide_model.z.grad, **CLOSE)


def test_a_loss_that_depends_on_the_phase_of_vectors_is_an_error():
    def both(z):
        u, s, vh = torch.linalg.svd(z, full_matrices=False)
        return u + vh[:, :3].mH * s

    with pytest.raises(RuntimeError, match="depends on this phase"):
        PartsOf(both)().backward()
    model = PartsOf(both)
    training = poptorch.trainingModel(
        model, make_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.Error, match="depends on the phase of singular vectors"):
        training()
    assert torch.equal(model.z, Z)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    with torch.no_grad():
        check(FUNCTIONS[name], Z)


OF_REAL = {
    "rfft": lambda x: torch.fft.rfft(x),
    "rfft2": lambda x: torch.fft.rfft2(x, norm="forward"),
    "rfftn": lambda x: torch.fft.rfftn(x, s=(5, 5)),
    "ihfft": lambda x: torch.fft.ihfft(x),
    "fft": lambda x: torch.fft.fft(x),
    "frequencies": lambda x: torch.fft.rfftfreq(6, device=x.device) * x[:, :1],
    "complex": lambda x: torch.complex(x, -x),
    "polar": lambda x: torch.polar(x.abs(), x),
    "view as complex": lambda x: torch.view_as_complex(x.view(3, 2, 2)),
    "view of part": lambda x: torch.view_as_complex(x[:, 1:3].clone()),
    "view of transposed": lambda x: torch.view_as_complex(x.T[:2].T),
    "times a number": lambda x: x * 1j + 2,
    "stft": lambda x: torch.stft(
        x.flatten(), 8, window=torch.hann_window(8, device=x.device), return_complex=True
    ),
    "istft": lambda x: torch.istft(
        torch.stft(x.flatten(), 8, 2, window=torch.ones(8, device=x.device), return_complex=True),
        *(8, 2),
        window=torch.ones(8, device=x.device),
    ),
    "roots": lambda x: torch.linalg.eigvals(x[:, :3]).abs().sort().values,
}


class Spectrum(nn.Module):
    """Goes to the spectrum and back, with a window that only a run knows."""

    def __init__(self, window):
        super().__init__()
        self.register_buffer("window", window)
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x):
        window = self.window.sqrt()
        z = torch.stft(x * self.gain, 16, 4, window=window, return_complex=True)
        y = torch.istft(z * 2, 16, 4, window=window, length=48)
        y = y + (z * 0.5).istft(16, 4, window=window, length=48)
        return y, poptorch.identity_loss(y.square().mean(), reduction="none")


def test_a_signal_comes_back_from_its_spectrum_with_the_window_of_a_buffer():
    net = Spectrum(torch.hann_window(16))
    eager = copy.deepcopy(net)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    training = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    y, loss = training(x)
    expected, expected_loss = eager(x)
    expected_loss.backward()
    assert_close(y, expected)
    assert_close(loss, expected_loss)
    assert_close(net.gain, eager.gain - eager.gain.grad)


def test_a_window_that_leaves_a_gap_is_an_error_of_the_run():
    net = Spectrum(torch.hann_window(16))
    model = poptorch.inferenceModel(net)
    x = torch.randn(2, 64)
    model(x)
    net.window.zero_()
    model.copyWeightsToDevice()
    with pytest.raises(
        poptorch.Error, match=r"test_complex.py:\d+\): istft: window overlap add min"
    ):
        model(x)
    net.window.fill_(1)
    model.copyWeightsToDevice()
    assert_close(model(x)[0], net(x)[0])


def test_a_known_window_that_leaves_a_gap_is_an_error_of_the_compilation():
    class Gap(nn.Module):
        def forward(self, z):
            return torch.istft(z, 16, window=torch.hann_window(16, device=z.device), center=False)

    with pytest.raises(poptorch.Error, match=r"overlap add min .*test_complex.py:\d+"):
        poptorch.inferenceModel(Gap())(torch.ones(9, 20, dtype=torch.cfloat))


@pytest.mark.parametrize("name", OF_REAL)
def test_functions_of_real_numbers(name, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    check(OF_REAL[name], X)


def test_inputs_of_double_precision_are_held_and_returned_in_single():
    z = Z.to(torch.complex128)
    for function in (lambda z: z * 2, lambda z: z.cdouble() + z.to(torch.complex128)):
        y = computed(function, z)
        assert y.dtype == torch.complex64
        assert torch.equal(y, Z * 2)


def test_lazily_conjugated_inputs_and_weights_have_their_values():
    module = Calls(lambda z: z + 1j)
    model = poptorch.inferenceModel(module, make_options())
    assert torch.equal(model(Z), Z + 1j)
    assert torch.equal(model(Z.conj()), Z.conj() + 1j)
    module = nn.Module()
    module.w = nn.Parameter(Z.conj())
    module.register_buffer("b", Z.mH)
    constant = Z.conj()
    module.forward = lambda z: (z * module.w + constant) @ module.b
    model = poptorch.inferenceModel(module, make_options())
    assert_close(model(Z), (Z * Z.conj() + Z.conj()) @ Z.mH)


def test_random_numbers_have_the_variance_of_eager():
    y = computed(lambda x: torch.randn(20000, dtype=torch.cfloat, device=x.device) + x, X[0, :1])
    y = y - X[0, 0]
    assert abs(y.abs().square().mean() - 1) < 0.05
    assert abs(y.real.var() - 0.5) < 0.03
    assert abs((y.real * y.imag).mean()) < 0.02


FACTORS = {
    "product": lambda z: z * 1j,
    "quotient": lambda z: z / (1 + 2j),
    "reciprocal": lambda z: 1j / z,
    "phase": lambda z: torch.exp(-1j * z.real),
    "in place": lambda z: z.mul(1j).mul_(2j),
}


@pytest.mark.parametrize("name", FACTORS)
def test_gradients_of_products_with_complex_numbers(name):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

        def forward(self, x):
            y = FACTORS[name](self.weight + x)
            return y, poptorch.identity_loss((y + 1j).abs().square().sum(), reduction="none")

    module, x = Scaled(), torch.randn(3, dtype=torch.cfloat)
    reference = WideTrainer(module, lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, make_options(), optimizer)
    for _ in range(2):
        device(x)
        reference.step(x)
    assert_close(module.weight, reference.twin.weight)


class Staged(NeuralOperator):
    """Complex values go from stage to stage, and are kept for the backward pass."""

    def __init__(self, stages=1):
        super().__init__()
        self.stages = stages
        self.scale = nn.Parameter(torch.randn(3, 8, 8, dtype=torch.cfloat) * 0.1 + 1)

    def forward(self, x, target):
        with poptorch.Block("first", ipu_id=0):
            z = torch.fft.fft2(self.lift(x)) * self.scale
        with poptorch.Block("second", ipu_id=min(1, self.stages - 1)):
            z = self.spectral(torch.fft.ifft2(z).real) * z.conj()
        with poptorch.Block("third", ipu_id=min(2, self.stages - 1)):
            y = self.project(z.abs() + z.imag)
            return y, nn.functional.mse_loss(y, target)


@pytest.mark.parametrize("recompute", [0, 3])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (3, 1), (3, 2)])
def test_pipelines_and_replicas(stages, replicas, recompute, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    torch.manual_seed(9)
    module = Staged(stages)
    reference = WideTrainer(module, lambda p: torch.optim.Adam(p, lr=0.01), 16)
    options = make_options(1, 16 // replicas)
    options.replicationFactor(replicas).autoRoundNumIPUs(True)
    options._Popart.set("autoRecomputation", recompute)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    device = poptorch.trainingModel(module, options, optimizer)
    for _ in range(2):
        batch = module.batch(32)
        device(*batch)
        reference.step(*batch)
    for name, value in reference.twin.state_dict().items():
        assert_close(module.state_dict()[name], value, name)


def test_saved_executables_and_states_go_on(tmp_path):
    def made():
        torch.manual_seed(11)
        module = ComplexLayers()
        optimizer = poptorch.optim.Adam(module.parameters(), lr=0.02)
        return module, optimizer, poptorch.trainingModel(module, make_options(), optimizer)

    module, optimizer, device = made()
    torch.manual_seed(12)
    batches = [ComplexLayers.batch(4) for _ in range(4)]
    for batch in batches[:2]:
        device(*batch)
    device.save(tmp_path / "file", export_model=False)
    state, of_optimizer = copy.deepcopy(module.state_dict()), optimizer.state_dict()
    for batch in batches[2:]:
        expected = device(*batch)
    other, of_other, again = made()
    again.loadExecutable(tmp_path / "file")
    other.load_state_dict(state)
    again.copyWeightsToDevice()
    of_other.load_state_dict(of_optimizer)
    again.setOptimizer(of_other)
    for batch in batches[2:]:
        found = again(*batch)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_loaded_model_computes_what_the_saved_one_does(tmp_path):
    model = poptorch.inferenceModel(Rotated(), make_options())
    expected = model(Z)
    model.save(tmp_path / "file")
    assert torch.equal(poptorch.load(tmp_path / "file")(Z), expected)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, z):
        return torch.fft.ifft(z * self.angles + 2j, norm="ortho")


def test_the_cache_of_executables_keeps_complex_numbers(tmp_path):
    found = []
    for _ in range(2):
        options = make_options().enableExecutableCaching(tmp_path)
        found.append(poptorch.inferenceModel(Rotated(), options)(Z))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], Rotated()(Z))


def test_queues_take_and_give_complex_numbers():
    data = [torch.randn(4, dtype=torch.cfloat) for _ in range(3)]
    infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()

    @poptorch.function
    def run(total):
        def body(total):
            z = next(iterator)
            outfeed.enqueue({"z": z * 1j, "abs": z.abs()})
            return total + z.conj()

        iterator = iter(infeed)
        return poptorch.repeat(3, body, total)

    total = run(torch.zeros(4, dtype=torch.cfloat))
    torch.testing.assert_close(total, sum(z.conj() for z in data))
    found = outfeed.dequeue()
    torch.testing.assert_close(found["z"], torch.stack(data) * 1j)
    torch.testing.assert_close(found["abs"], torch.stack(data).abs())


def test_loops_and_branches_carry_complex_numbers():
    def iterated(z):
        def body(z, x):
            return z * z + 0.1j, x * 0.5 + z.real

        z, x = poptorch.for_loop(3, body, [z * 0.1, z.real])
        (y,) = poptorch.cond(x.sum() > 0, lambda z: z * 1j, [z], lambda z: z - 1j, [z])
        return y

    def expected(z):
        z, x = z * 0.1, z.real
        for _ in range(3):
            z, x = z * z + 0.1j, x * 0.5 + z.real
        return z * 1j if x.sum() > 0 else z - 1j

    torch.testing.assert_close(computed(iterated, Z), expected(Z))


def test_prints_are_complex(capfd):
    computed(lambda z: poptorch.ipu_print_tensor(z, "z"), torch.tensor([1.5 - 2j, -0.25 + 1j]))
    assert capfd.readouterr().err == "z: ( 1.500-2.000j,-0.250+1.000j)\n"


def test_checks_of_numbers_find_a_bad_part():
    options = make_options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(Calls(lambda z: torch.log(z - 1j)), options)
    model(Z)
    with pytest.raises(poptorch.Error, match="infinity"):
        model(torch.full_like(Z, 1j))


def test_statistics_are_those_of_the_parts():
    module = ComplexLayers()
    options = make_options()
    options.observe("Gradient___w1", poptorch.statistics.Moments(), every=1)
    options.anchorTensor("g", "Gradient___w1")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, options, optimizer)
    device(*module.batch(4))
    (record,) = device.observations()
    parts = torch.view_as_real(device.getAnchoredTensor("g"))
    assert record.statistics.count == parts.numel()
    assert record.statistics.mean == pytest.approx(parts.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("wide", [False, True])
def test_the_reference_interpreter_computes_the_same(wide):
    torch.manual_seed(13)
    module = ComplexLayers()
    options = make_options()
    anchor_gradients(options, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, options, optimizer)
    batch = module.batch(4)
    device.compile(*batch)
    interpreter = Interpreter.like(device, wide=wide)
    interpreter.run(list(batch))
    device(*batch)
    for name, _ in module.named_parameters():
        found = interpreter.read(f"Gradient___{name}")
        assert found.dtype == (torch.complex128 if wide else torch.complex64)
        expected = device.getAnchoredTensor(name)
        torch.testing.assert_close(found.to(torch.complex64), expected, rtol=1e-5, atol=1e-5)


POPTORCH_OPTIMIZERS = {
    "combined": (
        lambda p: poptorch.optim.SGD(p, 0.05, momentum=0.9, use_combined_accum=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    ),
    "combined nesterov": (
        lambda p: poptorch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, use_combined_accum=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "scaled": (
        lambda p: poptorch.optim.SGD(p, 0.05, momentum=0.9, loss_scaling=64.0),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    ),
    "adam": (
        lambda p: poptorch.optim.Adam(p, 0.02),
        lambda p: torch.optim.Adam(p, 0.02),
    ),
}


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("name", POPTORCH_OPTIMIZERS)
def test_optimizers_of_this_package(name, automatic):
    torch.manual_seed(14)
    ours, eager = POPTORCH_OPTIMIZERS[name]
    module = ComplexLayers()
    reference = WideTrainer(module, eager, 2)
    options = make_options(ga=2)
    options.Training.setAutomaticLossScaling(automatic)
    device = poptorch.trainingModel(module, options, ours(module.parameters()))
    for _ in range(4):
        batch = module.batch(4)
        device(*batch)
        reference.step(*batch)
    for parameter, value in reference.twin.state_dict().items():
        assert_close(module.state_dict()[parameter], value, parameter)


def test_lamb_is_that_of_its_step_on_the_host():
    torch.manual_seed(15)
    module = ComplexLayers()
    twin = copy.deepcopy(module)
    optimizer = poptorch.optim.LAMB(twin.parameters(), lr=0.05)
    device = poptorch.trainingModel(
        module, make_options(), poptorch.optim.LAMB(module.parameters(), lr=0.05)
    )
    for _ in range(3):
        batch = module.batch(4)
        device(*batch)
        optimizer.zero_grad()
        twin(*batch)[1].backward()
        optimizer.step()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_loops_train_and_leave_states_to_the_host():
    torch.manual_seed(16)
    module = ComplexLayers()
    reference = WideTrainer(module, lambda p: torch.optim.Adam(p, lr=0.02))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    batches = [module.batch(4) for _ in range(3)]
    feed = poptorch.InfeedQueue(batches, repeat=True)

    @poptorch.function
    def epoch(iterator):
        def step():
            optimizer.zero_grad()
            module(*next(iterator))[1].backward()
            optimizer.step()

        poptorch.repeat(3, step)

    for _ in range(2):
        epoch(iter(feed))
        for batch in batches:
            reference.step(*batch)
    for name, value in reference.twin.named_parameters():
        assert_close(dict(module.named_parameters())[name], value, name)
    found, expected = (one.state_dict()["state"] for one in (optimizer, reference.optimizer))
    for index, states in expected.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_close(found[index][kind], states[kind], kind)


def test_weights_that_are_read_after_a_step_in_a_loop_are_new():
    torch.manual_seed(17)
    module = ComplexLayers()
    reference = WideTrainer(module, lambda p: torch.optim.SGD(p, lr=0.05))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    batches = [module.batch(4) for _ in range(3)]
    feed = poptorch.InfeedQueue(batches)

    @poptorch.function
    def epoch(iterator, total):
        def step(total):
            optimizer.zero_grad()
            batch = next(iterator)
            module(*batch)[1].backward()
            optimizer.step()
            return total + module.w1.sum()

        return poptorch.repeat(3, step, total)

    total = epoch(iter(feed), torch.zeros((), dtype=torch.cfloat))
    expected = 0
    for batch in batches:
        reference.step(*batch)
        expected = expected + reference.twin.w1.sum()
    assert_close(total, expected)


@pytest.mark.parametrize("mode", poptorch.OutfeedOptimizerMode)
def test_gradients_in_queues(mode):
    torch.manual_seed(18)
    module, queue = ComplexLayers(), poptorch.MaybeOutfeedQueue()
    reference = WideTrainer(module, lambda p: torch.optim.SGD(p, lr=0.05), 3)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.05)
    optimizer = poptorch.OutfeedOptimizer(optimizer, queue, mode)
    device = poptorch.trainingModel(module, make_options(2, 3), optimizer)
    batch = module.batch(12)
    device(*batch)
    expected = []
    for part in zip(*(x.chunk(2) for x in batch), strict=True):
        each = [one["w1"] for one in reference.step(*part)[2]]
        whole = mode == poptorch.OutfeedOptimizerMode.BEFORE_APPLY
        expected += [sum(each) / 3] if whole else each
    assert_close(queue.dequeue()["w1_grad"], torch.stack(expected))


def test_functions_of_the_host():
    module = nn.Module()
    module.inner = poptorch.CPU(torch.fft.fft, "transform")
    module.forward = lambda z: module.inner(z) * 1j
    found = poptorch.inferenceModel(module, make_options())(Z)
    torch.testing.assert_close(found, torch.fft.fft(Z) * 1j)


def test_gradients_through_the_host():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(Z[0].clone())
            self.inner = poptorch.CPU(torch.fft.ifft, "transform")

        def forward(self, z):
            return poptorch.identity_loss(self.inner(z * self.w).abs(), "sum")

    module = Outside()
    options = make_options()
    anchor_gradients(options, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, options, optimizer)
    w = Z[0].clone().requires_grad_()
    torch.fft.ifft(Z * w).abs().sum().backward()
    device(Z)
    torch.testing.assert_close(device.getAnchoredTensor("w"), w.grad)


class Repeated(nn.Module):
    def __init__(self, control):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, dtype=torch.cfloat) * 0.3)
        self.control = control

    def forward(self, z):
        if self.control:
            (z,) = poptorch.for_loop(3, lambda y: y * self.w + 0.1j, [z])
            (z,) = poptorch.cond(
                z.real.sum() > 0, lambda y: y * self.w, [z], lambda y: y - self.w, [z]
            )
        else:
            for _ in range(3):
                z = z * self.w + 0.1j
            z = z * self.w if z.real.sum() > 0 else z - self.w
        return poptorch.identity_loss(z.abs().square(), "mean")


def test_gradients_of_loops_and_branches():
    torch.manual_seed(19)
    module = Repeated(control=True)
    twin = Repeated(control=False)
    twin.load_state_dict(module.state_dict())
    options = make_options()
    anchor_gradients(options, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, options, optimizer)
    loss = device(Z)
    expected = twin(Z)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(device.getAnchoredTensor("w"), twin.w.grad)


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.cfloat))

    def forward(self, z):
        return poptorch.identity_loss((self.w * z * z).imag, "mean")


def test_a_bad_number_is_found_in_either_part_and_changes_no_weight():
    module = Squares()
    options = make_options()
    options.watch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = poptorch.trainingModel(module, options, optimizer)
    device(Z)
    before = module.w.detach().clone()
    bad = Z.clone()
    bad[0, 1] = complex(1e30, 1e30)
    with pytest.raises(poptorch.BadNumberError, match="overflow of complex64 inside") as caught:
        device(bad)
    assert caught.value.verdict.index == (0, 1)
    assert torch.equal(module.w, before)


def test_synthetic_inputs_have_the_variance_of_randn():
    options = make_options()
    options._Popart.set("syntheticDataMode", 2)
    model = poptorch.inferenceModel(Calls(lambda z: z * 1), options)
    y = model(torch.zeros(20000, dtype=torch.cfloat))
    assert abs(y.abs().square().mean() - 1) < 0.05
    assert abs(y.imag.var() - 0.5) < 0.03
