"""What a step's gradient exchange costs, by compressor, number of workers and network.

A step takes host work, messages that wait for one another, and bytes through a link:

    seconds = fixed + pieces * piece + values * value
            + rounds * latency
            + received bytes: longer + shorter / 3 of (bytes * byte, bytes / bandwidth)

Pieces are the tensors that Horovod handles or, with FEC, the payloads that are written and read. In
the last line most of the shorter time is hidden, because Horovod's rings add one piece while the
next is on its way. The constants of the first and last line belong to a machine and are measured by
``benchmarks/cost.py``; rounds and bytes follow from the algorithms (docs/algorithms.md).
"""

from typing import Dict, NamedTuple, Sequence

from hvd_fec import wire
from hvd_fec.codecs import TernaryCodec
from hvd_fec.codecs.ternary import gathers

COMPRESSORS = ("none", "fp16", "fec", "ternary", "twobit")
EXCHANGES = ("auto", "allgather", "twoshot")
"""Of FEC; ``auto`` is the one that :func:`two_shot_pays` is for."""


class Network(NamedTuple):
    """One link per worker, used in both directions at once.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds until a small message is there, software included.
        shared: all workers send through one and the same link, as on a loopback.
        burst: bytes that pass at once after a pause, as limiters with a token bucket let them.
    """

    bandwidth: float
    latency: float = 50e-6
    shared: bool = False
    burst: float = 0.0


class Work(NamedTuple):
    """Seconds of one worker's host: for each step, piece, value, and byte received."""

    fixed: float
    piece: float
    value: float
    byte: float


MACHINE: Dict[str, Work] = {
    "none": Work(2.07e-3, 32.3e-6, 0.0, 0.964e-9),
    "fp16": Work(0.568e-3, 121e-6, 0.0, 9.75e-9),
    "fec": Work(3.63e-3, 35.0e-6, 1.94e-9, 0.964e-9),
    "ternary": Work(4.96e-3, 85.6e-6, 2.37e-9, 0.964e-9),
    "twobit": Work(4.94e-3, 67.9e-6, 2.43e-9, 0.964e-9),
}
"""Measured on the machine of docs/benchmarks.md, one core per worker."""

_TWO_SHOTS = 2.0, 1.5
"""Times as much fixed work, for a second collective and the host calls around it, and work on
values, which are looked at once more: from the steps of 4 ranks in docs/benchmarks.md."""


class Step(NamedTuple):
    """A predicted exchange, in seconds; ``bytes`` are those that a worker receives."""

    host: float
    latency: float
    transfer: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The whole exchange."""
        return self.host + self.latency + self.transfer


def predict(
    compressor: str,
    sizes: Sequence[int],
    workers: int,
    network: Network,
    ratio: float = 64.0,
    machine: Dict[str, Work] = MACHINE,
    crowding: float = 1.0,
    exchange: str = "auto",
) -> Step:
    """The exchange of one group of float32 gradients.

    Args:
        compressor: one of ``COMPRESSORS``.
        sizes: values of each tensor.
        workers: how many take part, 1 and more.
        ratio: of FEC, gradient bytes over payload bytes.
        machine: constants by compressor.
        crowding: workers per core, where there is less than one core for each.
        exchange: of FEC, one of ``EXCHANGES``.

    Raises:
        ValueError: an argument is out of range.
    """
    if compressor not in COMPRESSORS:
        raise ValueError(f"compressor must be one of {', '.join(COMPRESSORS)}, not {compressor!r}")
    if workers < 1 or not ratio > 0 or not network.bandwidth > 0 or not crowding > 0:
        raise ValueError(
            f"workers ({workers}), ratio ({ratio}), bandwidth ({network.bandwidth}) and "
            f"crowding ({crowding}) must be positive"
        )
    work = machine[compressor]
    two_shots = _in_two_shots(compressor, sizes, workers, exchange)
    received = received_bytes(compressor, sizes, workers, ratio, exchange)
    pieces = _pieces(compressor, sizes, workers, two_shots)
    more_fixed, more_values = _TWO_SHOTS if two_shots else (1.0, 1.0)
    host = more_fixed * work.fixed + work.piece * pieces + more_values * work.value * sum(sizes)
    through = received * (workers if network.shared else 1)
    shorter, longer = sorted(
        [received * work.byte * crowding, max(through - network.burst, 0) / network.bandwidth]
    )
    transfer = longer + shorter / 3
    rounds = _rounds(compressor, workers, two_shots)
    return Step(host * crowding, rounds * network.latency, transfer, received)


def received_bytes(
    compressor: str,
    sizes: Sequence[int],
    workers: int,
    ratio: float = 64.0,
    exchange: str = "auto",
) -> float:
    """Bytes that a worker receives in one exchange, and sends as well; see :func:`predict`."""
    n, dense = workers, 4 * sum(sizes)
    ring = 2 * (n - 1) / n
    if compressor == "none":
        return ring * dense
    if compressor == "fp16":
        return ring * dense / 2
    if compressor == "fec":
        payload = dense / ratio
        if not _in_two_shots(compressor, sizes, workers, exchange):
            return (n - 1) * payload
        # Tensors that are cut up between ranks have a header for each piece.
        return ring * payload + 2 * (n - 1) * wire.HEADER.size
    gathered = gathers(n)
    words = sum(TernaryCodec(1 if gathered else n).words(size) for size in sizes)
    return (n - 1 if gathered else ring) * 8 * words


def _in_two_shots(compressor: str, sizes: Sequence[int], workers: int, exchange: str) -> bool:
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, not {exchange!r}")
    pays = exchange == "auto" and two_shot_pays(workers, 4 * sum(sizes))
    return compressor == "fec" and (pays or exchange == "twoshot")


def _pieces(compressor: str, sizes: Sequence[int], workers: int, two_shots: bool) -> float:
    """Tensors or, with FEC, payloads that a worker writes and reads."""
    tensors = len(sizes)
    if compressor != "fec":
        return tensors
    if not two_shots:
        return tensors * (1 + workers)
    # Written, read and averaged, averages written, averages read.
    cut = tensors + workers - 1
    return 3 * cut + cut / workers


def _rounds(compressor: str, workers: int, two_shots: bool) -> int:
    """Messages of an exchange that wait for one another, in Gloo's rings.

    Before each collective the ranks agree on it by two allreduces of a few bytes. The agreement on
    Horovod's first one, of tokens, goes on while the host encodes.
    """
    hops = workers - 1
    allreduce, allgather, alltoall, agree = 2 * hops, hops, min(hops, 1), 4 * hops
    if compressor in ("none", "fp16"):
        return agree + allreduce
    if compressor == "fec":
        if two_shots:
            return 2 * agree + alltoall + allgather
        return agree + allgather
    return 2 * agree + allreduce + (allgather if gathers(workers) else allreduce)


def two_shot_pays(ranks: int, dense_bytes: int) -> bool:
    """Whether two shots are expected to be faster than an allgather for this many gradients.

    With payloads of P bytes an allgather brings each rank (n - 1) P, two shots bring it
    2 (n - 1) / n P but take one more round. P is taken to be a 64th of the gradients, the round to
    be worth 125 kB (a millisecond at 1 Gbit/s).
    """
    saved = (ranks - 1) * (1 - 2 / ranks) * dense_bytes / 64
    return saved > 125_000
