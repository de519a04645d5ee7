"""Runs tests/parallel/ternary.py under horovodrun."""

import pytest
from test_parallel import horovodrun


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ternary(ranks):
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/parallel/ternary.py")
    output = horovodrun(ranks, *command)
    assert output.count(" passed") == ranks, output[-8000:]
