"""The tensors that a run returns: model outputs, inputs that forward changed, and anchors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from popsim_torch.anchors import AnchorRequest, check_return_mode, num_returned, shape_of_entries
from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, closest_names, example_names
from popsim_torch.ir import (
    NOWHERE,
    Anchor,
    Graph,
    LoopCounts,
    Op,
    Phase,
    Program,
    Role,
    Tensor,
    TensorKind,
    names,
)
from popsim_torch.ir.map_code import MapCode
from popsim_torch.ir.selecting import find_name
from popsim_torch.passes.anchor_patterns import expand_patterns
from popsim_torch.passes.places import Place, Places


@dataclass(frozen=True)
class ReturnRequest:
    """The tensors that a run returns besides anchors.

    Attributes:
        loop: How often a call runs the model.
        output_mode: Which outputs are returned; not ``Default``.
        output_period: The period of ``EveryN``.
        pipelined: Whether several micro-batches are in flight at a time.
    """

    loop: LoopCounts
    output_mode: OutputMode
    output_period: int
    pipelined: bool


def add_returns(program: Program, request: ReturnRequest) -> None:
    """Add the returns of outputs, changed inputs and anchored tensors, in place.

    Args:
        program: A program without returns.
        request: The tensors to return.

    Raises:
        Error: An anchor has an unknown name, or a return period does not fit.
    """
    tensors, returns = program.graph.tensors, _Returns(program, request)
    for tensor_id in program.outputs:
        returns.add_output(tensors[tensor_id], request.output_mode, request.output_period)
    for tensor_id in program.changed_inputs.values():
        returns.add_output(tensors[tensor_id], OutputMode.All, 1)
    for anchor in expand_patterns(program):
        returns.add_anchor(anchor)
    returns.finish()


_NUM_WRITERS_OF_KEPT = {TensorKind.CONSTANT: 0, TensorKind.VALUE: 1}


class _Returns:
    """Adds the ops that copy tensors to the host.

    Each op is directly after the op that computes its tensor, so that the tensor's memory is free
    as early as possible.
    """

    def __init__(self, program: Program, request: ReturnRequest) -> None:
        self._program = program
        self._graph: Graph = program.graph
        self._loop = request.loop
        self._pipelined = request.pipelined
        self._places = Places(program)
        self._behind: dict[int, list[Op]] = defaultdict(list)
        self._num_returns = 0
        # Index of the return that holds an anchor's copy.
        self._kept: dict[tuple[int, Place, OutputMode, int], int] = {}
        # Tensors that are read from their own memory.
        self._staying: set[int] = set()
        self._uses = self._places.uses
        # The last iteration of a loop that a condition ends is not known in advance.
        self._ends_by_value = any(op.kind == "repeat_while" for op in self._graph.ops)

    def add_output(self, tensor: Tensor, mode: OutputMode, period: int) -> None:
        """Return a tensor from every run, as forward left it; once, if it is always the same."""
        if self._is_constant(tensor):
            mode, period = OutputMode.Final, 1
        self._count(mode, period, "Options.outputMode", any_period=False)
        self._add(tensor, mode, period, self._places.in_forward(tensor), False)

    def add_anchor(self, request: AnchorRequest) -> None:
        """Keep a tensor's values of each run until they are read."""
        graph, name = self._graph, self._anchored_name(request)
        tensor = graph.tensors[graph.names[name]]
        mode, period = request.output_mode, request.period
        where = f"Options.anchorTensor('{request.short_name}')"
        place = self._places.of_value(name, tensor)
        if tensor.role == Role.ACCUMULATOR and request.output_mode == OutputMode.Final:
            place = self._after_update(tensor, place)
        count = self._count(mode, period, where, any_period=True)
        root = graph.root(tensor)
        kept: int | None = None
        stays = self._stays(root, mode, period)
        if self._ends_by_value and not stays and period <= self._loop.device_iterations:
            raise Error(_of_unknown_iterations(request))
        if stays:
            self._staying.add(root.id)
        else:
            # Views that only rearrange a tensor are read from a copy of the tensor, which takes as
            # long as a copy of one view.
            source = root if _is_rearrangement(tensor, root) else tensor
            key = (source.id, place, mode, period)
            if key not in self._kept:
                self._kept[key] = self._num_returns
                self._add(source, mode, period, place, True)
            kept = self._kept[key]
        self._program.anchors[request.short_name] = Anchor(
            tensor.id,
            kept,
            shape_of_entries(tensor.shape, count),
            period if period > self._loop.device_iterations else 0,
        )

    def _anchored_name(self, anchor: AnchorRequest) -> str:
        known, asked = self._graph.names, anchor.long_name
        assert isinstance(asked, str)  # patterns are expanded
        found = find_name(asked, known)
        if found is not None:
            return found
        offered = find_name(asked, self._program.offers.names)
        if offered is not None:
            raise Error(
                f"Options.anchorTensor: '{offered}' is in the body of a loop that makes no "
                "iteration, or a number of iterations that depends on a value: there is no fixed "
                "number of values to return. Return it from the body, and anchor the result of the "
                "loop."
            )
        everything = self._program.tensor_names()
        closest = closest_names(asked, everything)
        raise Error(
            f"Options.anchorTensor: no tensor named '{asked}' among the "
            f"{len(everything)} "
            f"tensors of this graph (Anchor tensor not in Ir Tensors)."
            f"{names.why_missing(asked)} "
            + (
                f"Closest names: {', '.join(map(repr, closest))}. "
                if closest
                else _examples(asked, known)
            )
            + "Compile without the anchor and call model.getTensorNames() to list them all."
        )

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return whether the value of a tensor is known when the model is compiled."""
        root = self._graph.root(tensor)
        writers = self._uses.writers(root.id)
        if root.kind == TensorKind.VALUE:
            return all(op.phase == Phase.SETUP for op in writers)
        return root.kind == TensorKind.CONSTANT and not writers

    def _stays(self, root: Tensor, mode: OutputMode, period: int) -> bool:
        """Return whether a tensor's memory can hold the value for an anchor until the next run.

        It can if the tensor is constant, or if only one op writes it, the last micro-batch is
        requested, and no other value is written there: ``finish`` makes sure of that.
        """
        loop = self._loop
        return (
            len(self._uses.writers(root.id)) == _NUM_WRITERS_OF_KEPT.get(root.kind)
            and not self._pipelined
            and loop.replicas == 1
            and returned_dtype(root.dtype, mode) == root.dtype
            and (
                mode == OutputMode.Final
                or (period == 1 and loop.device_iterations * loop.gradient_accumulation == 1)
            )
        )

    def finish(self) -> None:
        """Put the collected ops into their places, and reserve the memory of anchored tensors."""
        for tensor_id in self._staying:
            tensor = self._graph.tensors[tensor_id]
            if tensor.kind == TensorKind.VALUE:
                tensor.kind = TensorKind.VARIABLE
        ops = list(self._behind.pop(-1, []))
        for position, op in enumerate(self._graph.ops):
            ops.append(op)
            ops.extend(self._behind.pop(position, []))
        self._graph.ops = ops

    def _add(
        self,
        tensor: Tensor,
        mode: OutputMode,
        period: int,
        place: Place,
        keep: bool,
    ) -> None:
        position, phase, stage = place
        self._behind[position].append(
            Op(
                "anchor",
                [tensor.id],
                [],
                {
                    "mode": mode.name,
                    "period": period,
                    "buffer": self._num_returns,
                    "keep": keep,
                    "per_update": phase == Phase.UPDATE,
                    "dtype": dtype_name(returned_dtype(tensor.dtype, mode)),
                },
                phase,
                stage,
                tensor.name,
                self._graph.ops[position].origin if position >= 0 else NOWHERE,
            )
        )
        self._num_returns += 1

    def _count(self, mode: OutputMode, period: int, where: str, *, any_period: bool) -> int:
        """Return the number of returned entries; only an anchor may have any period."""
        loop = self._loop
        counts = loop.device_iterations, loop.gradient_accumulation, loop.replicas
        check_return_mode(
            *(mode, period, loop.device_iterations),
            pipelined=self._pipelined,
            any_period=any_period,
            where=where,
        )
        return num_returned(mode, period, *counts, any_period=any_period, where=where)

    def _after_update(self, accumulator: Tensor, place: Place) -> Place:
        """Clear an accumulator after its update, as at the start of a device iteration.

        An accumulator with the running mean is not cleared; ``place`` is where it is complete.
        """
        root = self._graph.root(accumulator)
        if self._uses.writers(root.id)[-1].attributes.get("running"):
            return place
        whole = self._graph.add_view(root, root.shape, root.strides, 0)
        zero = MapCode()
        zero.results = [zero.value(0.0)]
        clear = zero.attributes()
        clear |= {"dtypes": [dtype_name(root.dtype)], "shape": list(root.shape)}
        op = Op("map", [], [whole.id], clear, Phase.UPDATE, 0, f"zero {accumulator.name}")
        self._graph.ops.append(op)
        return len(self._graph.ops) - 1, Phase.UPDATE, 0


def _of_unknown_iterations(anchor: AnchorRequest) -> str:
    """Return the error message for an anchor in a loop that a condition ends."""
    what = (
        "this tensor's value of the last iteration would not be kept"
        if anchor.output_mode == OutputMode.Final
        else f"there is no fixed number of values for OutputMode.{anchor.output_mode.name}"
    )
    return (
        f"{anchor.call}: the number of iterations of a while_loop is not known in advance, so "
        f"{what}. Enqueue the tensor in the body, to a poptorch.OutfeedQueue; or carry it (or its "
        "sum) through the loop."
    )


def _examples(name: str, known: Iterable[str]) -> str:
    """Return a sentence with some of the existing names."""
    return f"Some of them: {', '.join(map(repr, example_names(name, known)))}. "


def _is_rearrangement(view: Tensor, root: Tensor) -> bool:
    """Return whether a tensor has every element of its memory exactly once."""
    filled = view.offset == 0 and view.memory_order is not None
    return filled and view.dtype == root.dtype and view.numel == root.numel
