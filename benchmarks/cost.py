"""The cost model against measured steps.

    sudo benchmarks/cost.py measure FOLDER   # step.py for several ranks, sets and networks
    benchmarks/cost.py check FOLDER          # fit the machine's constants, compare the rest
    benchmarks/cost.py predict               # 2 to 1,024 workers at 1, 10 and 100 Gbit/s

``check`` fits the constants of ``hvd_fec.cost.MACHINE`` to the steps of 2 ranks on a loopback
without a limit, and predicts the others with them. Ranks share the cores and the loopback here: the
model counts both (``crowding``, ``shared``).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from hvd_fec import cost
from hvd_fec.cost import Network, Work, predict, received_bytes

HERE = Path(__file__).parent
CASES = [
    *((2, "unlimited", s, 11) for s in "abcde"),
    *((2, "1gbit", s, 5) for s in "abce"),
    *((2, "100mbit", s, 5) for s in "be"),
    *((4, rate, s, 5) for rate in ("unlimited", "1gbit") for s in "be"),
    (4, "1gbit", "a", 4),
    *((8, rate, s, 5) for rate in ("unlimited", "1gbit") for s in "be"),
    (8, "1gbit", "a", 3),
]
RATES = {"100mbit": 12.5e6, "1gbit": 125e6, "10gbit": 1.25e9, "unlimited": 1e15}
BURST = 256 * 1024
"""Bytes that netns.sh lets through at once; before each step the link was idle."""
LOOPBACK_LATENCY = 20e-6
"""Seconds; it does not show in these steps."""


def measure(folder):
    """Run ``step.py`` for each case that has no file yet."""
    folder.mkdir(exist_ok=True)
    for ranks, rate, which, steps in CASES:
        out = folder / f"{ranks}-{rate}-{which}.json"
        if out.exists():
            continue
        run = Path(sys.executable).with_name("horovodrun")
        step = [sys.executable, HERE / "step.py", "--set", which, "--steps", str(steps)]
        command = [HERE / "netns.sh", rate, "--", run, "-np", str(ranks)]
        command += ["--network-interfaces", "lo", *step, "--warmup", "2", "--json", out]
        print(out.name, flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def load(folder):
    """Measured rows: ranks, rate, set, compressor, sizes, seconds, ratio."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from step import SETS

    rows = []
    for path in sorted(folder.glob("*.json")):
        ranks, rate, which = path.stem.split("-")
        sizes = [int(np.prod(shape)) for shape in SETS[which]()]
        for row in json.loads(path.read_text()):
            if row["compressor"] in cost.COMPRESSORS:
                ratio = 4 * sum(sizes) / row["bytes"]
                seconds = row["milliseconds"] / 1e3
                rows.append((int(ranks), rate, which, row["compressor"], sizes, seconds, ratio))
    return rows


def fit(rows):
    """Constants of each compressor, from 2 ranks without a limit: those with the smallest
    relative errors. A byte's cost cannot be told from a value's where each value is a fixed number
    of bytes; so it is Horovod's own for all, and a value of ``none`` and ``fp16`` costs nothing."""
    machine = {}
    for compressor in cost.COMPRESSORS:
        a, b = [], []
        for ranks, rate, _, name, sizes, seconds, ratio in rows:
            if name == compressor and ranks == 2 and rate == "unlimited":
                received = received_bytes(compressor, sizes, 2, ratio)
                dense = compressor in ("none", "fp16")
                known = 0 if dense else received * machine["none"].byte
                pieces = len(sizes) * (3 if compressor == "fec" else 1)
                a.append([1, pieces, received if dense else sum(sizes)])
                b.append(seconds - known)
        a, b = np.array(a), np.array(b)
        fixed, tensor, last = nonnegative(a / b[:, None], np.ones(len(b)))
        if compressor in ("none", "fp16"):
            machine[compressor] = Work(fixed, tensor, 0.0, last)
        else:
            machine[compressor] = Work(fixed, tensor, last, machine["none"].byte)
    return machine


def nonnegative(a, b):
    """Least squares over coefficients that are not negative; few enough to try every subset."""
    best, best_error = np.zeros(a.shape[1]), np.inf
    for subset in range(1, 2 ** a.shape[1]):
        columns = [i for i in range(a.shape[1]) if subset >> i & 1]
        x = np.zeros(a.shape[1])
        x[columns] = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        error = np.sum((a @ x - b) ** 2)
        if (x >= 0).all() and error < best_error:
            best, best_error = x, error
    return best


def check(folder, cores):
    """Print the fitted constants and every measured step beside its prediction."""
    rows = load(folder)
    machine = fit(rows)
    for name, work in machine.items():
        numbers = ", ".join(f"{number:.3g}" for number in work)
        print(f'    "{name}": Work({numbers}),')
    print("\n| ranks | network | set | compression | measured | predicted, ms | ratio of the two |")
    print("| ---: | --- | --- | --- | ---: | ---: | ---: |")
    errors = []
    for ranks, rate, which, compressor, sizes, seconds, ratio in rows:
        network = Network(RATES[rate], LOOPBACK_LATENCY, True, BURST)
        # Two ranks on two cores wait now and then; more make use of that.
        crowding = max(1.0, ranks / cores) ** 0.8
        step = predict(compressor, sizes, ranks, network, ratio, machine, crowding)
        fitted = ranks == 2 and rate == "unlimited"
        errors.append((step.seconds / seconds, fitted))
        print(
            f"| {ranks} | {rate} | {which} | {compressor} | {1e3 * seconds:.1f} "
            f"| {1e3 * step.seconds:.1f} | {step.seconds / seconds:.2f}{' (fitted)' * fitted} |"
        )
    predicted = [e for e, fitted in errors if not fitted]
    within = sum(1 / 1.3 <= e <= 1.3 for e in predicted)
    print(
        f"\n{within} of {len(predicted)} predictions within 30 %, "
        f"median {statistics.median(predicted):.2f}"
    )


def predictions():
    """Print step times of ResNet-50's gradients by workers and network, FEC at 64 times smaller."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from step import SETS

    sizes = [int(np.prod(shape)) for shape in SETS["c"]()]
    print("| workers | network | " + " | ".join(cost.COMPRESSORS) + " | none / fec |")
    print("| ---: | --- |" + " ---: |" * (len(cost.COMPRESSORS) + 1))
    for gbits in (1, 10, 100):
        for workers in (2, 4, 8, 16, 64, 256, 1024):
            network = Network(gbits * 125e6)
            ms = {c: 1e3 * predict(c, sizes, workers, network).seconds for c in cost.COMPRESSORS}
            cells = " | ".join(f"{value:.0f}" for value in ms.values())
            gain = ms["none"] / ms["fec"]
            print(f"| {workers:,} | {gbits} Gbit/s | {cells} | {gain:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "check"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "check":
            command.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    commands.add_parser("predict")
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.folder)
    elif args.command == "check":
        check(args.folder, args.cores)
    else:
        predictions()


if __name__ == "__main__":
    main()
