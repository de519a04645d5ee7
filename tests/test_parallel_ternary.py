"""Runs tests/parallel/ternary.py under horovodrun."""

import pytest
from test_parallel import horovodrun

SUMS = "sums or joined or mxnet or rule or few or finite"
"""What depends on the number of ranks; a launch of many ranks is slow on few cores."""


@pytest.mark.parametrize("ranks, tests", [(2, ""), (3, SUMS), (4, ""), (8, SUMS)])
def test_ternary(ranks, tests):
    output = horovodrun(
        ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", tests,
        "tests/parallel/ternary.py",
    )  # fmt: skip
    assert output.count(" passed") == ranks, output[-8000:]
