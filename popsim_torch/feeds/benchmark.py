"""Measures how fast a dataset is, without a program that takes its elements."""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from popsim_torch import _native
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.checks import check_integer, check_seconds
from popsim_torch.feeds.datasets import Source
from popsim_torch.feeds.infeed import InfeedQueue
from popsim_torch.feeds.producer import ElementKind

__all__ = ["dataset_benchmark", "infeed_benchmark"]

_DEPTH = 3
_SECONDS_PER_WAIT = 0.1
_BYTES_PER_GIGABYTE = 1e9


def dataset_benchmark(
    dataset: Any,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
    seconds_per_step: float | None = None,
) -> list[str]:
    """Measure how fast a dataset makes elements, which is the upper limit for a program.

    One thread makes elements and converts them as an ``InfeedQueue`` does; another thread takes
    them.

    Args:
        dataset: As for :class:`InfeedQueue`; the measurement consumes its elements.
        number_of_epochs: The number of measurements.
        elements_per_epochs: The number of elements in each measurement.
        print_stats: Whether to print the elements and bytes per second of each epoch.
        apply_debug_options: No effect.
        do_memcpy: Whether to copy each element once, as on the way to a device.
        seconds_per_step: How long the program takes for one element that is already available. With
            it, the result says whether the data would limit the program.

    Returns:
        One string of JSON: ``{"epochs": [...], "waits": [...]}``. Each epoch has the numbers
        ``elements_processed``, ``total_bytes_processed``, ``time_elapsed`` (seconds),
        ``elements_per_second`` and ``bandwidth`` (10^9 bytes per second). ``waits`` has the time
        that the thread which takes elements waited for them (seconds): ``total``, and for single
        elements ``p50``, ``p90``, ``p99`` and ``max``. With ``seconds_per_step`` there is a
        ``"verdict"``: ``input_bound`` (bool), ``seconds_per_element`` (the median epoch's) and
        ``data_over_step``, the time of an element divided by the time of a step.

    Raises:
        Error: A count is less than 1, or a time is not positive; the data ends or fails; a tensor
            of an element is empty.
        UsageTypeError: The dataset cannot be iterated.
    """
    where = "dataset_benchmark"
    if not isinstance(apply_debug_options, bool):
        raise Error(f"{where}: apply_debug_options must be True or False.")
    if isinstance(dataset, InfeedQueue):
        raise UsageTypeError(
            f"{where}: this is a queue. Call poptorch.infeed_benchmark(queue, ...)."
        )
    return _Benchmark(where, Source(dataset), _DEPTH, print_stats, do_memcpy).run(
        number_of_epochs, elements_per_epochs, seconds_per_step
    )


def infeed_benchmark(
    infeed_queue: InfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
    seconds_per_step: float | None = None,
) -> list[str]:
    """Measure how fast the dataset of a queue makes elements; see :func:`dataset_benchmark`.

    Args:
        infeed_queue: A queue that no program has used. After the measurement the queue starts from
            the beginning, or, if its dataset can be iterated only once, continues after the
            measured elements.
        number_of_epochs: The number of measurements.
        elements_per_epochs: The number of elements in each measurement.
        print_stats: Whether to print the elements and bytes per second of each epoch.
        do_memcpy: Whether to copy each element once, as on the way to a device.
        seconds_per_step: How long the program takes for one element that is already available.

    Returns:
        As :func:`dataset_benchmark`.

    Raises:
        Error: As for :func:`dataset_benchmark`, or the queue is in use.
        UsageTypeError: The argument is not a queue.
    """
    where = "infeed_benchmark"
    if not isinstance(infeed_queue, InfeedQueue):
        raise UsageTypeError(
            f"{where}: a {type(infeed_queue).__name__} is not an InfeedQueue. Call "
            "poptorch.dataset_benchmark(dataset, ...)."
        )
    source = infeed_queue._unused_source(where)
    depth = infeed_queue.prefetch_depth
    return _Benchmark(where, source, depth, print_stats, do_memcpy).run(
        number_of_epochs, elements_per_epochs, seconds_per_step
    )


class _Benchmark:
    """One measurement."""

    def __init__(
        self, where: str, source: Source, depth: int, print_stats: bool, do_memcpy: bool
    ) -> None:
        self._where, self._source = where, source
        self._print_stats, self._do_memcpy = print_stats, do_memcpy
        self._ready: queue.Queue[list[torch.Tensor]] = queue.Queue(depth)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._waits: list[dict[str, float]] = []  # by epoch

    def run(self, num_epochs: int, num_elements: int, seconds_per_step: float | None) -> list[str]:
        """Measure, and return the figures."""
        check_integer(self._where, "number_of_epochs", num_epochs, 1)
        check_integer(self._where, "elements_per_epochs", num_elements, 1)
        if seconds_per_step is not None:
            check_seconds(self._where, "seconds_per_step", seconds_per_step)
        items = self._source.items()
        producer = threading.Thread(
            target=self._produce, args=(items,), name="popsim_torch benchmark", daemon=True
        )
        producer.start()
        try:
            epochs = [self._measure(epoch, num_epochs, num_elements) for epoch in range(num_epochs)]
        finally:
            self._over.set()
            producer.join()
        figures: dict[str, Any] = {"epochs": epochs, "waits": self._waits}
        if seconds_per_step is not None:
            figures["verdict"] = self._verdict(epochs, seconds_per_step)
        return [json.dumps(figures)]

    def _verdict(self, epochs: list[dict[str, float]], seconds_per_step: float) -> dict[str, Any]:
        """Return whether a program with these steps would wait for its data."""
        seconds = 1 / statistics.median(epoch["elements_per_second"] for epoch in epochs)
        ratio = seconds / seconds_per_step
        if self._print_stats:
            print(
                f"Input bound: {'yes' if ratio > 1 else 'no'}. An element takes "
                f"{1e6 * seconds:.1f} us, {ratio:.2f} times as long as a step."
            )
        return {
            "input_bound": ratio > 1,
            "seconds_per_element": seconds,
            "data_over_step": ratio,
        }

    def _produce(self, items: Iterator[Any]) -> None:
        _native.use_one_thread()  # as a queue's thread does
        kind: ElementKind | None = None
        try:
            for number, item in enumerate(items):
                if kind is None:
                    kind, tensors = ElementKind.of(item)
                    self._check_not_empty(kind)
                else:
                    tensors = kind.tensors_of(item, number)
                if not self._put(tensors):
                    return
        except BaseException as error:
            self._failure = error
        finally:
            self._put([])  # the end of the data

    def _check_not_empty(self, kind: ElementKind) -> None:
        for _, shape in kind.components:
            if 0 in shape:
                raise Error(
                    f"{self._where}: an element has a tensor of the shape {list(shape)}, which "
                    "holds nothing."
                )

    def _put(self, tensors: list[torch.Tensor]) -> bool:
        while not self._over.is_set():
            try:
                self._ready.put(tensors, timeout=_SECONDS_PER_WAIT)
            except queue.Full:
                continue
            return True
        return False

    def _measure(self, epoch: int, num_epochs: int, num_elements: int) -> dict[str, float]:
        buffers: list[torch.Tensor] = []
        num_bytes = 0
        waits = np.zeros(num_elements)
        began = time.perf_counter()
        for number in range(num_elements):
            asked = time.perf_counter()
            tensors = self._ready.get()
            waits[number] = time.perf_counter() - asked
            if not tensors:
                self._run_out(epoch * num_elements + number)
            if self._do_memcpy:
                buffers = buffers or [torch.empty_like(tensor) for tensor in tensors]
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    buffer.copy_(tensor)
            num_bytes += sum(tensor.nbytes for tensor in tensors)
        seconds = time.perf_counter() - began
        self._waits.append(
            {
                "total": float(waits.sum()),
                **{f"p{share}": float(np.percentile(waits, share)) for share in (50, 90, 99)},
                "max": float(waits.max()),
            }
        )
        figures = {
            "elements_processed": float(num_elements),
            "total_bytes_processed": float(num_bytes),
            "time_elapsed": seconds,
            "elements_per_second": num_elements / seconds,
            "bandwidth": num_bytes / seconds / _BYTES_PER_GIGABYTE,
        }
        if self._print_stats:
            print(
                f"Elements per second: {figures['elements_per_second']:.1f}, "
                f"bandwidth: {figures['bandwidth']:.3f} GB/s"
            )
        print(f"Completed epoch {epoch + 1}/{num_epochs}")
        return figures

    def _run_out(self, number: int) -> None:
        if self._failure is None:
            raise Error(
                f"{self._where}: the data has run out after {number} elements. Ask for fewer, or "
                "repeat the dataset."
            )
        if isinstance(self._failure, Error):
            raise self._failure
        raise Error(
            f"{self._where}: the dataset failed at element {number} (counted from 0): "
            f"{type(self._failure).__name__}: {self._failure}"
        ) from self._failure
