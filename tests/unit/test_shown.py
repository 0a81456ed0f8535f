"""How objects are shown in a terminal, in a notebook, by ``help`` and by completion."""

import builtins
import html
import pydoc

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.encoder(x).square(), "mean")


def make_executor():
    net = Net()
    options = poptorch.Options().deviceIterations(3)
    return poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))


def test_a_notebook_shows_what_is_not_the_default_of_options():
    options = poptorch.Options()
    assert "<td" not in options._repr_html_()
    options.deviceIterations(3).anchorTensor("g", "x<y")
    options.Training.gradientAccumulation(2)
    options.setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    text = html.unescape(options._repr_html_())
    for name, value in {
        "device_iterations": "3",
        "Training.gradient_accumulation": "2",
        "execution_strategy": "ShardedExecution(Stage('a'), Stage('b'))",
    }.items():
        assert f"{name}</th><td style='text-align:left'>{value}</td>" in text
    assert text.count("<td") == 4
    assert "x&lt;y" in options._repr_html_()


def test_a_block_says_its_ids():
    assert repr(poptorch.Block("front", ipu_id=1)) == "Block(user_id='front', ipu_id=1)"
    assert repr(poptorch.Block()) == "Block()"


def test_an_executor_says_what_it_is_above_its_model():
    model = make_executor()
    assert "trainingModel: model Net, state not compiled, parameters 10" in repr(model)
    model(torch.randn(3, 4))
    first, *layers = repr(model).splitlines()
    assert "state compiled" in first and "optimizer SGD" in first and "IPUs 1" in first
    assert "(encoder): Linear(in_features=4, out_features=2, bias=True)" in layers[1]
    assert repr(model.compiled).startswith("CompiledModel(ops ")
    assert repr(model.compiled.program).startswith("Program(")
    assert "<b>trainingModel</b>" in model._repr_html_()


def test_a_function_says_what_it_has_recorded():
    @poptorch.function
    def run():
        poptorch.repeat(2, lambda x: x + 1, 0.0)

    assert "run: not recorded yet)" in repr(run)
    run()
    assert "run: 1 device loops of " in repr(run)


def test_the_text_of_a_program_shows_in_lines():
    model = make_executor()
    model.compile(torch.randn(3, 4))
    assert repr(model.program()) == str(model.program()) and "\n" in repr(model.program())
    assert model.program()._repr_html_().startswith("<pre>parameter encoder.weight")


@pytest.mark.parametrize(
    "make",
    [
        poptorch.Options,
        poptorch.Block,
        poptorch.OutfeedQueue,
        poptorch.MaybeOutfeedQueue,
        lambda: poptorch.InfeedQueue([1.0]),
        lambda: poptorch.function(lambda: None),
        lambda: poptorch.PipelinedExecution("a", "b"),
        lambda: poptorch.Options()._Popart,
        make_executor,
    ],
)
def test_notebooks_show_a_table(make):
    assert make()._repr_html_().startswith("<table>")


def test_completion_reaches_the_layers():
    model = make_executor()
    assert {"encoder", "named_parameters", "compile", "getTensorNames"} <= set(dir(model))
    assert len(dir(model)) == len(set(dir(model)))


@pytest.mark.parametrize("kind", [poptorch.OutputMode, poptorch.OutfeedMode])
def test_help_explains_members(kind):
    assert all(member.__doc__ and member.__doc__ != kind.__doc__ for member in kind)
    text = pydoc.plain(pydoc.render_doc(kind))
    assert all(member.__doc__.splitlines()[0][:40] in text for member in kind)


def test_a_star_import_shadows_no_builtin():
    assert not set(poptorch.__all__) & set(dir(builtins))
    assert poptorch.print is not builtins.print
