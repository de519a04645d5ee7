"""What all compressors share: which tensors travel together, and what identifies them.

Horovod traces ``compress`` for every tensor of a group, reduces what it got, and traces
``decompress`` for every tensor. So ``compress`` collects the tensors of a batch, and the first
``decompress`` builds their one exchange: encode on the host, a collective, decode on the host.
"""

import re
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_fec import callsite, exchange
from hvd_fec.feedback import Names, ResidualStore
from hvd_fec.stats import Stats

_COMPRESSED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class BatchCompressor(Compressor, ABC):
    """What all compressors share: which tensors are compressed, which of them share an exchange,
    and where their state is. A subclass says what the bytes are and how they travel."""

    def __init__(self, error_feedback: bool, min_size: int, process_set: Any) -> None:
        if (
            not isinstance(min_size, (int, np.integer))
            or isinstance(min_size, bool)
            or min_size < 0
        ):
            raise ValueError(f"min_size must be a non-negative integer, not {min_size!r}")
        self.error_feedback = bool(error_feedback)
        self.min_size = int(min_size)
        self.process_set = process_set
        self.residuals = ResidualStore()
        self._names = Names()
        self._stats = Stats()
        self._buffers = exchange.Buffers()
        self._tracing = threading.local()
        self._warned_anonymous = False
        exchange.warn_single_process()

    # ---- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def get_config(self) -> dict:
        """The settings, without the process set."""

    @abstractmethod
    def _build(self, ex: "Exchange") -> List[tf.Tensor]:
        """Build the graph of one exchange; returns the reduced tensors, flat."""

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

    def state_dict(self) -> dict:
        """What training with this compressor needs to go on as if it had never stopped.

        Returns:
            ``{"residuals": {key: float32 array of shape (size,)}, "steps": {label: int}, "control":
            list}``, copies, of this rank: every rank has its own. Take it between two steps.
        """
        return {"residuals": self.residuals.state(), "steps": {}, "control": []}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from what :meth:`state_dict` returned on this rank.

        A residual is taken up when its tensor is next exchanged. Where the model has changed since
        and it does not fit, it is dropped with a RuntimeWarning.

        Raises:
            ValueError: ``state`` is not the state of a compressor.
        """
        if set(state) != {"residuals", "steps", "control"}:
            raise ValueError(
                "a compressor's state has the keys 'control', 'residuals' and 'steps', not "
                f"{sorted(state)}: pass what state_dict() returned"
            )
        self.residuals.restore(state["residuals"])

    # ---- Horovod's side: called while a graph is built, or eagerly ------------------------------

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any = None) -> Tuple[tf.Tensor, Any]:
        """Take ``tensor`` into the open batch and hand Horovod a token in its place."""
        if not isinstance(self, BatchCompressor):  # Horovod's own compressors are classes
            raise TypeError(
                "give Horovod an instance, as in compression=hvd_fec.FEC(), not a class"
            )
        site = callsite.find(self, tensor)
        tensor = tf.convert_to_tensor(tensor)
        if site.variable is not None and not tensor.shape.is_fully_defined():
            # Embedding gradients made dense have lost their shape; their variables have not.
            tensor = tf.ensure_shape(tensor, site.variable.shape)
        size = tensor.shape.num_elements()
        if tensor.dtype not in _COMPRESSED or size is None or size < max(1, self.min_size):
            return self._bypass(tensor, site)
        exchange.check_op(site.op)
        exchange.check_not_compiled()
        batch = self._open_batch(exchange.resolve_process_set(self.process_set, site.process_set))
        entry = _Entry(batch, tensor, site)
        batch.entries.append(weakref.ref(entry))
        if batch.token is None:
            batch.token = exchange.make_token(tensor, batch.probe)
        return batch.token, entry

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
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
        if (
            batch is None
            or batch.closed
            or batch.graph is not graph
            or batch.process_set is not process_set
        ):
            batch = self._tracing.batch = _Batch(graph, process_set, exchange.probe_of(process_set))
        return batch

    def _exchange(self, batch: "_Batch", token) -> None:
        """One exchange for all tensors of the batch, between two calls into NumPy."""
        batch.closed = True
        self._tracing.batch = None
        entries: List[_Entry] = [e for e in (ref() for ref in batch.entries) if e is not None]
        keys = [self._key(entry, index) for index, entry in enumerate(entries)]
        with tf.device("/CPU:0"):
            results = self._build(Exchange(batch, entries, keys, token, self._stats, self._names))
            for entry, result in zip(entries, results):
                entry.result = tf.reshape(result, entry.tensor.shape)

    def _key(self, entry: "_Entry", index: int) -> "_Key":
        handle = getattr(entry.site.variable, "handle", None)
        if handle is not None:
            return _Key(handle, entry.site.index)
        if not tf.executing_eagerly():
            return _Key(None, f"{entry.site.name}/{index}/{_static_name(entry.tensor)}")
        if entry.site.name is not None:
            return _Key(None, f"{entry.site.name}/{index}")
        if self.error_feedback and not self._warned_anonymous:
            self._warned_anonymous = True
            warnings.warn(
                "hvd_fec cannot tell which gradient this is, so it keeps no residual for it and "
                "what is below the threshold is lost: give eager hvd.allreduce calls a name=, use "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer, or a tf.function",
                RuntimeWarning,
                stacklevel=2,
            )
        return _Key(None, None)

    def _count(self, names, arrays, sent: int, tally) -> None:
        """Note in the statistics that ``sent`` bytes went out for ``arrays``; ``tally`` has the
        values kept and bytes sent of each, shape (tensors, 2)."""
        self._stats.add(names, arrays, sent, tally)
        for name, array in zip(names, arrays):
            if self._stats.wants_norms(name):
                self._stats.add_norms(name, norm(array), self._residual_norm(name, array.size))

    def _residual_norm(self, name, size: int) -> float:
        if not self.error_feedback:
            return 0.0
        with self.residuals.use(name, size) as residual:
            return norm(residual)


def norm(array: np.ndarray) -> float:
    """Euclidean norm."""
    return float(np.linalg.norm(array.reshape(-1).astype(np.float32, copy=False)))


class _Batch:
    """Tensors that Horovod compresses together and that share one exchange."""

    def __init__(self, graph, process_set, probe):
        self.graph, self.process_set, self.probe = graph, process_set, probe
        # Weak: Horovod holds the entries for as long as it means to decompress them. A call that
        # failed in between leaves none behind for the next batch.
        self.entries: List[weakref.ref] = []
        self.token: Any = None  # a tf.Tensor, once there is an entry
        self.closed = False


class _Entry:
    """One tensor of a batch: what ``compress`` returns to Horovod as its context."""

    def __init__(self, batch: _Batch, tensor: tf.Tensor, site: callsite.CallSite):
        self.batch, self.tensor, self.site = batch, tensor, site
        self.result: Optional[tf.Tensor] = None


class Exchange:
    """One exchange of the tensors of a batch, while its graph is built."""

    def __init__(
        self, batch: _Batch, entries: List[_Entry], keys: List["_Key"], token, stats, names
    ):
        self.process_set, self.probe, self.token = batch.process_set, batch.probe, token
        self.tensors = [entry.tensor for entry in entries]
        self.sizes = [tensor.shape.num_elements() for tensor in self.tensors]
        self.dtypes = [tensor.dtype for tensor in self.tensors]
        self.dense_bytes = sum(s * d.size for s, d in zip(self.sizes, self.dtypes))
        self.token_bytes = batch.token.dtype.size * 2 * len(entries)
        self.name = _collective_name(entries)
        self.label = self.name or "/".join(
            str(key.static if key.handle is None else None) for key in keys
        )
        """The same in every run of a program: what random numbers may depend on."""
        self._keys = keys
        self._stats, self._names = stats, names
        self._calls, self._left = 0, 0.0
        # A host call on constant tensors would itself be constant: folded away, and run once for
        # all steps. TensorFlow takes nothing random for constant, however little of it there is.
        self._changing = tf.raw_ops.RandomUniform(shape=[0], dtype=tf.float32, seed=1, seed2=1)
        # Which variables these are is only known when the graph runs: Horovod's own function
        # takes them as arguments, and two optimizers may share it.
        handles = [key.handle for key in keys if key.handle is not None]
        self._handle_names = tf.strings.format("\n".join(["{}"] * len(handles)), handles)

    def on_host(self, function, inputs, dtypes, phase="encode"):
        """``function(names, *inputs)``, run in NumPy whenever the graph runs. ``names`` identify
        the tensors from step to step and are None where unknown. Its time counts to ``phase``,
        that since the call before to the exchange."""
        first, self._calls = not self._calls, self._calls + 1

        def call(handle_names, _, *arrays):
            begun = time.perf_counter()
            if not first:
                self._stats.add_seconds("exchange", begun - self._left)
            try:
                return function(_resolve(self._keys, handle_names, self._names), *arrays)
            finally:
                self._left = time.perf_counter()
                self._stats.add_seconds(phase, self._left - begun)

        # Stateless, or TensorFlow would run all exchanges of a step one after the other.
        inputs = [self._handle_names, self._changing, *inputs]
        results = tf.numpy_function(call, inputs, dtypes, stateful=False)
        if isinstance(dtypes, list) and isinstance(results, tf.Tensor):
            return [results]  # eagerly, a list of one comes back bare
        return results

    def cast(self, results: List[np.ndarray]) -> List[np.ndarray]:
        """float32 results in the dtypes of their tensors."""
        return [
            result if dtype == tf.float32 else result.astype(dtype.as_numpy_dtype)
            for result, dtype in zip(results, self.dtypes)
        ]


class _Key(NamedTuple):
    """How the residual of a tensor is found again in the next step: by the handle of its variable
    and its index among those reduced together, else by a name that survives a retrace, else (both
    None) not at all."""

    handle: Optional[tf.Tensor]
    static: Any  # int, str or None


def _resolve(keys: List[_Key], handle_names, names: Names) -> List[Optional[str]]:
    """The keys as text, now that the handles have names."""
    lines = iter(np.asarray(handle_names).item().decode().split("\n"))
    return [key.static if key.handle is None else names.of(next(lines), key.static) for key in keys]


def _static_name(tensor: tf.Tensor) -> str:
    """A name for a tensor that stays the same when its function is traced again, and differs
    between functions, and between those that train different variables."""
    kind = f"{tensor.dtype.name}{tensor.shape}"
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return f"eager/{kind}"
    graph = tensor.graph
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "captures"
    ):
        graph = graph.outer_graph
    variables = getattr(graph, "trainable_variables", ())
    name = getattr(graph, "name", "")
    return "/".join([name, tensor.name, kind, *(v._unique_id for v in variables)])


def _collective_name(entries: List[_Entry]) -> str:
    """The same on every rank, and different for exchanges that may be under way together."""
    if tf.executing_eagerly():
        return ""
    first, last = entries[0].tensor.name, entries[-1].tensor.name
    return re.sub("[^a-zA-Z0-9_]", "_", f"hvd_fec_{first}_{last}")
