"""The order in which stages work on micro-batches, and the check of such an order."""

import itertools
from pathlib import Path

import pytest

from popsim_torch import _native
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import is_pipelined
from popsim_torch.stages.schedules import micro_batches_in_flight

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "schedules.txt"

NAMES = ("sequential", "pipelined", "grouped", "interleaved")
WITH_A_TURN = ("sequential", "pipelined")
SIZES = [(s, m) for s in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 5, 8, 16, 17)]
CASES = [(n, s, m, t) for n in NAMES for s, m in SIZES for t in (False, True)]


def golden_cases():
    """Yield the cases of the golden file as test parameters."""
    for line in GOLDEN.read_text().splitlines():
        if line and not line.startswith("#"):
            case, actions = line.split(": ")
            name, stages, micro_batches, kind = case.split()
            training = {"training": True, "inference": False}[kind]
            yield pytest.param(name, int(stages), int(micro_batches), training, actions, id=case)


def generate(name, num_stages, num_micro_batches, training):
    return _native.schedule_actions(name, num_stages, num_micro_batches, training)


def validate(actions, num_stages, num_micro_batches, training):
    with _native.translated_errors():
        _native.validate_schedule(actions, num_stages, num_micro_batches, training)


def read(actions):
    """Return (stage, kind, micro-batch) of every action but the update."""
    words = actions.split()
    for word in words:
        if word == "U":
            continue
        kind = "F" if "F" in word else "B"
        stage, micro_batch = word.split(kind)
        yield int(stage), kind, int(micro_batch)


def most_in_flight(actions, num_slots):
    """Return the largest number of micro-batches begun and not finished."""
    done = {}
    most = 0
    for _, _, micro_batch in read(actions):
        done[micro_batch] = done.get(micro_batch, 0) + 1
        most = max(most, sum(count < num_slots for count in done.values()))
    return most


@pytest.mark.parametrize("name, stages, micro_batches, training, actions", list(golden_cases()))
def test_golden(name, stages, micro_batches, training, actions):
    assert generate(name, stages, micro_batches, training) == actions


def test_every_generated_schedule_is_valid():
    for name, stages, micro_batches, training in CASES:
        validate(generate(name, stages, micro_batches, training), stages, micro_batches, training)


def test_every_action_stands_once():
    for name, stages, micro_batches, training in CASES:
        actions = list(read(generate(name, stages, micro_batches, training)))
        kinds = "FB" if training else "F"
        wanted = set(itertools.product(range(stages), kinds, range(micro_batches)))
        assert len(actions) == len(wanted)
        assert set(actions) == wanted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_times_laid_end_to_end_are_the_actions(name, training):
    for stages, micro_batches in SIZES:
        case = name, stages, micro_batches, training
        words = []
        for repeats, times in _native.schedule_times(*case):
            for repeat in range(repeats):
                words += [
                    word if word == "U" else further(word, repeat)
                    for time in times
                    for word in time
                ]
        assert " ".join(words) == generate(*case)


def further(word, distance):
    ((stage, kind, micro_batch),) = read(word)
    return f"{stage}{kind}{micro_batch + distance}"


def test_a_stage_runs_each_pass_once_at_a_time():
    for case in CASES:
        for _, times in _native.schedule_times(*case):
            for time in times:
                passes = [word.rstrip("0123456789") for word in time]
                assert len(passes) == len(set(passes)) > 0


@pytest.mark.parametrize("training", [False, True])
def test_how_many_micro_batches_are_in_flight(training):
    """The rules of the documentation, including PopTorch's number of stages."""
    for n in (2, 3, 4, 7, 16):
        rules = {
            "sequential": 1,
            "pipelined": 2 * n - 1 if training else n,
            "grouped": 2 * n if training else n,
            "interleaved": n,
        }
        for name, expected in rules.items():
            assert _native.max_in_flight(name, n, 2 * n, training) == expected
            assert _native.max_in_flight(name, n, 10**12, training) == expected
            assert _native.max_in_flight(name, n, 1, training) == 1


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_what_is_called_pipelined_has_several_micro_batches_in_flight(schedule):
    assert is_pipelined(schedule) == (micro_batches_in_flight(schedule, 2, training=True) > 1)
    assert is_pipelined(schedule) == (micro_batches_in_flight(schedule, 2, training=False) > 1)


def test_training_ends_with_its_only_update():
    for name, stages, micro_batches, training in CASES:
        words = generate(name, stages, micro_batches, training).split()
        assert words.count("U") == training
        assert (words[-1] == "U") == training


def test_a_micro_batch_passes_its_stages_in_order():
    for name, stages, micro_batches, training in CASES:
        way = [(s, "F") for s in range(stages)]
        if training:
            way += [(s, "B") for s in reversed(range(stages))]
        actions = list(read(generate(name, stages, micro_batches, training)))
        for mb in range(micro_batches):
            assert [(s, k) for s, k, m in actions if m == mb] == way


def test_a_stage_takes_micro_batches_in_order():
    for name, stages, micro_batches, training in CASES:
        actions = list(read(generate(name, stages, micro_batches, training)))
        for stage, kind in itertools.product(range(stages), "FB" if training else "F"):
            order = [m for s, k, m in actions if (s, k) == (stage, kind)]
            assert order == list(range(micro_batches))


def test_the_turn_is_taken_at_once():
    """On the last stage, backward follows forward directly: nothing is stashed there."""
    for name, stages, micro_batches, _ in CASES:
        if name not in WITH_A_TURN:
            continue
        words = generate(name, stages, micro_batches, True).split()
        for mb in range(micro_batches):
            assert words.index(f"{stages - 1}B{mb}") == words.index(f"{stages - 1}F{mb}") + 1


def test_a_sequential_schedule_has_one_micro_batch_in_flight():
    for stages, micro_batches in SIZES:
        actions = generate("sequential", stages, micro_batches, True)
        assert most_in_flight(actions, 2 * stages) == 1


def test_a_pipeline_has_one_micro_batch_less_in_flight_than_it_is_deep():
    """The last slot of a micro-batch frees its stashes before the next micro-batch enters."""
    for stages, micro_batches in SIZES:
        for training, depth in ((True, 2 * stages - 1), (False, stages)):
            actions = generate("pipelined", stages, micro_batches, training)
            num_slots = 2 * stages if training else stages
            # The running count never includes a micro-batch with a single slot.
            expected = 0 if num_slots == 1 else min(max(depth - 1, 1), micro_batches)
            assert most_in_flight(actions, num_slots) == expected


# The schedules that are rotations of a ring


def ring(num_stages, training):
    """Return the actions of one micro-batch in order: the ring of the devices of all slots."""
    way = [(stage, "F") for stage in range(num_stages)]
    return way + [(stage, "B") for stage in reversed(range(num_stages)) if training]


def rotations(name, num_stages, training):
    """Return the rotations that a schedule uses at the same time.

    Grouped: all rotations. Interleaved: those in which no device appears twice in any slot.
    Sequential: one rotation.
    """
    slots = ring(num_stages, training)
    if name == "sequential":
        return [0]
    used = []
    for rotation in range(len(slots)):
        together = [*used, rotation]
        devices = [
            [slots[(time - one) % len(slots)][0] for one in together] for time in range(len(slots))
        ]
        if name == "grouped" or all(len(set(row)) == len(row) for row in devices):
            used.append(rotation)
    return used


def times(name, num_stages, num_micro_batches, training):
    """Return the actions at each time step, if micro-batches use the rotations alternately."""
    slots, used = ring(num_stages, training), rotations(name, num_stages, training)
    table = {}
    for mb in range(num_micro_batches):
        begin = mb // len(used) * len(slots) + used[mb % len(used)]
        for slot, (stage, kind) in enumerate(slots):
            table.setdefault(begin + slot, set()).add((stage, kind, mb))
    return [table[time] for time in sorted(table)]


RING_NAMES = ("sequential", "grouped", "interleaved")


@pytest.mark.parametrize("name", RING_NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_a_schedule_runs_rotations_of_the_ring(name, training):
    for stages, micro_batches in SIZES:
        actions = list(read(generate(name, stages, micro_batches, training)))
        for expected in times(name, stages, micro_batches, training):
            now, actions = actions[: len(expected)], actions[len(expected) :]
            assert set(now) == expected
        assert actions == []


def test_how_many_rotations_there_are():
    for stages in (1, 2, 3, 4, 7):
        assert len(rotations("grouped", stages, True)) == 2 * stages
        assert len(rotations("interleaved", stages, True)) == stages
        assert len(rotations("grouped", stages, False)) == stages
        assert len(rotations("interleaved", stages, False)) == stages


@pytest.mark.parametrize("name, times_n", [("grouped", 2), ("interleaved", 1)])
def test_as_many_micro_batches_are_in_flight_as_there_are_rotations(name, times_n):
    for stages, micro_batches in SIZES:
        actions = generate(name, stages, micro_batches, True)
        assert most_in_flight(actions, 2 * stages) == min(times_n * stages, micro_batches)


@pytest.mark.parametrize("name, length", [("grouped", 1), ("interleaved", 2)])
def test_how_long_a_schedule_takes(name, length):
    for stages, micro_batches in SIZES:
        num_times = len(times(name, stages, micro_batches, True))
        assert num_times == length * (micro_batches - 1) + 2 * stages


def test_groups_run_forward_before_they_run_backward():
    for stages, micro_batches in SIZES:
        actions = list(read(generate("grouped", stages, micro_batches, True)))
        for expected in times("grouped", stages, micro_batches, True):
            kinds = [kind for _, kind, _ in actions[: len(expected)]]
            assert kinds == sorted(kinds, reverse=True)
            del actions[: len(expected)]


def test_a_full_pipeline_keeps_every_stage_busy():
    """Between fill and drain, each stage works on another micro-batch."""
    stages, micro_batches = 3, 8
    words = generate("pipelined", stages, micro_batches, False).split()
    full = words[3:-3]  # after the fill 0F0 | 1F0 0F1, and before the drain
    slots = [full[i : i + stages] for i in range(0, len(full), stages)]
    for slot in slots:
        assert [word[0] for word in slot] == ["2", "1", "0"]
        assert len({word[2:] for word in slot}) == stages


def test_one_stage_has_nothing_to_overlap():
    for micro_batches, training in itertools.product((1, 2, 7), (False, True)):
        one = generate("sequential", 1, micro_batches, training)
        assert one == generate("pipelined", 1, micro_batches, training)


def test_an_unknown_generator():
    with (
        pytest.raises(Error, match=r"'zigzag' is not known.*'sequential', .*'interleaved'"),
        _native.translated_errors(),
    ):
        generate("zigzag", 1, 1, True)


# The check


VALID = "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1 U"


def test_the_check_accepts_a_valid_schedule():
    validate(VALID, 2, 2, True)


@pytest.mark.parametrize(
    "actions, culprit",
    [
        ("1F0 0F0 1B0 0B0 U", "1F0 is out of order"),
        ("0F0 1F0 0B0 1B0 U", "0B0 is out of order"),
        ("0F0 0F0 1F0 1B0 0B0 U", "0F0 is out of order"),
        ("0F1 1F1 1B1 0B1 0F0 1F0 1B0 0B0 U", "0F1 is out of order"),
        ("0F0 1F0 2F0 0B0 U", "2F0 (is out of order|does not exist)"),
        ("0F0 2B0 1B0 0B0 U", "2B0 (is out of order|does not exist)"),
        ("0F0 1F0 1B0 0B0 0F1 U", "0F1 is out of order"),
        ("0F0 1F0 1B0 U", "micro-batch 0 is not finished"),
        ("0F0 1F0 1B0 0B0", "the update is missing"),
        ("U 0F0 1F0 1B0 0B0", "0F0 comes after the update"),
        ("0F0 1F0 1B0 0B0 U U", "U comes after the update"),
        ("", "micro-batch 0 is not finished"),
    ],
)
def test_the_check_names_what_is_wrong(actions, culprit):
    micro_batches = 2 if "F1 1F1" in actions else 1
    with pytest.raises(InternalError, match=culprit) as caught:
        validate(actions, 2, micro_batches, True)
    assert actions in str(caught.value)


@pytest.mark.parametrize(
    "actions, culprit",
    [
        ("(0F0 1F0 1B0 0B0)x4 U", "micro-batch 4 is not finished"),
        ("(0F0 1F0 1B0 0B0)x6 U", "repeats 6 times, which is too many"),
        ("(0F0 1F0 1B0 0B0)x5", "the update is missing"),
        ("(0F0 1F0 1B0 0B0 U)x5", "must contain every action of one micro-batch once"),
        ("(0F0)x5 (1F0 1B0 0B0)x5 U", "must contain every action of one micro-batch once"),
        ("(0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1)x2 0F4 1F4 1B4 0B4 U", "must contain every action"),
        ("0F0 (1F0 0F0 1B0 0B0)x4 1F4 1B4 0B4 U", "0F0 is out of order"),
        ("0F0 (1F0 0F1 1B0 0B0)x3 1F4 1B4 0B4 U", "1F4 is out of order"),
    ],
)
def test_the_check_sees_through_brackets(actions, culprit):
    validate("0F0 (1F0 0F1 1B0 0B0)x4 1F4 1B4 0B4 U", 2, 5, True)
    with pytest.raises(InternalError, match=culprit):
        validate(actions, 2, 5, True)


def test_brackets_are_accepted_only_where_the_actions_in_full_are():
    stretches = ("0F0 1F0", "1F0 0F1", "0F1 1F0", "0F1 1F1", "1F1 0F1", "0F0", "1F4", "1F0")
    accepted = 0
    for first, second, times in itertools.product(stretches, stretches, (2, 4)):
        actions = f"0F0 ({first})x{times} {second}"
        try:
            validate(actions, 2, 5, False)
        except InternalError:
            continue
        accepted += 1
        validate(in_full(actions), 2, 5, False)
    assert accepted == 2  # in either order of the stages


@pytest.mark.parametrize(
    "actions, culprit",
    [
        ("(0F0 (0F1)x2", r"'\(0F1\)x2' opens a second bracket"),
        ("0F0)x2", r"'0F0\)x2' closes a bracket that is not open"),
        ("(0F0 0F1", "a bracket is not closed in"),
        ("(0F0)", "a bracket without a number of repetitions"),
        ("(0F0)x0", "a bracket without a number of repetitions"),
        ("(0F0)2", "a bracket without a number of repetitions"),
    ],
)
def test_brackets_that_cannot_be_read(actions, culprit):
    with pytest.raises(Error, match=culprit):
        validate(actions, 1, 2, False)


@pytest.mark.parametrize("actions", ["0F0 0B0", "0F0 U", "0F0 0B0 U"])
def test_inference_has_neither_backward_nor_update(actions):
    with pytest.raises(InternalError, match=r"out of order|does not exist|must have no update"):
        validate(actions, 1, 1, False)


@pytest.mark.parametrize("word", ["0X0", "F0", "0F", "-1F0", "0F-1", "0F0x", "0 F0", "u", "0f0"])
def test_a_word_that_is_no_action(word):
    with pytest.raises(Error, match="is not an action; actions look like 2F0, 2B0 or U"):
        validate(f"0F0 {word}", 1, 1, False)


def in_full(actions):
    """Return a schedule without brackets."""
    words, inside = [], None
    for word in actions.split():
        if word[0] == "(":
            inside = []
        (words if inside is None else inside).append(word.strip("(").split(")")[0])
        if ")" in word:
            for time in range(int(word.split(")x")[1])):
                words += [f"{s}{k}{m + time}" for s, k, m in read(" ".join(inside))]
            inside = None
    return " ".join(words)


@pytest.mark.timeout(20)
def test_a_schedule_in_full_is_checked_fast():
    """Each action costs the same: messages are only made for errors."""
    for name, training in itertools.product(NAMES, (False, True)):
        validate(in_full(generate(name, 2, 20_000, training)), 2, 20_000, training)


@pytest.mark.timeout(20)
def test_a_long_schedule_is_as_short_as_any():
    for name, training in itertools.product(NAMES, (False, True)):
        actions = generate(name, 4, 10**15, training)
        assert len(actions.split()) <= 2 * 8 * 8
        validate(actions, 4, 10**15, training)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_a_schedule_with_brackets_is_the_one_without(name, training):
    """Only schedules of more than a thousand actions have brackets."""
    stages, micro_batches = 3, 1001
    actions = generate(name, stages, micro_batches, training)
    assert "(" in actions
    slots = list(read(in_full(actions)))
    expected = list(read(generate(name, stages, 20, training)))
    extra = micro_batches - 20
    assert len(slots) == micro_batches * stages * (2 if training else 1)
    # Its beginning and its end are those of a shorter schedule.
    assert slots[:40] == expected[:40]
    assert slots[-30:] == [(s, k, m + extra) for s, k, m in expected[-30:]]
    validate(in_full(actions), stages, micro_batches, training)


def test_a_removed_action_is_always_noticed():
    for name, (stages, micro_batches) in itertools.product(NAMES, [(1, 2), (2, 3), (3, 5)]):
        words = generate(name, stages, micro_batches, True).split()
        for i in range(len(words)):
            with pytest.raises(InternalError):
                validate(" ".join(words[:i] + words[i + 1 :]), stages, micro_batches, True)


def test_two_swapped_actions_of_a_micro_batch_are_always_noticed():
    words = generate("pipelined", 3, 5, True).split()
    for i, j in itertools.combinations(range(len(words) - 1), 2):
        if words[i][2:] == words[j][2:]:
            swapped = list(words)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            with pytest.raises(InternalError, match="out of order"):
                validate(" ".join(swapped), 3, 5, True)
