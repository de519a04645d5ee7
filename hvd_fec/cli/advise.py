"""Step times of every compressor, predicted from the gradients of a few training steps."""

import zipfile
import zlib
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Union

import numpy as np

from hvd_fec import cost, wire
from hvd_fec.cli import sets
from hvd_fec.codecs import FecCodec
from hvd_fec.cost import Network

MIN_SIZE = 1024
"""Smaller tensors are sent as they are: the compressors' default."""
WORTH = 1.1
"""How many times faster than ``none`` a compressor has to be to be recommended."""
_DENSITY = 0.003  # of what is sent of a standard set, as in benchmarks/step.py
_LEAST = 4  # steps that are counted, and as many before them


def read(path: Union[str, Path]) -> Dict[str, np.ndarray]:
    """One step's gradients by name, from an ``.npz`` with one array per tensor.

    Raises:
        ValueError: it is no such file; the text says why.
    """
    try:
        with open(path, "rb") as file:  # np.load leaves a torn file open
            saved = np.load(file, allow_pickle=False)
            if isinstance(saved, np.ndarray):
                raise ValueError("it is a single array; save one for each tensor with numpy.savez")
            with saved:
                gradients = {name: saved[name] for name in saved.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ValueError(f"{path}: torn, or not a .npz file ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used ({error})") from error
    if not sum(gradient.size for gradient in gradients.values()):
        raise ValueError(f"{path}: there are no gradients in it")
    for name, gradient in gradients.items():
        if gradient.dtype.kind != "f":
            raise ValueError(
                f"{path}: {name} is of {gradient.dtype}; gradients are of float16, float32 or "
                "float64 (save bfloat16 as float32)"
            )
        if not np.isfinite(gradient).all():
            raise ValueError(f"{path}: {name} has elements that are NaN or infinite")
    return gradients


def standard(name: str) -> Dict[str, np.ndarray]:
    """Gaussian gradients, float32, of a set of ``hvd_fec.cli.sets``: so large that FEC with a
    threshold of -9 sends 0.3 % of them in the long run."""
    rng = np.random.default_rng(0)
    # A random walk of steps sigma leaves (-T, T) after (T / sigma)**2 steps on average.
    sigma = np.float32(2.0**-9 * _DENSITY**0.5)
    shapes = sets.SETS[name]()
    return {f"{name}/{i}": rng.standard_normal(s, np.float32) * sigma for i, s in enumerate(shapes)}


class Lasting(NamedTuple):
    """What FEC sends in the long run: gradient bytes over payload bytes, share of the values."""

    ratio: float
    density: float


def lasting(steps: Sequence[Dict[str, np.ndarray]], threshold: float) -> Lasting:
    """FEC's ratio and density after many steps, from the gradients of a few, or of one.

    From step to step most of a gradient is noise of the batch. So each element is taken to keep its
    magnitudes and draw its signs anew, and its residual to be a random walk: the encoder runs
    through the steps in turn, from residuals that are spread as walks are that begin again near
    zero whenever they leave (-T, T), falling linearly from 0 to T.

    Raises:
        ValueError: the steps do not have the same tensors.
    """
    shapes = [{name: gradient.shape for name, gradient in step.items()} for step in steps]
    for i, other in enumerate(shapes):
        differ = sorted(name for name, _ in other.items() ^ shapes[0].items())
        if differ:
            raise ValueError(f"steps 1 and {i + 1} differ in {differ[0]}: are they of one model?")
    rng = np.random.default_rng(0)
    codec = FecCodec(threshold)
    limit = np.float32(2.0**threshold)
    half, counted = np.float32(0.5), max(_LEAST, len(steps))
    sent = kept = total = 0
    for name, gradient in steps[0].items():
        size = gradient.size
        total += size
        if size < MIN_SIZE:
            sent += 4 * size * counted
            kept += size * counted
            continue
        residual = (rng.random(size, np.float32) - rng.random(size, np.float32)) * limit
        for i in range(-counted, counted):
            x = steps[i % len(steps)][name].reshape(-1).astype(np.float32)
            payload = codec.encode(np.copysign(x, rng.random(size, np.float32) - half), residual)
            if i >= 0:
                sent += payload.size
                kept += wire.read_header(payload).kept
    return Lasting(4 * total * counted / sent, kept / total / counted)


class Prediction(NamedTuple):
    """A compressor, the argument for ``compression=`` that makes it, and its predicted step."""

    name: str
    code: str
    step: cost.Step


def rank(
    sizes: Sequence[int], workers: int, network: Network, ratio: float, threshold: float = -9
) -> List[Prediction]:
    """All compressors, the fastest first; arguments as of :func:`hvd_fec.cost.predict`."""
    auto = ("allgather", "twoshot")[cost.two_shot_pays(workers, 4 * sum(sizes))]
    codes = {
        "none": "hvd.Compression.none",
        "fp16": "hvd.Compression.fp16",
        "ternary": "hvd_fec.Ternary()",
        "twobit": "hvd_fec.TwoBit()",
    }
    predictions = [
        Prediction(name, code, cost.predict(name, sizes, workers, network))
        for name, code in codes.items()
    ]
    for exchange in ("allgather", "twoshot"):
        more = "" if exchange == auto else f", exchange={exchange!r}"
        code = f"hvd_fec.FEC(threshold={threshold}{more})"
        step = cost.predict("fec", sizes, workers, network, ratio, exchange=exchange)
        predictions.append(Prediction(f"fec {exchange}", code, step))
    return sorted(predictions, key=lambda prediction: prediction.step.seconds)


def recommended(ranked: Sequence[Prediction]) -> Prediction:
    """The fastest; but ``none`` where compression gains less than a tenth."""
    [none] = [prediction for prediction in ranked if prediction.name == "none"]
    return none if none.step.seconds < WORTH * ranked[0].step.seconds else ranked[0]


def plot(path, sizes, workers, bandwidth, ratio, threshold, title) -> None:
    """Draw step time over bandwidth into ``path``, a picture of any kind that matplotlib writes."""
    from matplotlib.figure import Figure  # without pyplot: no window, whatever the backend

    rates = np.geomspace(1e7, 1e11, 81)  # bits per second
    curves: Dict[str, List[float]] = {}
    for rate in rates:
        for name, _, step in rank(sizes, workers, Network(rate / 8), ratio, threshold):
            curves.setdefault(name, []).append(1e3 * step.seconds)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in sorted(curves):
        dashes = "--" if name == "twobit" else "-"  # Ternary's curve is under it
        axes.loglog(rates, curves[name], dashes, label=name)
    if rates[0] <= 8 * bandwidth <= rates[-1]:
        axes.axvline(8 * bandwidth, color="0.7", zorder=0)
    ticks = {
        1e7: "10 Mbit/s",
        1e8: "100 Mbit/s",
        1e9: "1 Gbit/s",
        1e10: "10 Gbit/s",
        1e11: "100 Gbit/s",
    }
    axes.set(xlabel="bandwidth", ylabel="exchange, ms per step", title=title)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
