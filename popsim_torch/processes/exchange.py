"""``GradientExchange``: adds up the gradients of a program over all processes that train it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping

import torch

from popsim_torch.errors import Error
from popsim_torch.processes.peers import Peers, listed
from popsim_torch.processes.traffic import Traffic

__all__ = ["ExchangeParts", "GradientExchange", "bytes_of"]

ExchangeParts = tuple[torch.Tensor, Callable[[], object]]
"""What a run needs: the numbers, and a function that adds them up over all processes."""

_WHAT = "The exchange of gradients"
_DIGIT = 2**24  # every integer below it is a float32
_NUM_DIGITS = 2  # of a sign
_LONGEST = 1000  # bytes of a text in a message
_HYPER, _WRITES = range(2)  # what the signs of a process stand for


class GradientExchange:
    """One exchange for each weight update: every process gets the sums of all.

    Weights stay equal, to the last bit, if they were equal before and all processes update them in
    the same way. So each exchange also carries signs: digests of the hyper-parameters, and of
    everything that the host has written to weights and states since they were shared.

    Args:
        peers: The processes.
        num_numbers: How many numbers an exchange adds up.
        hyper_parameters: Returns the present values of the optimizer, as text.

    Attributes:
        numbers: The numbers that an exchange adds up.
        traffic: What has been exchanged.
    """

    def __init__(self, peers: Peers, num_numbers: int, hyper_parameters: Callable[[], str]) -> None:
        self.peers = peers
        self.traffic = Traffic()
        self._hyper_parameters = hyper_parameters
        self._writes = hashlib.blake2b()
        shape = (peers.size, 2, _NUM_DIGITS)
        num_all = num_numbers + peers.size * 2 * _NUM_DIGITS
        padded = -(-num_all // peers.size) * peers.size
        self._all = torch.zeros(padded, device="cpu")
        self.numbers = self._all[:num_numbers]
        # Each process writes its own row; those of the others are 0, so sums are exact.
        self._signs = self._all[num_numbers:num_all].view(shape)

    @property
    def parts(self) -> ExchangeParts:
        """What a run needs of this object."""
        return self.numbers, self.sum

    def note(self, values: Mapping[str, torch.Tensor]) -> None:
        """Record values that the host writes to weights or states; all processes must do so."""
        for name, value in values.items():
            self._writes.update(name.encode())
            self._writes.update(bytes_of(value).numpy().data)

    def sum(self) -> None:
        """Replace the numbers by their sums over all processes.

        Raises:
            Error: A process does not take part, or has other hyper-parameters or weights.
        """
        began = time.perf_counter()
        self._signs.zero_()
        own = self._signs[self.peers.rank]
        own[_HYPER] = _digits(hashlib.blake2b(self._hyper_parameters().encode()))
        own[_WRITES] = _digits(self._writes)
        self.peers.sum(self._all, _WHAT)
        self._compare()
        size = self.peers.size
        sent = 2 * (size - 1) * self._all.numel() // size * self._all.element_size()
        seconds = time.perf_counter() - began
        before = self.traffic
        self.traffic = Traffic(before.exchanges + 1, before.bytes + sent, before.seconds + seconds)

    def _compare(self) -> None:
        """Check that all processes have the signs of process 0."""
        differs = (self._signs != self._signs[0]).any(dim=2)
        for sign, tell in ((_WRITES, self._other_writes), (_HYPER, self._other_values)):
            ranks = differs[:, sign].nonzero().flatten().tolist()
            if ranks:
                raise Error(
                    f"{_WHAT}: {listed(ranks)} of {self.peers.size} and process 0 {tell(ranks)} "
                    "Nothing has changed: all processes give this update up."
                )

    def _other_values(self, ranks: list[int]) -> str:
        # All processes are here, because all have found the same difference.
        own = self._hyper_parameters().encode()[:_LONGEST].ljust(_LONGEST)
        own_bytes = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        texts = self.peers.gather(own_bytes, "The comparison of hyper-parameters")
        shown = [
            f"process {rank} has {texts[rank].numpy().tobytes().decode(errors='ignore').strip()}"
            for rank in (0, ranks[0])
        ]
        return (
            "have different hyper-parameters. All processes must make the same calls, and set the "
            f"same values before each of them; {', and '.join(shown)}."
        )

    def _other_writes(self, ranks: list[int]) -> str:
        return (
            "have written different values to the device since their weights were shared: "
            "weights, states of the optimizer, or rng_state. All processes must load the same "
            "state, at the same place; or detach and attach the model, which shares those of "
            "process 0."
        )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in its own memory if this is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digits(digest: hashlib.blake2b) -> torch.Tensor:
    """Return some bits of a digest as numbers that float32 can hold."""
    number = int.from_bytes(digest.digest()[:6], "little")
    return torch.tensor([number % _DIGIT, number // _DIGIT], dtype=torch.float32, device="cpu")
