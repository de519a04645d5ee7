"""The collectives: how payloads get from every rank to every rank.

Horovod allreduces whatever ``compress`` returns. A payload has another length on every rank and
cannot be summed, so it travels by an allgather of this module, and Horovod is handed a *token*
instead, a tensor of two elements:

* The first starts as 1. Average, Sum, pre- and postscale factors and predivision are all linear,
  so on its way through Horovod the token collects exactly the factor that each of them would have
  applied to the gradient: result = sum over ranks * token[0] / ranks.
* The second is the rank's *probe*, 1 on even ranks and 0 on odd ones. Every frame repeats its
  rank's probe, so the decoding side knows what the ratio of the two elements must be; under Min,
  Max, Product or Adasum it is something else, and the step fails instead of training on.
"""

import sys
import threading
import warnings
from functools import partial
from itertools import accumulate
from typing import Dict, Hashable, List, Optional, Sequence, Tuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvd_fec import wire
from hvd_fec.codecs.arrays import each

_PROBE_TOLERANCE = 0.03
"""The probes' mean lies between 1/3 and 2/3 for any number of ranks; float16 is far finer."""


def probe_of(process_set) -> int:
    """This rank's probe in ``process_set``."""
    return int(process_set.rank() % 2 == 0) if process_set.included() else 0


def make_token(tensor: tf.Tensor, probe: int) -> tf.Tensor:
    """The token of ``tensor``, shape (2,): float32 for bfloat16, which Horovod does not reduce.

    Its value is constant, but the graph must not be able to tell: a collective whose input is
    constant is folded away and runs once instead of once a step.
    """
    dtype = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
    first = tf.reshape(tensor, [-1])[:1]
    one = tf.maximum(tf.cast(tf.math.is_finite(first), dtype), tf.ones([], dtype))
    return one * tf.constant([1, probe], dtype)


def gather(frame: tf.Tensor, name: str, process_set) -> tf.Tensor:
    """All ranks' frames, concatenated in rank order."""
    return hvd.allgather(frame, name=_name(name), process_set=process_set)


def scatter(frames: tf.Tensor, splits: tf.Tensor, name: str, process_set) -> tf.Tensor:
    """This rank's frame from every rank, in rank order. ``frames`` holds one for each rank, of
    ``splits`` bytes."""
    received, _ = hvd.alltoall(frames, splits, name=_name(name), process_set=process_set)
    return received


def add_up(words: tf.Tensor, name: str, process_set) -> tf.Tensor:
    """The sum of all ranks' integers; ranks that have joined count as zeros."""
    return hvd.allreduce(words, op=hvd.Sum, name=_name(name), process_set=process_set)


def _name(name: str):
    """In eager mode Horovod names the operation itself."""
    return None if tf.executing_eagerly() else name


def factor_of(token: np.ndarray, expected: float, ranks: int) -> float:
    """What the sum over ranks is to be multiplied with.

    Args:
        token: the reduced token.
        expected: the mean of the probes of the ranks that took part.
        ranks: how many these were.

    Raises:
        ValueError: the token did not come through a linear reduction over these ranks.
    """
    token = np.asarray(token, np.float64)
    if token.shape != (2,):
        raise ValueError(
            f"Horovod returned {token.size} elements for a token of 2: only allreduce and "
            "grouped_allreduce can carry compressed gradients"
        )
    if not np.isfinite(token).all() or token[0] == 0:
        raise ValueError(
            f"Horovod scaled the token to {token.tolist()}: pre- and postscale factors must "
            "neither vanish nor overflow in the gradient's dtype"
        )
    if abs(token[1] - expected * token[0]) > _PROBE_TOLERANCE * abs(token[0]):
        raise ValueError(
            f"Horovod combined the token to {token.tolist()} where a linear reduction gives a "
            f"ratio of {expected:.3f}: compressed gradients can be reduced with op=Sum or "
            "op=Average only"
        )
    return float(token[0]) / ranks


def check_op(op) -> None:
    """Refuse a reduction that is known not to be linear before anything runs.

    Raises:
        ValueError: ``op`` is neither None, ``hvd.Average`` nor ``hvd.Sum``.
    """
    if op not in (None, hvd.Average, hvd.Sum):
        raise ValueError(
            "compressed gradients can be reduced with op=hvd.Average or op=hvd.Sum only; use "
            "hvd.Compression.none for other operations"
        )


def check_not_compiled() -> None:
    """Refuse a function that XLA is to compile, or TensorFlow would say that a kernel is missing.

    Raises:
        RuntimeError: the graph that is being built, or one around it, has ``jit_compile=True``.
    """
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "XLA cannot compile hvd_fec's exchange of gradients, nor Horovod's on a CPU: leave "
            "jit_compile=True out of model.compile(), or out of the tf.function that reduces the "
            "gradients. Functions that it calls may have it, and so may the optimizer"
        )


def resolve_process_set(configured, caller):
    """The process set to exchange in: Horovod's caller knows it, the compressor may insist.

    Raises:
        ValueError: the two differ; the exchange would hang.
    """
    if configured is not None and caller is not None and configured is not caller:
        raise ValueError(
            f"the compressor was made for {configured}, Horovod reduces in {caller}: leave "
            "process_set out of one of them or give both the same"
        )
    return configured or caller or hvd.global_process_set


def decode_frames(gathered: np.ndarray, token: np.ndarray, decode_add, results):
    """Sum of all ranks' payloads times Horovod's factor.

    Args:
        gathered: every rank's frame, uint8.
        token: the reduced token.
        decode_add: ``decode_add(payload, out, scale)`` of the codec.
        results: zeros, float32 of shape (size,) for each tensor of the batch: written into.
    """
    frames = wire.split_frames(gathered)
    factor = factor_of(token, mean_probe(frames), len(frames))
    add_frames(frames, results, decode_add, factor)


def mean_probe(frames) -> float:
    """Mean of the probes of the ranks that sent ``frames``."""
    return sum(frame.probe for frame in frames) / len(frames)


def add_frames(frames, results, decode_add, factor: float) -> None:
    """Add ``factor`` times the frames' payloads into ``results``, float32 of shape (size,) each.

    Ranks are added in rank order on every rank, which makes the result the same to the last bit.
    """
    for rank, frame in enumerate(frames):
        check_frame(rank, frame, [out.size for out in results])

    def add(i, out):
        for frame in frames:
            decode_add(frame.payloads[i], out, factor)

    calls = [partial(add, i, out) for i, out in enumerate(results)]
    each(calls, [out.size for out in results])


def check_frame(rank: int, frame, sizes) -> None:
    """Refuse a frame of ``rank`` that does not hold tensors of these sizes.

    Raises:
        PayloadError: it does not.
    """
    counts = [wire.read_header(payload).count for payload in frame.payloads]
    if len(counts) != len(sizes):
        raise wire.PayloadError(f"rank {rank} sent {len(counts)} tensors, this rank {len(sizes)}")
    for i, (count, size) in enumerate(zip(counts, sizes)):
        if count != size:
            raise wire.PayloadError(
                f"tensor {i} of the exchange has {count} elements on rank {rank}, {size} here"
            )


def share(sizes: Sequence[int], rank: int, ranks: int) -> List[Tuple[int, slice]]:
    """What ``rank`` averages of a group of tensors in a two-shot exchange: (tensor, elements).

    The group is cut as if its tensors were one, so that all shares hold fewer than twice as many
    pieces as there are tensors and ranks, and not one of each tensor for each rank.
    """
    total = sum(sizes)
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    pieces, start = [], 0
    for i, size in enumerate(sizes):
        piece = slice(max(first - start, 0), min(last - start, size))
        if piece.start < piece.stop:
            pieces.append((i, piece))
        start += size
    return pieces


class Bundles:
    """Small tensors of a group, joined to one for each dtype, so that they share a payload.

    A payload has a header of 56 bytes, as much as fourteen float32, and takes a call of its own.

    Args:
        sizes, dtypes: of the tensors.
        small: tensors of fewer elements are joined.

    Attributes:
        sizes: elements of each bundle; a tensor that is not small is one by itself.
    """

    def __init__(self, sizes: Sequence[int], dtypes: Sequence, small: int):
        self._sizes = list(sizes)
        self._bundles: List[List[int]] = []
        joined: Dict[Hashable, List[int]] = {}
        for i, (size, dtype) in enumerate(zip(sizes, dtypes)):
            if size < small and dtype in joined:
                joined[dtype].append(i)
                continue
            self._bundles.append([i])
            if size < small:
                joined[dtype] = self._bundles[-1]
        self.sizes = [sum(sizes[i] for i in bundle) for bundle in self._bundles]

    def join(self, names: Sequence[Optional[str]], arrays: Optional[Sequence[np.ndarray]] = None):
        """Names and arrays of the bundles, flat: of tensors that are not known by name, None."""
        joined: List[Optional[str]] = []
        for bundle in self._bundles:
            first, last = names[bundle[0]], names[bundle[-1]]
            if any(names[i] is None for i in bundle):
                joined.append(None)
            else:
                joined.append(first if len(bundle) == 1 else f"{first} to {last}, {len(bundle)}")
        if arrays is None:
            return joined, None
        flat = [array.reshape(-1) for array in arrays]
        return joined, [
            flat[b[0]] if len(b) == 1 else np.concatenate([flat[i] for i in b])
            for b in self._bundles
        ]

    def split(self, results: Sequence[np.ndarray]) -> List[np.ndarray]:
        """The tensors of bundles, as views of these."""
        tensors: List[np.ndarray] = [np.empty(0)] * len(self._sizes)
        for bundle, result in zip(self._bundles, results):
            start = 0
            for i in bundle:
                tensors[i] = result[start : start + self._sizes[i]]
                start += self._sizes[i]
        return tensors


class Buffers:
    """Memory for results, used again as soon as TensorFlow has let go of it.

    New memory is slow: the system clears it page by page, which for a large model takes longer than
    decoding. TensorFlow takes these arrays over without a copy (they have the alignment of 64 bytes
    that it wants) and holds references to them, so a block that nobody else refers to is free.
    """

    _KEEP = 256
    """A block that was not used for so many calls goes back to the system."""

    def __init__(self):
        self._lock = threading.Lock()
        self._blocks: List[np.ndarray] = []
        self._used: List[int] = []
        self._calls = 0

    def zeros(self, sizes) -> List[np.ndarray]:
        """As ``arrays``, filled with zeros."""
        results = self.arrays(sizes)
        for out in results:
            out.fill(0)
        return results

    def arrays(self, sizes) -> List[np.ndarray]:
        """float32 arrays of shape (size,), one per size, all in one block."""
        strides = [-(-size // 16) * 16 for size in sizes]
        block = self._block(sum(strides))
        starts = accumulate(strides, initial=0)
        return [block[start : start + size] for start, size in zip(starts, sizes)]

    def _block(self, size: int) -> np.ndarray:
        with self._lock:
            self._calls += 1
            for i in range(len(self._blocks)):
                block = self._blocks[i]
                # the list, the variable and the call itself
                if block.size == size and sys.getrefcount(block) == 3:
                    self._used[i] = self._calls
                    break
            else:
                raw = np.empty(4 * size + 64, np.uint8)
                start = -raw.ctypes.data % 64
                # A view of an array refers to the array that owns the memory. With a memoryview
                # as its owner the block is that array, and its references count its views.
                block = np.frombuffer(raw.data[start : start + 4 * size], np.float32)
                self._blocks.append(block)
                self._used.append(self._calls)
            recent = [used > self._calls - self._KEEP for used in self._used]
            self._blocks = [b for b, keep in zip(self._blocks, recent) if keep]
            self._used = [u for u, keep in zip(self._used, recent) if keep]
        return block


def warn_single_process() -> None:
    """Say once that nothing is compressed where Horovod has nobody to talk to."""
    if hvd.is_initialized() and hvd.size() == 1:
        warnings.warn(
            "hvd_fec compresses nothing in a job of one process: Horovod does not call the "
            "compressor. Launch with horovodrun -np 2 or more.",
            RuntimeWarning,
            stacklevel=3,
        )
