"""Memory, file descriptors and threads over 20,000 steps, and what the training has learnt."""

import json
import os
from pathlib import Path
from statistics import median

from test_parallel import horovodrun

STEPS = int(os.environ.get("HVD_FEC_SOAK_STEPS", 20_000))
WORKER = Path(__file__).with_name("endurance.py")
MEGABYTE = 2**20


def train(kind):
    """Accuracy, and for each rank growth of what it uses from the second quarter to the last."""
    output = horovodrun(2, WORKER, kind, STEPS, timeout=7200)
    said = [json.loads(line[line.index("{") :]) for line in output.splitlines() if "USED" in line]
    growth = {}
    for rank in 0, 1:
        seen = [one for one in said if one["rank"] == rank and "rss" in one]
        quarter = len(seen) // 4
        early, late = seen[quarter : 2 * quarter], seen[-quarter:]
        for what in "rss", "fds", "threads":
            growth[rank, what] = median(s[what] for s in late) - median(s[what] for s in early)
    accuracy = {one["accuracy"] for one in said if "accuracy" in one}
    assert len(accuracy) == 1, "the replicas differ"
    print(kind, accuracy, {str(k): v for k, v in growth.items()})
    return accuracy.pop(), growth


def test_endurance():
    wanted, usual = train("none")
    for kind in "fec", "ternary":
        accuracy, growth = train(kind)
        assert accuracy >= wanted - 0.02
        for (rank, what), grown in growth.items():
            most = usual[rank, what] + 4 * MEGABYTE if what == "rss" else 0
            assert grown <= most, (rank, what)
