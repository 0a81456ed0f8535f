"""A queue for a dictionary of those tensors of a model whose keys are chosen."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from popsim_torch import logs
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds import OutfeedMode, OutfeedQueue
from popsim_torch.ir import names
from popsim_torch.observe.filters import Filter, Filters, near_keys
from popsim_torch.observe.offers import Offer, call_on_shapes, offers_text
from popsim_torch.ops import op_listener
from popsim_torch.private_torch.trees import tree_map
from popsim_torch.tables import Described

__all__ = ["MaybeOutfeedQueue"]


class MaybeOutfeedQueue(Described):
    """A queue for a dictionary of those tensors of a model whose keys match some filters.

    Inside of ``forward``, or of the body of a device loop::

        queue.maybe_outfeed("hidden", x)
        queue.maybe_outfeed("logits", y)
        queue.maybe_enqueue()

    Every trace of a model starts with an empty dictionary. A value is captured at the time of the
    call; later changes in place have no effect. The queue is read as an ``OutfeedQueue``, by all
    its methods: ``poll``, ``get``, ``drain``, ``follow``, ``statistics``, ``close``.

    Args:
        outfeed_mode: ``ALL`` keeps every element until it is dequeued, ``LAST`` only the newest.
        filters: None takes every key. Otherwise a key is taken if any filter matches: a string that
            is part of it, a ``Glob``, or a regular expression (``re.compile``) that is found in it.
            An empty list takes none.
        buffer_depth: The number of elements for which memory is allocated; as for ``OutfeedQueue``.
        **options: Further arguments of ``OutfeedQueue``.

    Raises:
        UsageTypeError: The filters are not a list of filters.

    Attributes:
        queue: The ``OutfeedQueue`` that gets the elements.
        note: A description of the values, if known: how gradients were accumulated.
    """

    def __init__(
        self,
        outfeed_mode: OutfeedMode = OutfeedMode.ALL,
        filters: Iterable[Filter] | None = None,
        buffer_depth: int = 3,
        **options: Any,
    ) -> None:
        self._start(OutfeedQueue(outfeed_mode, buffer_depth, **options), Filters(filters))

    def _start(self, queue: OutfeedQueue, filters: Filters) -> None:
        self.queue, self._filters = queue, filters
        self.note = ""
        self._values: dict[str, Any] = {}
        self._offers: dict[str, Offer] = {}
        self._is_complete = False  # whether the program being traced has enqueued its element
        self._trying = False
        self._warned: set[Filter] = set()
        self._layer_names: set[str] = set()
        self._trace: Callable[[], object] = lambda: None

    @property
    def filters(self) -> list[Filter] | None:
        """A copy of the filters; None if everything is taken."""
        return None if self._filters.given is None else list(self._filters.given)

    @property
    def enqueued(self) -> bool:
        """Whether any compiled program enqueues something."""
        return self.queue.enqueued

    # Feeding

    def name_layer(self, name: str | None) -> str:
        """Return the key of a layer that feeds the queue, which is unique without a name.

        Args:
            name: The user's name; None for ``maybe_outfeed``, ``maybe_outfeed_1``, ...
        """
        if name is None:
            numbered = (f"maybe_outfeed_{number}" for number in itertools.count(1))
            name = next(
                one
                for one in itertools.chain(["maybe_outfeed"], numbered)
                if one not in self._layer_names
            )
        self._layer_names.add(name)
        return name

    def maybe_outfeed(self, key: str, value: Any) -> None:
        """Add a value to the dictionary if a filter matches its key.

        Args:
            key: The key of the value; a later value with the same key replaces it.
            value: A tensor, or a tuple, list or dictionary of tensors.

        Raises:
            UsageTypeError: The key is not a string, or the value is something else.
        """
        if not isinstance(key, str):
            raise UsageTypeError(
                f"MaybeOutfeedQueue.maybe_outfeed: the key has to be a string, got {key!r}."
            )
        self._notice_trace()
        taken = self._filters.take(key)
        self._offers[key] = Offer.of(key, value, taken)
        if taken:
            self._values[key] = tree_map(_as_it_is, value)

    def maybe_enqueue(self) -> tuple[str, ...] | None:
        """Enqueue the dictionary, once in each micro-batch of the program that is being traced.

        Returns:
            The enqueued keys, in the order in which they were added; None if there are none, and
            then nothing is enqueued.

        Raises:
            Error: No program is being traced, or the program already feeds the queue.
        """
        self._notice_trace()
        self._warn_of_idle_filters()
        if not self._values:
            return None
        if self._is_complete:
            raise Error(
                f"MaybeOutfeedQueue.maybe_enqueue: {', '.join(map(repr, self._values))} came after "
                "the program's element was enqueued, and a queue can be enqueued to only once in "
                "a program. Of the MaybeOutfeed layers of a queue, only the last one has "
                "final_outfeed=True."
            )
        values, self._values = self._values, {}
        if not self._trying:
            self.queue.enqueue(values)
        self._is_complete = True
        return tuple(values)

    def take_gradients(self, offers: Mapping[str, torch.Tensor]) -> tuple[Any, list[str]] | None:
        """Choose from the gradients of a program that an ``OutfeedOptimizer`` offers.

        Args:
            offers: For each key a tensor with the gradient's shape and dtype, in the order of
                elements.

        Returns:
            The structure of elements, and their keys; None if no key is taken.

        Raises:
            Error: Values that forward offered have not been enqueued.
        """
        if self._values and not self._trying:
            raise Error(
                "OutfeedOptimizer: its queue holds values of the model that were never enqueued: "
                f"{', '.join(map(repr, self._values))}. Use a queue of their own for gradients."
            )
        self._offers.clear()
        for key, gradient in offers.items():
            taken = any(map(self._filters.take, names.spellings(key)))
            self._offers[key] = Offer.of(key, gradient, taken)
        self._warn_of_idle_filters()
        chosen = {key: x for key, x in offers.items() if self._offers[key].taken}
        if not chosen or self._trying:
            return None
        probe = _StructureProbe()
        token = op_listener.set(cast(Any, probe))
        try:
            self.queue.enqueue(chosen)
        finally:
            op_listener.reset(token)
        return probe.structure, list(chosen)

    # Reading

    def maybe_dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``dequeue`` if any program enqueues something, otherwise None."""
        return self.dequeue(*args, **kwargs) if self.enqueued else None

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """Return the dictionary of the tensors that have arrived.

        In mode ``ALL`` every tensor has a first axis for the elements, one for each step. The
        arguments are those of ``OutfeedQueue.dequeue``.
        """
        return self.queue.dequeue(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements of the queue, as the queue itself does."""
        return iter(self.queue)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.queue.__aiter__()

    def __getattr__(self, name: str) -> Any:
        # All other methods of the queue: poll, get, drain, follow, statistics, close.
        if name.startswith("_") or name == "queue":
            raise AttributeError(f"'MaybeOutfeedQueue' object has no attribute '{name}'")
        return getattr(self.queue, name)

    def why_empty(self) -> str:
        """Return why nothing was ever enqueued, as a sentence; empty if something was."""
        if self.enqueued:
            return ""
        if self._values:
            return _waiting(self._values)
        if not self._offers:
            return (
                "No compiled program offers values to this queue: is another queue fed, or did "
                "nothing run yet?"
            )
        keys = list(self._offers)
        shown = ", ".join(map(repr, keys[:10])) + (", ..." if len(keys) > 10 else "")
        return f"The filters {self.filters} let none of these keys through: {shown}."

    def dry_run(self, model: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> str:
        """Print and return which values would be observed, and their size in bytes for each step.

        Args:
            model: A module or function that offers values to the queue. It is called with the other
                arguments, on tensors without memory: nothing is computed or changed. None uses the
                values of the program that was traced last.
            *args: Positional arguments for the model.
            **kwargs: Keyword arguments for the model.

        Raises:
            UsageTypeError: ``model`` is something else.
        """
        offers = self._offers
        if model is not None:
            with self._trial() as offers:
                call_on_shapes(model, args, kwargs)
        text = offers_text(list(offers.values()))
        print(text)
        return text

    def _figures(self) -> dict[str, object]:
        return {"filters": self.filters, **self.queue._figures()}

    def __repr__(self) -> str:
        return f"MaybeOutfeedQueue(filters={self.filters}, {self.queue!r})"

    def __deepcopy__(self, _memo: object) -> MaybeOutfeedQueue:
        """Return the queue itself: copies of a model feed the same queue as the original."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Another process gets an empty queue with the same settings.
        return {"queue": self.queue, "filters": self.filters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["queue"], Filters(state["filters"]))

    @property
    def _is_watching(self) -> bool:
        """Whether the code that runs now is traced, and may offer values to the queue."""
        return self._trying or op_listener.get() is not None

    def _notice_trace(self) -> None:
        """Drop the values that an earlier trace offered."""
        listener = op_listener.get()
        if listener is not None and self._trace() is not listener:
            self._trace = weakref.ref(listener)
            self._values, self._offers, self._is_complete = {}, {}, False
            listener.at_end(self._warn_of_values_left)

    @contextmanager
    def _trial(self) -> Iterator[dict[str, Offer]]:
        kept = self._values, self._offers, self._is_complete
        self._trying, self._values, self._offers, self._is_complete = True, {}, {}, False
        try:
            yield self._offers
        finally:
            self._trying = False
            self._values, self._offers, self._is_complete = kept

    def _warn_of_values_left(self) -> None:
        if self._values:
            logs.python.warning("MaybeOutfeedQueue: %s", _waiting(self._values))
            # Keep only the keys for the later warning: tensors would keep the whole trace alive.
            self._values = dict.fromkeys(self._values)

    def _warn_of_idle_filters(self) -> None:
        keys = list(self._offers)
        spelt = [spelling for key in keys for spelling in names.spellings(key)]
        for one in self._filters.idle(spelt):
            if one in self._warned or self._trying:
                continue
            self._warned.add(one)
            near = ", ".join(map(repr, near_keys(one, keys)))
            logs.python.warning(
                "MaybeOutfeedQueue: the filter %r matches none of the %d keys that are offered%s",
                *(one, len(keys), f"; near ones: {near}" if near else "."),
            )


class _StructureProbe:
    """Gets the description of an element from an outfeed queue."""

    structure: Any = None

    def enqueue(self, _queue: object, structure: Any, _tensors: Sequence[torch.Tensor]) -> None:
        self.structure = structure


def _waiting(keys: Iterable[str]) -> str:
    return (
        f"{', '.join(map(repr, keys))} wait to be enqueued: maybe_enqueue() was not called, or no "
        "MaybeOutfeed of this queue has final_outfeed=True."
    )


def _as_it_is(value: Any) -> Any:
    # A copy costs nothing in a program, and later changes in place do not affect it.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
