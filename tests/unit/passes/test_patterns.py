"""Patterns of ops: which ops they match, and their replacements."""

from dataclasses import replace

import pytest
import torch

from popsim_torch.ir import Graph, Phase, TensorKind, Uses
from popsim_torch.passes import pipeline
from popsim_torch.passes.patterns import OpPattern, Pattern, Rewrite, operand, rewrite, whole

F32 = torch.float32


class Chain:
    """Ops that each read the result of the op before: ``a`` writes 1 from 0, ``b`` writes 2, ..."""

    def __init__(self, kinds: str) -> None:
        self.graph = Graph()
        self.tensors = [self.graph.add_tensor(TensorKind.INPUT, F32, (6,))]
        for kind in kinds:
            self.add(kind, len(self.tensors) - 1)

    def add(self, kind, *reads, view=None):
        inputs = [self.tensors[i] for i in reads]
        if view is not None:
            inputs = [self.graph.add_view(inputs[0], *view)]
        self.tensors.append(self.graph.add_tensor(TensorKind.VALUE, F32, (6,)))
        return self.graph.add_op(kind, inputs, [self.tensors[-1]], {}, phase=Phase.FORWARD)

    @property
    def kinds(self):
        return "".join(op.kind for op in self.graph.ops)


def joined(kind):
    """Return a replacement: one op instead of ``last`` that reads the inputs of ``first``."""

    def join(match):
        first = match.ops["first"]
        return {"last": replace(match.ops["last"], kind=kind, inputs=list(first.inputs))}

    return join


def pair(first, last, kind, **kwargs):
    pattern = Pattern(
        seed=OpPattern("last", last, {0: whole("between")}),
        others=[OpPattern("first", first, output="between")],
        inner=["between"],
        **kwargs,
    )
    return Rewrite(kind, "", pattern, joined(kind))


def test_two_ops_become_one_in_the_place_of_the_second():
    chain = Chain("xaby")
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 1
    assert chain.kinds == "xcy"
    assert chain.graph.ops[1].inputs == [1] and chain.graph.ops[1].outputs == [3]


def test_what_is_new_is_looked_at_once_more():
    chain = Chain("aaaa")
    assert rewrite(chain.graph, [pair("a", "a", "a")]) == 3
    assert chain.kinds == "a"
    assert chain.graph.ops[0].inputs == [0] and chain.graph.ops[0].outputs == [4]


def test_a_second_run_changes_nothing():
    chain = Chain("abab")
    rewrites = [pair("a", "b", "c")]
    assert rewrite(chain.graph, rewrites) == 2
    assert rewrite(chain.graph, rewrites) == 0
    assert chain.kinds == "cc"


def test_an_inner_tensor_with_another_reader_stays():
    chain = Chain("ab")
    chain.add("y", 1)
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 0
    assert chain.kinds == "aby"


def test_an_inner_tensor_that_is_read_twice_by_one_op_stays():
    chain = Chain("a")
    chain.add("b", 1, 1)
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 0


def test_an_inner_tensor_that_the_host_can_see_stays():
    chain = Chain("ab")
    chain.tensors[1].kind = TensorKind.VARIABLE
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 0


def test_a_part_of_a_tensor_is_not_the_whole_of_it():
    chain = Chain("a")
    chain.add("b", 1, view=((3,), (1,), 3))
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 0
    chain = Chain("a")
    chain.add("b", 1, view=((2, 3), (3, 1), 0))
    assert rewrite(chain.graph, [pair("a", "b", "c")]) == 1


def is_on(_match, op):
    return "on" in op.attributes


def test_conditions_of_ops_and_of_matches_count():
    assert rewrite(Chain("ab").graph, [pair("a", "b", "c", where=lambda match: False)]) == 0
    pattern = Pattern(
        seed=OpPattern("last", "b", {0: whole("between")}),
        others=[
            OpPattern("first", "a", output="between", where=lambda _, op: "on" in op.attributes)
        ],
        inner=["between"],
    )
    chain = Chain("abab")
    chain.graph.ops[2].attributes["on"] = True
    assert rewrite(chain.graph, [Rewrite("c", "", pattern, joined("c"))]) == 1
    assert chain.kinds == "abc"


def test_a_replacement_may_decline():
    chain = Chain("ab")
    pattern = pair("a", "b", "c").pattern
    rewrites = [Rewrite("no", "", pattern, lambda _: None), Rewrite("d", "", pattern, joined("d"))]
    assert rewrite(chain.graph, rewrites) == 1
    assert chain.kinds == "d"


def test_an_operand_at_any_position_is_searched_for():
    chain = Chain("za")
    chain.add("b", 1, 2)
    pattern = Pattern(
        seed=OpPattern("last", "b", among=whole("between")),
        others=[OpPattern("first", "a", output="between")],
        inner=["between"],
    )
    seen = []

    def join(match):
        seen.append(match.positions["last"])
        return joined("c")(match)

    assert rewrite(chain.graph, [Rewrite("c", "", pattern, join)]) == 1
    assert seen == [1]


OPTIONAL = Pattern(
    seed=OpPattern("last", "b", {0: whole("end")}),
    others=[
        OpPattern("middle", "m", among=whole("start"), output="end", optional=True),
        OpPattern("first", "a", output="start"),
    ],
    inner=["start", "end"],
)


@pytest.mark.parametrize(("kinds", "gone"), [("amb", 2), ("ab", 1), ("anb", 0)])
def test_an_op_that_may_be_missing_is_a_bridge(kinds, gone):
    chain = Chain(kinds)
    assert rewrite(chain.graph, [Rewrite("c", "", OPTIONAL, joined("c"))]) == gone


READERS = Pattern(
    seed=OpPattern("last", "s", {0: operand("from")}, output="result"),
    others=[
        OpPattern("one", "r", {0: whole("result")}, output="of_r"),
        OpPattern("two", "t", {0: whole("result")}, optional=True),
        OpPattern("three", "u", {0: whole("of_r")}, given="two"),
    ],
    inner=["result"],
)


def test_readers_are_found_from_what_they_read():
    found = []

    def note(match):
        found.append(sorted(match.ops))

    for more in ((), (("t", 2), ("u", 3)), (("t", 2),)):
        chain = Chain("xsr")
        for kind, read in more:
            chain.add(kind, read)
        assert rewrite(chain.graph, [Rewrite("", "", READERS, note)]) == 0
    # With ``t`` and without ``u`` there is no match: ``t`` reads an inner value.
    assert found == [["last", "one"], ["last", "one", "three", "two"]]


def test_uses_follow_replacements():
    chain = Chain("abcd")
    chain.add("e", 1)
    graph, uses = chain.graph, Uses(chain.graph)
    old = graph.ops[1]
    new = replace(old, kind="z", inputs=[0], outputs=list(old.outputs))
    uses.replace(old, new)
    graph.ops[1] = new
    fresh = Uses(graph)
    for tensor in graph.tensors:
        assert list(map(id, uses.readers(tensor.id))) == list(map(id, fresh.readers(tensor.id)))
        assert list(map(id, uses.writers(tensor.id))) == list(map(id, fresh.writers(tensor.id)))
    assert uses.position(new) == 1
    uses.replace(new, None)
    assert list(uses.writers(2)) == [] and [op.kind for op in uses.readers(0)] == ["a"]


def test_every_rewrite_has_a_name_of_its_own_and_says_what_it_does():
    names = [one.name for one in pipeline.REWRITES]
    assert len({*names}) == len(names) >= 6
    assert all(one.does.endswith(".") and len(one.does) > 30 for one in pipeline.REWRITES)
