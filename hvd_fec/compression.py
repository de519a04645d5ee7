"""The compressors that Horovod takes as ``compression=``."""

import re
import threading
import warnings
import weakref
from typing import List, NamedTuple, Optional, Tuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_fec import callsite, exchange, wire
from hvd_fec.codecs import FecCodec
from hvd_fec.feedback import ResidualStore
from hvd_fec.stats import Stats

_COMPRESSED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class _BatchCompressor(Compressor):
    """What all compressors share: which tensors are compressed, which of them share an exchange,
    and where their state is. A subclass says what the bytes are and how they travel.

    Horovod traces ``compress`` for every tensor of a group, reduces what it got, and traces
    ``decompress`` for every tensor. So ``compress`` collects the tensors of a batch, and the first
    ``decompress`` builds their one exchange: encode on the host, a collective, decode on the host.
    """

    _wire_dtype: tf.DType
    """What ``_encode`` returns and ``_move`` moves."""

    def __init__(self, error_feedback: bool, min_size: int, process_set):
        if int(min_size) != min_size or min_size < 0:
            raise ValueError(f"min_size must be a non-negative integer, not {min_size!r}")
        self.error_feedback = bool(error_feedback)
        self.min_size = int(min_size)
        self.process_set = process_set
        self.residuals = ResidualStore()
        self._stats = Stats()
        self._tracing = threading.local()
        self._warned_anonymous = False
        exchange.warn_single_process()

    # ---- for subclasses -------------------------------------------------------------------------

    def get_config(self) -> dict:
        """The settings, without the process set."""
        raise NotImplementedError

    def _encode(self, names, arrays, probe) -> Tuple[np.ndarray, int]:
        """What this rank sends for ``arrays``, of type ``_wire_dtype`` and shape (n,), and how
        many values were kept. ``names`` identify the tensors from step to step, None if unknown."""
        raise NotImplementedError

    def _move(self, sent: tf.Tensor, name: str, process_set) -> tf.Tensor:
        """The collective."""
        raise NotImplementedError

    def _decode(self, moved, token, names, sizes) -> List[np.ndarray]:
        """The reduced tensors, float32 of shape (size,) each."""
        raise NotImplementedError

    # ---- the public face ------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Steps, bytes, ratio and density so far, on this rank."""
        return self._stats

    def __repr__(self) -> str:
        config = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({config})"

    def reset(self) -> None:
        """Forget residuals and counters, as for a new training run."""
        self.residuals.clear()
        self._stats.reset()

    # ---- Horovod's side: called while a graph is built, or eagerly ------------------------------

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor):
        """Take ``tensor`` into the open batch and hand Horovod a token in its place."""
        site = callsite.find(self, tensor)
        tensor = tf.convert_to_tensor(tensor)
        if site.variable is not None and not tensor.shape.is_fully_defined():
            # Embedding gradients made dense have lost their shape; their variables have not.
            tensor = tf.ensure_shape(tensor, site.variable.shape)
        size = tensor.shape.num_elements()
        if tensor.dtype not in _COMPRESSED or size is None or size < max(1, self.min_size):
            return self._bypass(tensor, site)
        exchange.check_op(site.op)
        batch = self._open_batch(exchange.resolve_process_set(self.process_set, site.process_set))
        entry = _Entry(batch, tensor, site)
        batch.entries.append(weakref.ref(entry))
        if batch.token is None:
            batch.token = exchange.make_token(tensor, batch.probe)
        return batch.token, entry

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, ctx):
        """The reduced gradient. Horovod first compresses all tensors of a group, so the first
        call here knows that the batch is complete."""
        if ctx is None:
            return tensor
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        if ctx.result is None:
            self._exchange(ctx.batch, tensor)
        return ctx.result

    def _bypass(self, tensor, site):
        if tensor.shape.num_elements() is not None:
            nbytes = tensor.shape.num_elements() * tensor.dtype.size
            self._stats.bypass(_static_name(tensor), nbytes)
        if tensor.dtype == tf.bfloat16:  # which Horovod refuses
            return tf.cast(tensor, tf.float32), tf.bfloat16
        return tensor, None

    def _open_batch(self, process_set) -> "_Batch":
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        batch = getattr(self._tracing, "batch", None)
        if batch is None or batch.closed or batch.graph is not graph or batch.process_set is not process_set:
            batch = self._tracing.batch = _Batch(graph, process_set, exchange.probe_of(process_set))
        return batch

    def _exchange(self, batch: "_Batch", token) -> None:
        """One exchange for all tensors of the batch, between two calls into NumPy."""
        batch.closed = True
        self._tracing.batch = None
        entries: List[_Entry] = [e for e in (ref() for ref in batch.entries) if e is not None]
        keys = [self._key(entry, index) for index, entry in enumerate(entries)]
        handles = [key.handle for key in keys if key.handle is not None]
        tensors = [entry.tensor for entry in entries]
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        token_bytes = batch.token.dtype.size * 2 * len(entries)

        def encode(handle_names, *arrays):
            return self._host_encode(
                _resolve(keys, handle_names), arrays, batch.probe, token_bytes
            )

        def decode(moved, token, handle_names):
            results = self._decode(moved, token, _resolve(keys, handle_names), sizes)
            return [
                result if dtype == tf.float32 else result.astype(dtype.as_numpy_dtype)
                for result, dtype in zip(results, dtypes)
            ]

        with tf.device("/CPU:0"):
            # Which variables these are is only known when the graph runs: Horovod's own function
            # takes them as arguments, and two optimizers may share it.
            handle_names = tf.strings.format("\n".join(["{}"] * len(handles)), handles)
            # Stateless, or TensorFlow would run all exchanges of a step one after the other.
            sent = tf.numpy_function(
                encode, [handle_names, *tensors], self._wire_dtype, stateful=False
            )
            sent = tf.ensure_shape(sent, [None])
            moved = self._move(sent, _collective_name(entries), batch.process_set)
            results = tf.numpy_function(
                decode, [moved, token, handle_names], dtypes, stateful=False
            )
            if isinstance(results, tf.Tensor):  # eagerly, a list of one comes back bare
                results = [results]
            for entry, result in zip(entries, results):
                entry.result = tf.reshape(result, entry.tensor.shape)

    def _key(self, entry: "_Entry", index: int) -> "_Key":
        handle = getattr(entry.site.variable, "handle", None)
        if handle is not None:
            return _Key(handle, None)
        if not tf.executing_eagerly():
            return _Key(None, _static_name(entry.tensor))
        if entry.site.name is not None:
            return _Key(None, f"{entry.site.name}/{index}")
        if self.error_feedback and not self._warned_anonymous:
            self._warned_anonymous = True
            warnings.warn(
                "hvd_fec cannot tell which gradient this is, so it keeps no residual for it and "
                "what is below the threshold is lost: give eager hvd.allreduce calls a name=, use "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer, or call from a tf.function",
                RuntimeWarning,
                stacklevel=2,
            )
        return _Key(None, None)

    def _host_encode(self, names, arrays, probe, token_bytes) -> np.ndarray:
        sent, kept = self._encode(names, arrays, probe)
        self._stats.add(
            names[0],
            dense=sum(array.nbytes for array in arrays),
            sent=sent.nbytes + token_bytes,
            elements=sum(array.size for array in arrays),
            kept=kept,
        )
        return sent


class FEC(_BatchCompressor):
    """Fixed-exponential compression: send 5 bits of every value whose exponent is large enough.

    Give an instance to ``hvd.DistributedOptimizer``, ``hvd.DistributedGradientTape``,
    ``hvd.allreduce`` or ``hvd.grouped_allreduce`` as ``compression=``. The result is the sum or
    mean over ranks of what the ranks sent, the same to the last bit on every rank; with error
    feedback what was not sent is added to the next gradient of the same variable. The bytes and
    the quantiser are those of :class:`hvd_fec.codecs.FecCodec`.

    Args:
        threshold: keep a value when its magnitude is at least ``2**threshold``.
        error_feedback: keep residuals. Without them what is below the threshold is lost.
        min_size: tensors of fewer elements go through Horovod uncompressed, as do integer tensors
            and tensors whose size is not known when the graph is built.
        process_set: exchange in this process set; by default in the one that Horovod reduces in.

    Raises:
        ValueError: an argument is out of range; in use, an op other than Sum or Average, or a
            process set that is not Horovod's.
    """

    _wire_dtype = tf.uint8

    def __init__(
        self,
        threshold: int = -9,
        error_feedback: bool = True,
        min_size: int = 1024,
        process_set=None,
    ):
        super().__init__(error_feedback, min_size, process_set)
        self._codec = FecCodec(threshold)

    @property
    def threshold(self) -> int:
        """Exponent of the smallest kept magnitude."""
        return self._codec.threshold

    def get_config(self) -> dict:
        """The settings, without the process set."""
        return {
            "threshold": self.threshold,
            "error_feedback": self.error_feedback,
            "min_size": self.min_size,
        }

    def _encode(self, names, arrays, probe):
        try:
            payloads = [self._encode_one(name, array) for name, array in zip(names, arrays)]
        except Exception as error:  # every rank must hear of it, or they wait here forever
            return wire.pack_error(f"{type(error).__name__}: {error}"), 0
        kept = sum(wire.read_header(payload).kept for payload in payloads)
        return wire.pack_frame(probe, payloads), kept

    def _encode_one(self, name, array) -> np.ndarray:
        if not self.error_feedback or name is None:
            return self._codec.encode(array)
        with self.residuals.use(name, array.size) as residual:
            return self._codec.encode(array, residual)

    def _move(self, sent, name, process_set):
        return exchange.gather(sent, name, process_set)

    def _decode(self, moved, token, names, sizes):
        return exchange.decode_frames(moved, token, self._codec.decode_add, sizes)


class _Batch:
    """Tensors that Horovod compresses together and that share one exchange."""

    def __init__(self, graph, process_set, probe):
        self.graph, self.process_set, self.probe = graph, process_set, probe
        # Weak: Horovod holds the entries for as long as it means to decompress them. A call that
        # failed in between leaves none behind for the next batch.
        self.entries: List[weakref.ref] = []
        self.token: Optional[tf.Tensor] = None
        self.closed = False


class _Entry:
    """One tensor of a batch: what ``compress`` returns to Horovod as its context."""

    def __init__(self, batch: _Batch, tensor: tf.Tensor, site: callsite.CallSite):
        self.batch, self.tensor, self.site = batch, tensor, site
        self.result: Optional[tf.Tensor] = None


class _Key(NamedTuple):
    """How the residual of a tensor is found again in the next step: by the handle of its variable,
    else by a name that survives a retrace, else (both None) not at all."""

    handle: Optional[tf.Tensor]
    static: Optional[str]


def _resolve(keys: List[_Key], handle_names) -> List[Optional[str]]:
    """The keys as text, now that the handles have names."""
    lines = iter(np.asarray(handle_names).item().decode().split("\n"))
    return [key.static if key.handle is None else next(lines) for key in keys]


def _static_name(tensor: tf.Tensor) -> str:
    """A name for a tensor that stays the same when its function is traced again, and differs
    between functions that train different variables."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return f"eager/{tensor.dtype.name}/{tensor.shape}"
    graph = tensor.graph
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "captures"):
        graph = graph.outer_graph
    variables = getattr(graph, "trainable_variables", ())
    return "/".join([tensor.name, *(v._unique_id for v in variables)])


def _collective_name(entries: List[_Entry]) -> str:
    """The same on every rank, and different for exchanges that may be under way together."""
    if tf.executing_eagerly():
        return ""
    first, last = entries[0].tensor.name, entries[-1].tensor.name
    return re.sub("[^a-zA-Z0-9_]", "_", f"hvd_fec_{first}_{last}")


class _CompressionMeta(type):
    _fec: Optional[FEC] = None

    @property
    def fec(cls) -> FEC:
        """FEC with its default settings: one object for the whole process."""
        if cls._fec is None:
            cls._fec = FEC()
        return cls._fec


class Compression(metaclass=_CompressionMeta):
    """The compressors by name, in the manner of ``hvd.Compression``."""

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
