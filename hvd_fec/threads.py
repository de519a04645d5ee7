"""A small bounded thread pool for kernels that run without the GIL."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Callable, Optional, Sequence

_pool: Optional[ThreadPoolExecutor] = None
_this = threading.local()


def num_threads() -> int:
    """Threads for one call: ``HVD_FEC_NUM_THREADS``, else cores divided by ranks on this host.

    Within :func:`alone` it is 1.

    Raises:
        ValueError: the variable is set to something other than a positive integer.
    """
    if getattr(_this, "alone", False):
        return 1
    text = os.environ.get("HVD_FEC_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"HVD_FEC_NUM_THREADS must be a positive integer, not {text!r}")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))))


@contextmanager
def alone():
    """What this thread calls in here does not ask for more threads: it has its share of them."""
    _this.alone = True
    try:
        yield
    finally:
        _this.alone = False


def run(calls: Sequence[Callable[[], object]]) -> list:
    """Results of ``calls``, run at the same time: one in this thread, the others in the pool."""
    global _pool
    if len(calls) < 2:
        return [call() for call in calls]
    if _pool is None or _pool._max_workers < len(calls) - 1:
        # An outgrown pool ends its idle threads by itself once nobody holds it.
        _pool = ThreadPoolExecutor(len(calls) - 1, thread_name_prefix="hvd_fec")
    futures = [_pool.submit(call) for call in calls[1:]]
    try:
        results = [calls[0]()]
        # What no thread of the pool has begun is done here: they may be waiting for something,
        # such as a residual, that this thread holds.
        for call, future in zip(calls[1:], futures):
            results.append(call() if future.cancel() else future)
    finally:
        # Whatever happens, nobody is left writing into the caller's arrays.
        wait([future for future in futures if not future.cancel()])
    return [r.result() if isinstance(r, Future) else r for r in results]


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # a forked child has the object but not its threads
    os.register_at_fork(after_in_child=_forget_pool)
