"""Speed of codecs and of exchanges on this machine, for ``hvd-fec bench`` and the benchmarks."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple, Union

import numpy as np

from hvd_fec.codecs import FecCodec, TernaryCodec
from hvd_fec.codecs.ternary import survey


def tail(density: float) -> float:
    """t with P(abs(z) >= t) = density for a standard normal z."""
    return statistics.NormalDist().inv_cdf(1 - density / 2)


def entropy_bits(gradient: np.ndarray, threshold: int) -> float:
    """Bits per element of the best code for positions, signs and octaves of independent values."""
    kept = np.abs(gradient[np.abs(gradient) >= 2.0**threshold])
    p = kept.size / gradient.size
    _, counts = np.unique(np.minimum(np.frexp(kept)[1], threshold + 15), return_counts=True)
    octaves = -(counts / kept.size * np.log2(counts / kept.size)).sum()
    return -p * np.log2(p) - (1 - p) * np.log2(1 - p) + p * (1 + octaves)


def fec(size: int, density: float, form: str, rounds: int) -> dict:
    """Times of FEC's encoder, with a residual, and of ``decode_add``; see :func:`against_add`.

    Gradients are Gaussian, float32 of shape (size,), and ``density`` of them is kept. Beside the
    times the row has ``ratio``, and ``entropy``: bytes of the payload over those of the best code.
    """
    codec = FecCodec(-9, form)
    gradient = np.random.default_rng(0).standard_normal(size, np.float32)
    gradient *= np.float32(2.0**codec.threshold / tail(density))
    residual, out = np.zeros_like(gradient), np.zeros_like(gradient)
    payload = codec.encode(gradient, np.zeros_like(gradient))
    row = against_add(
        gradient,
        rounds,
        encode=lambda g: codec.encode(g, residual),
        decode_add=lambda g: codec.decode_add(payload, out),
    )
    bits = entropy_bits(gradient, int(codec.threshold))
    entropy = payload.size * 8 / size / bits
    return {**row, "ratio": gradient.nbytes / payload.size, "entropy": entropy}


def ternary(size: int, rounds: int) -> dict:
    """As :func:`fec`, for Ternary's threshold rule and words for 2 ranks, which are gathered."""
    codec = TernaryCodec(1)
    gradient = np.random.default_rng(0).standard_normal(size, np.float32)
    residual, out = np.zeros_like(gradient), np.zeros_like(gradient)
    words = np.zeros((2, codec.words(size)), np.int64)
    step = survey(gradient).peak / 4

    def encode(g):
        survey(g, residual)
        codec.encode(g, step, step / 2, words[0], residual)

    row = against_add(gradient, rounds, encode, decode_add=lambda g: codec.decode(words, 1.0, out))
    return {**row, "ratio": gradient.nbytes / words[0].nbytes}


def against_add(
    gradient: np.ndarray,
    rounds: int,
    encode: Callable[[np.ndarray], object],
    decode_add: Callable[[np.ndarray], object],
) -> dict:
    """Times over those of ``np.add(total, gradient, out=total)``, taken in turns.

    Returns:
        ``add_ms``, ``encode_ms`` and ``decode_add_ms``, medians in milliseconds; ``encode`` and
        ``decode_add``, the median, smallest and largest of the rounds' ratios.
    """
    # With every other gradient negated the residuals do not grow, so that every round keeps the
    # same elements and nothing has to be reset between the measurements.
    total = np.zeros_like(gradient)
    times: Dict[str, List[float]] = {"add": [], "encode": [], "decode_add": []}
    for g in [gradient, -gradient] * rounds:
        times["add"].append(_seconds(lambda g=g: np.add(total, g, out=total)))
        times["encode"].append(_seconds(lambda g=g: encode(g)))
        times["decode_add"].append(_seconds(lambda g=g: decode_add(g)))
    row: dict = {f"{name}_ms": 1e3 * statistics.median(taken) for name, taken in times.items()}
    for name in ("encode", "decode_add"):
        ratios = [t / a for t, a in zip(times[name], times["add"])]
        row[name] = (statistics.median(ratios), min(ratios), max(ratios))
    return row


def _seconds(function) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def steps(name: str, count: int) -> Iterator[Union[Tuple[int, int], List[dict]]]:
    """Exchanges of a set of gradients between two processes on this machine.

    Yields:
        (exchanges done, exchanges in all), now and then; at last the rows of
        :func:`hvd_fec.cli.steps.measure`.

    Raises:
        RuntimeError: they cannot be launched, or fail; the text has their last lines.
    """
    beside = Path(sys.executable).with_name("horovodrun")
    run = str(beside) if beside.exists() else shutil.which("horovodrun")
    if run is None:
        raise RuntimeError("horovodrun is not here: hvd-fec doctor says how to install Horovod")
    command = [run, "-np", "2", sys.executable, "-m", "hvd_fec.cli.steps", name, str(count)]
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": paths}
    said: List[str] = []
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=pipe, stderr=both, text=True, env=env) as ranks:
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                _, mark, text = line.partition(">>>")  # after the name of the rank
                if mark:
                    progress = json.loads(text)
                    yield tuple(progress) if isinstance(progress[0], int) else progress
                else:
                    said.append(line.rstrip())
            status = ranks.wait()
        finally:
            ranks.terminate()  # horovodrun ends its ranks then
    if status:
        raise RuntimeError("\n".join(["the ranks failed:", *said[-15:]]))
