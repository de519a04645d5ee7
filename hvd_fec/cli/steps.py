"""Time of one gradient exchange, compressor by compressor, measured by every rank of a job.

``horovodrun -np 2 python -m hvd_fec.cli.steps SET STEPS`` is what ``hvd-fec bench`` launches;
``benchmarks/step.py`` has more options.
"""

import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_fec
from hvd_fec.cli import sets

COMPRESSORS: Dict[str, Callable] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "fec": lambda: hvd_fec.FEC(threshold=-9),
    "ternary": hvd_fec.Ternary,
    "twobit": lambda: hvd_fec.TwoBit(threshold=2.0**-9),
}


def settle(compressor, rng: np.random.Generator) -> None:
    """Give the residuals the distribution they have after many steps.

    A walk that restarts near zero whenever it leaves (-T, T) is found at r with a probability that
    falls linearly from 0 to T.
    """
    twobit = isinstance(compressor, hvd_fec.TwoBit)
    scale = np.float32(compressor.threshold if twobit else 2.0**compressor.threshold)
    for _, residual in compressor.residuals.items():
        residual[:] = rng.triangular(-scale, 0, scale, residual.size)


def measure(
    shapes: Sequence[Tuple[int, ...]],
    compressors: Dict[str, Any],
    *,
    density: float = 0.003,
    groups: int = 1,
    steps: int = 10,
    warmup: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> List[dict]:
    """Reduce fresh Gaussian gradients with each compressor, in turns, on all ranks; call it there.

    Gradients are made outside the clock: values that repeat would pile up in the residuals.
    Residuals start as they are after many steps (see :func:`settle`), so that the density is the
    lasting one from the first step on.

    Args:
        density: share of the values that FEC with a threshold of -9 sends in the long run.
        groups: of tensors; 0 for no groups.
        progress: is told the exchanges done and all that are to be done.

    Returns:
        A row for each compressor: ``compressor``, ``milliseconds`` (the median step of the slowest
        rank), ``spread`` (the shortest and longest), ``bytes`` that this rank sent per step, the
        measured ``density``, and ``faster_than``, how many times, ``none`` and ``fp16``.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    rng = np.random.default_rng(hvd.rank())
    # With error feedback an element of independent gradients is a random walk, sent when it has
    # left (-T, T): after (T / sigma)**2 steps on average.
    sigma = np.float32(2.0**-9 * density**0.5)

    def make(compressor):
        @tf.function
        def reduce(tensors):
            if groups:
                size = -(-len(tensors) // groups)
                parts = [tensors[i : i + size] for i in range(0, len(tensors), size)]
                reduced = [hvd.grouped_allreduce(p, compression=compressor) for p in parts]
                reduced = sum(reduced, [])
            else:
                reduced = [hvd.allreduce(t, compression=compressor) for t in tensors]
            return [tf.reduce_sum(t) for t in reduced]  # read, as an optimizer would

        return reduce

    reducers = {name: make(compressor) for name, compressor in compressors.items()}
    times: Dict[str, List[float]] = {name: [] for name in reducers}
    done, total = 0, (warmup + steps) * len(reducers)
    for step in range(-warmup, steps):
        for name, reduce in reducers.items():
            tensors = [tf.constant(rng.standard_normal(s, np.float32) * sigma) for s in shapes]
            hvd.allreduce(tf.zeros(1), name="barrier")
            begun = time.perf_counter()
            reduce(tensors)
            elapsed = time.perf_counter() - begun
            slowest = float(hvd.allreduce(tf.constant(elapsed), op=hvd.Max, name="slowest"))
            if step >= 0:
                times[name].append(slowest)
            if step == -warmup and hasattr(compressors[name], "stats"):
                if hasattr(compressors[name], "threshold"):
                    settle(compressors[name], rng)
                compressors[name].stats.reset()
            done += 1
            progress(done, total)

    dense = sum(4 * int(np.prod(s)) for s in shapes)
    rows = []
    for name, seconds in times.items():
        stats = getattr(compressors[name], "stats", None)
        sent = stats.bytes_sent / stats.steps if stats else dense / (2 if name == "fp16" else 1)
        rows.append(
            {
                "compressor": name,
                "milliseconds": 1e3 * statistics.median(seconds),
                "spread": [1e3 * min(seconds), 1e3 * max(seconds)],
                "bytes": sent,
                "density": stats.density if stats else 1.0,
                "faster_than": {
                    other: statistics.median(o / s for o, s in zip(times[other], seconds))
                    for other in ("none", "fp16")
                    if other in times
                },
            }
        )
    return rows


def main(name: str, count: str) -> None:
    """Measure a set of ``hvd_fec.cli.sets``; rank 0 prints progress and rows, as JSON."""
    hvd.init()

    def say(*values):
        if hvd.rank() == 0:
            print(">>>" + json.dumps(values), flush=True)

    compressors = {name: make() for name, make in COMPRESSORS.items()}
    say(*measure(sets.SETS[name](), compressors, steps=int(count), progress=say))


if __name__ == "__main__":
    main(*sys.argv[1:])
