"""Options from the environment, from JSON and from files."""

import logging

import pytest

from popsim_torch import enums, options
from popsim_torch.enums import (
    OutputMode,
    ReductionType,
)
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    UsageAttributeError,
    UsageValueError,
)
from popsim_torch.options import Options


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (
        "POPTORCH_CACHE_DIR",
        "POPTORCH_DEFAULT_OPTIONS",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "WORLD_SIZE",
        "PMI_SIZE",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def opts():
    return Options()


# The environment


def test_default_options_of_the_environment_are_applied(monkeypatch):
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 4, "Training.gradientAccumulation": 8}'
    )
    opts = Options()
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (4, 8)


def test_later_calls_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 4}')
    assert Options().deviceIterations(2).device_iterations == 2


@pytest.mark.parametrize("text", ["{", "[1]", '{"nope": 1}', '{"deviceIterations": 2.5}'])
def test_bad_default_options_name_the_variable(monkeypatch, text):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
    with pytest.raises(Error, match="POPTORCH_DEFAULT_OPTIONS cannot be applied"):
        Options()


def test_cache_directory_of_the_environment_is_applied(monkeypatch, caplog):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    with caplog.at_level(logging.INFO, "poptorch::python"):
        opts = Options()
    assert opts._Popart.options["cachePath"] == "cache"
    assert opts._Popart.options["enableEngineCaching"] is True
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_defaults_of_the_environment_win_over_its_cache_directory(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": null}')
    assert Options()._Popart.options["enableEngineCaching"] is False


def test_empty_cache_directory_is_none(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "enableEngineCaching" not in Options()._Popart.options


# JSON


def test_json_calls_setters_with_values_lists_and_enums(opts):
    opts.from_json(
        '{"deviceIterations": 4, "outputMode": ["OutputMode.EveryN", 2],'
        ' "disableModuleNamescope": [], "setAvailableMemoryProportion": {"IPU0": 0.5},'
        ' "modelName": "OutputMode.Nope", "Distributed.configureProcessId": [0, 1]}'
    )
    assert opts.device_iterations == 4
    assert (opts.output_mode, opts.output_return_period) == (OutputMode.EveryN, 2)
    assert opts.module_namescope_enabled is False
    assert opts.available_memory_proportion == {0: 0.5}
    assert opts.model_name == "OutputMode.Nope"


def test_json_converts_enums_inside_lists(opts):
    opts.from_json('{"_Popart.set": ["reportOptions", ["OutputMode.All"]]}')
    assert opts._Popart.options["reportOptions"] == [OutputMode.All]


def test_json_returns_the_options(opts):
    assert opts.from_json("{}") is opts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"deviceIteration": 1}', "no method 'deviceIteration'.*Closest name: 'deviceIterations'"),
        ('{"Trainng.gradientAccumulation": 1}', "no group 'Trainng'.*Closest name: 'Training'"),
        ('{"__init__": []}', "no method '__init__'"),
        ('{"device_iterations": 1}', "no method 'device_iterations'"),
        ('{"_settings": []}', "no method '_settings'"),
        ('{"deviceIterations.real": 1}', "no group 'deviceIterations'"),
    ],
)
def test_json_reaches_only_setters(opts, text, message):
    with pytest.raises(UsageAttributeError, match=message):
        opts.from_json(text)


@pytest.mark.parametrize("text", ["", "{,}", "3", "[]", "null"])
def test_json_must_be_an_object(opts, text):
    with pytest.raises(UsageValueError, match=r"Options\.from_json"):
        opts.from_json(text)


def test_options_print_alike_whichever_way_they_were_set(monkeypatch, tmp_path):
    by_setters = Options().deviceIterations(4).outputMode(OutputMode.EveryN, 2)
    by_setters.Training.accumulationAndReplicationReductionType(ReductionType.Sum)
    by_setters._Popart.setEngineOptions({"a": "b"})
    json = (
        '{"outputMode": ["OutputMode.EveryN", 2], "_Popart.setEngineOptions": {"a": "b"},'
        ' "Training.accumulationAndReplicationReductionType": "ReductionType.Sum",'
        ' "deviceIterations": 4}'
    )
    by_json = Options().from_json(json)
    (tmp_path / "cfg").write_text(
        "_Popart.setEngineOptions({'a': 'b'})\n"
        "output_return_period = 2\n"
        "output_mode = poptorch.OutputMode.EveryN\n"
        "Training.accumulationAndReplicationReductionType(poptorch.enums.ReductionType.Sum)\n"
        "set(device_iterations=4)\n"
    )
    by_file = Options().loadFromFile(tmp_path / "cfg")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json)
    assert repr(by_setters) == repr(by_json) == repr(by_file) == repr(Options())


# Files


@pytest.fixture
def load(opts, tmp_path):
    def load(text):
        path = tmp_path / "my.cfg"
        path.write_text(text, encoding="utf-8")
        return opts.loadFromFile(path)

    return load


def test_file_calls_and_assigns(opts, load):
    assert (
        load(
            "# the first line\n"
            "\n"
            "deviceIterations(4)   # inline\n"
            "  Training.gradientAccumulation(8).setAutomaticLossScaling(False)\n"
            "  # indented comment\n"
            "outputMode(poptorch.OutputMode.EveryN, output_return_period=2)\n"
            "auto_round_num_ipus = True\n"
            "Training.accumulation_and_replication_reduction_type = "
            "poptorch.enums.ReductionType.Sum\n"
            '_Popart.setEngineOptions({"a": "b"})\n'
        )
        is opts
    )
    assert opts.device_iterations == 4
    assert opts.Training.gradient_accumulation == 8
    assert (opts.output_mode, opts.output_return_period) == (OutputMode.EveryN, 2)
    assert opts.auto_round_num_ipus is True
    assert opts.Training.accumulation_and_replication_reduction_type == ReductionType.Sum
    assert opts._Popart.options["engineOptions"] == {"a": "b"}


def test_file_builds_strategies_and_locations(opts, load):
    load(
        'setExecutionStrategy(poptorch.ShardedExecution("a", ["b"], poptorch.Stage("c").ipu(1)))\n'
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings())\n"
    )
    assert repr(opts.execution_strategy) == (
        "ShardedExecution(Stage('a'), Stage('b'), Stage('c').ipu(1))"
    )


@pytest.mark.parametrize(
    ("literal", "value"),
    [("-3", -3), ("'x'", "x"), ("(1, [2])", (1, [2])), ("{1: None}", {1: None}), ("{1}", {1})],
)
def test_file_takes_literals(opts, load, literal, value):
    load(f"createOrSet(mine={literal})")
    assert opts.mine == value


def test_file_reads_values_of_the_options(opts, load):
    load("deviceIterations(6)\nTraining.gradientAccumulation(options.device_iterations)")
    assert opts.Training.gradient_accumulation == 6


def test_files_add_up(opts, load):
    load("deviceIterations(4)\nlogDir('logs')")
    load("deviceIterations(5)")
    assert (opts.device_iterations, opts.log_dir) == (5, "logs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# comment\n\nlogDir('a')\n\n# more\ndeviceIterations(3\n",
            "SyntaxError at line 2 of my.cfg: '(' was never closed\n> options.deviceIterations(3",
        ),
        (
            "  deviceIterations = = 3  # why\n",
            "SyntaxError at line 1 of my.cfg: invalid syntax\n"
            "> options.deviceIterations = = 3  # why",
        ),
        (
            "if True: pass",
            "SyntaxError at line 1 of my.cfg: invalid syntax\n> options.if True: pass",
        ),
    ],
)
def test_file_with_a_syntax_error_names_the_command_and_changes_nothing(opts, load, text, message):
    before = repr(opts)
    with pytest.raises(options.ConfigFileError) as caught:
        load(text)
    assert str(caught.value) == message
    assert repr(opts) == before


@pytest.mark.parametrize("line", ["logDir('a\0b')", "update(" + "(" * 300 + ")" * 300 + ")"])
def test_file_that_python_cannot_read_is_a_syntax_error(load, line):
    with pytest.raises(options.ConfigFileError, match=r"^SyntaxError at line 1 of my\.cfg: .*"):
        load(line)


def test_lines_of_a_file_are_python(opts, load):
    load(
        "deviceIterations(2 * 3)\n"
        "Precision.setPartialsType(torch.half)\n"
        "_Popart.options['a'] = [n for n in range(3)][-1]\n"
        "device_iterations += 1\n"
    )
    assert opts.device_iterations == 7
    assert opts._Popart.options["partialsTypeMatMuls"] == "half"
    assert opts._Popart.options["a"] == 2


def test_file_error_is_a_plain_exception():
    assert options.ConfigFileError.__bases__ == (Exception,)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("deviceIterations(2.0)", UsageAssertionError),
        ("deviceIterations()", TypeError),
        ("noSuchSetter(2)", UsageAttributeError),
        ("no_such_value = 2", UsageAssertionError),
        ("outputMode(poptorch.OutputMode.Nope)", AttributeError),
        ("deviceIterations(1 // 0)", ZeroDivisionError),
        ("deviceIterations(unknown)", NameError),
    ],
)
def test_errors_of_setters_pass_through_a_file(load, line, error):
    with pytest.raises(error):
        load(line)


def test_lines_before_one_that_raises_are_applied(opts, load):
    with pytest.raises(ZeroDivisionError):
        load("deviceIterations(4)\ndeviceIterations(1 // 0)\n")
    assert opts.device_iterations == 4


def test_file_must_exist(opts, tmp_path):
    with pytest.raises(FileNotFoundError):
        opts.loadFromFile(tmp_path / "missing.cfg")


@pytest.mark.parametrize("chain", [("a",), ("a", "b"), ("a", "b", "c")], ids=len)
def test_a_file_cannot_load_itself(opts, tmp_path, chain):
    for name, loaded in zip(chain, (*chain[1:], chain[0]), strict=True):
        path = tmp_path / loaded
        (tmp_path / name).write_text(f"modelName('{name}')\nloadFromFile({str(path)!r})\n")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for first in ("a", "link"):
        message = rf"the file loads itself \({' -> '.join((*chain, chain[0]))}\)"
        with pytest.raises(UsageValueError, match=message):
            opts.loadFromFile(tmp_path / first)
    # Nothing of it remains.
    (tmp_path / "a").write_text("deviceIterations(3)\n")
    assert opts.loadFromFile(tmp_path / "a").device_iterations == 3


def test_a_file_may_be_loaded_twice_by_another(opts, tmp_path):
    (tmp_path / "inner").write_text("deviceIterations(3)\n")
    line = f"loadFromFile({str(tmp_path / 'inner')!r})\n"
    (tmp_path / "outer").write_text(line + "deviceIterations(2)\n" + line)
    assert opts.loadFromFile(tmp_path / "outer").device_iterations == 3


def test_json_that_is_nested_too_deeply(opts):
    with pytest.raises(UsageValueError, match="this is not JSON"):
        opts.from_json("[" * 100_000)


def test_file_must_be_text(opts, tmp_path):
    path = tmp_path / "binary.cfg"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(options.ConfigFileError, match=r"binary\.cfg is not UTF-8 text"):
        opts.loadFromFile(path)


def test_every_enum_can_be_named_in_a_file(opts, load):
    for name in enums.__all__:
        member = next(iter(getattr(enums, name)))
        load(f"createOrSet(mine_{name}=poptorch.{name}.{member.name})")
        assert opts(f"mine_{name}") == member
