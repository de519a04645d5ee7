"""How many threads a call takes, and the pool that they come from."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvd_fec import threads
from hvd_fec.codecs import FecCodec, arrays, fec

# ---- how many -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("HVD_FEC_NUM_THREADS", raising=False)
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE", raising=False)


def set_cores(monkeypatch, n):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n)), raising=False)


@pytest.mark.parametrize(
    "cores, local_size, expected",
    [(8, None, 8), (8, "1", 8), (8, "2", 4), (8, "3", 2), (8, "9", 1), (1, "2", 1), (2, "0", 2)],
)
def test_cores_are_divided_by_local_ranks(monkeypatch, cores, local_size, expected):
    set_cores(monkeypatch, cores)
    if local_size:
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", local_size)
    assert threads.num_threads() == expected


def test_affinity_counts_not_the_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    set_cores(monkeypatch, 3)
    assert threads.num_threads() == 3


@pytest.mark.parametrize("count, expected", [(6, 6), (None, 1)])
def test_systems_without_affinity(monkeypatch, count, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert threads.num_threads() == expected


@pytest.mark.parametrize("value, expected", [("1", 1), ("5", 5), ("64", 64), ("", 8)])
def test_the_variable_overrides(monkeypatch, value, expected):
    set_cores(monkeypatch, 8)
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", value)
    assert threads.num_threads() == expected
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
    assert threads.num_threads() == (expected if value else 4)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " "])
def test_bad_variable(monkeypatch, value):
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", value)
    message = f"HVD_FEC_NUM_THREADS must be a positive integer, not '{value}'"
    with pytest.raises(ValueError, match=message):
        threads.num_threads()
    with pytest.raises(ValueError, match=message):
        FecCodec().encode(np.zeros(2 * arrays.VALUES_PER_THREAD, np.float32))


# ---- the pool -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 8])
def test_results_are_in_order(n):
    def call(i):
        time.sleep(0.01 * (n - i))  # the last to start ends first
        return i

    assert threads.run([lambda i=i: call(i) for i in range(n)]) == list(range(n))


def test_calls_run_at_the_same_time():
    """Each waits for the other; the first runs in the caller's own thread."""
    barrier = threading.Barrier(3, timeout=10)

    def call():
        barrier.wait()
        return threading.current_thread()

    ran_in = threads.run([call] * 3)
    assert ran_in[0] is threading.current_thread()
    assert len(set(ran_in)) == 3
    assert all(thread.name.startswith("hvd_fec") for thread in ran_in[1:])


def test_one_call_needs_no_pool(monkeypatch):
    monkeypatch.setattr(threads, "_pool", None)
    assert threads.run([threading.current_thread]) == [threading.current_thread()]
    assert threads._pool is None


def test_the_pool_is_kept_and_grows():
    threads.run([int] * 2)
    small = threads._pool
    threads.run([int] * 2)
    assert threads._pool is small
    threads.run([int] * (small._max_workers + 3))
    assert threads._pool is not small
    large = threads._pool
    threads.run([int] * 2)
    assert threads._pool is large


def test_outgrown_threads_end(monkeypatch):
    monkeypatch.setattr(threads, "_pool", None)
    before = threading.active_count()
    for n in range(2, 12):
        barrier = threading.Barrier(n, timeout=10)
        threads.run([barrier.wait] * n)
    del barrier
    deadline = time.monotonic() + 10
    while threading.active_count() > before + 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 10


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_exceptions_propagate(failing):
    def call(i):
        if i == failing:
            raise KeyError(f"call {i}")
        return i

    with pytest.raises(KeyError, match=f"call {failing}"):
        threads.run([lambda i=i: call(i) for i in range(3)])
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]  # the pool still works


def test_many_callers_at_once(monkeypatch):
    """As TensorFlow's threads do, also while the pool is being replaced."""
    monkeypatch.setattr(threads, "_pool", None)

    def caller(seed):
        for n in range(1, 9):
            calls = [lambda i=i: (seed, i) for i in range((seed + n) % 9)]
            assert threads.run(calls) == [(seed, i) for i in range((seed + n) % 9)]
        return seed

    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(caller, range(64))) == list(range(64))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_pool_after_fork(monkeypatch):
    """The child has the parent's pool object, but none of its threads."""
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", "2")
    x = np.ones(8 * fec.CHUNK, np.float32)
    payload = FecCodec(0).encode(x)
    assert len(arrays.ranges(x.size, fec.CHUNK)) == 2 and threads._pool is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if threads._pool is None and FecCodec(0).encode(x).tobytes() == payload.tobytes():
                status = 0
        finally:
            os._exit(status)
    for _ in range(1000):  # a child that waits for threads it has not got would wait forever
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0
    assert FecCodec(0).encode(x).tobytes() == payload.tobytes()  # the parent's pool lives on


# ---- how a tensor is shared out -----------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 4, 7.9, 8, 12, 27.5, 100.01])
def test_ranges_cover_everything_at_chunk_boundaries(monkeypatch, n_threads, n):
    n = int(n * fec.CHUNK)
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", str(n_threads))
    ranges = arrays.ranges(n, fec.CHUNK)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == n
    assert all(a % fec.CHUNK == 0 for a, _ in ranges)
    assert len(ranges) == max(1, min(n_threads, n // arrays.VALUES_PER_THREAD))
    sizes = [-(-(b - a) // fec.CHUNK) for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1, "threads have equal work"


def test_a_pool_that_waits_for_the_caller():
    """Two exchanges may have the same residual in hand."""
    residual, held, waiting = threading.Lock(), threading.Event(), threading.Event()

    def takes_it():
        waiting.set()
        with residual:
            return 1

    def other():
        held.wait(10)
        return threads.run([lambda: waiting.wait(10), takes_it])

    with ThreadPoolExecutor(1) as elsewhere:
        with residual:
            held.set()
            result = elsewhere.submit(other)
            assert waiting.wait(10)
            assert threads.run([lambda: 2, lambda: 3]) == [2, 3]
        assert result.result(10) == [True, 1]


# ---- a group of tensors -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_group_is_dealt_out_to_the_threads(monkeypatch, n):
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", str(n))
    unit = arrays.VALUES_PER_THREAD
    sizes = [unit, 100 * unit, 5, 0, unit // 2, 3 * unit, unit, unit, 2 * unit]
    ran, threads_given = {}, {}

    def call(i):
        time.sleep(0.01)  # long enough for the others to take their share
        ran[i] = threading.get_ident()
        threads_given[i] = threads.num_threads()
        return i * i

    calls = [lambda i=i: call(i) for i in range(len(sizes))]
    assert arrays.each(calls, sizes) == [i * i for i in range(len(sizes))]
    assert len(ran) == len(sizes)
    assert len(set(ran.values())) == n
    assert {ran[1], ran[2], ran[3]} == {threading.get_ident()}  # too large, too small
    assert threads_given[1] == n
    assert {threads_given[i] for i in (0, 4, 5, 6, 7, 8)} == {1}
    assert threads.num_threads() == n


def test_an_error_in_a_group_is_raised_when_all_have_ended(monkeypatch):
    monkeypatch.setenv("HVD_FEC_NUM_THREADS", "2")
    begun, done = threading.Event(), []

    def fails():
        begun.wait(10)
        raise RuntimeError("boom")

    def slow():
        begun.set()
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(RuntimeError, match="boom"):
        arrays.each([fails, slow, slow], [arrays.VALUES_PER_THREAD] * 3)
    assert done
