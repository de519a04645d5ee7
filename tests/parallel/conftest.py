"""Every rank of a horovodrun job runs pytest over a file of this folder (see test_parallel.py)."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

EVEN = hvd.ProcessSet(range(0, int(os.environ["HOROVOD_SIZE"]), 2))
hvd.init(process_sets=[EVEN])
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture
def even():
    """The process set of the even ranks."""
    return EVEN


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        # The other ranks may wait in a collective for this one: end the job, not only the test.
        print(report.longreprtext, flush=True)
        os._exit(1)
    return report
