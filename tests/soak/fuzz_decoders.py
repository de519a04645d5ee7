"""Atheris's target: every decoder, from the bytes on; compiled kernels and NumPy's must agree.

    python tests/soak/fuzz_decoders.py CORPUS -max_total_time=600

Any bytes are decoded or refused with the documented error. What is covered is counted in the
package's Python, in which the NumPy kernels are twins of the compiled ones, branch by branch.
"""

import io
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["hvd_fec"]):
    import hvd_fec.checkpoint
    import hvd_fec.survey
    from hvd_fec import PayloadError, wire
    from hvd_fec._ext import _kernels
    from hvd_fec.codecs import FecCodec, TernaryCodec, _numpy, coded, fec, ternary

LARGEST = 1 << 18  # claims of more elements are left to test_kernels.py: they cost only time


def outcome(decode, *arguments):
    """What both kinds of kernels make of it."""
    results = []
    for kernels in _numpy, _kernels:
        for module in fec, coded, ternary:
            module.kernels = kernels
        try:
            results.append(decode(*arguments).tobytes())
        except (PayloadError, ValueError) as error:
            results.append(type(error))  # of two faults either may be named
    assert results[0] == results[1], results
    return results[0]


def payload(data):
    try:
        if wire.read_header(wire.as_bytes(data)).count > LARGEST:
            return
    except PayloadError:
        return
    outcome(FecCodec().decode, data)


def concatenation(data):
    try:
        for part in wire.split(data):
            payload(part.tobytes())
    except PayloadError:
        pass


def frames(data):
    try:
        for frame in wire.split_frames(data):
            for part in frame.payloads:
                payload(part.tobytes())
    except (PayloadError, RuntimeError):
        pass


def table(data):
    provider = atheris.FuzzedDataProvider(data)
    ranks, tensors = provider.ConsumeIntInRange(1, 9), provider.ConsumeIntInRange(0, 4)
    words = np.frombuffer(provider.ConsumeBytes(8 * ranks * (1 + tensors) + 8), np.uint8)
    try:
        hvd_fec.survey.read(words[: words.size // 8 * 8].view(np.int64), ranks, tensors)
    except (PayloadError, RuntimeError):
        pass


def words(data):
    provider = atheris.FuzzedDataProvider(data)
    codec, size = TernaryCodec(provider.ConsumeIntInRange(1, 40)), provider.ConsumeIntInRange(0, 99)
    rows = provider.ConsumeIntInRange(1, 3)
    parts = np.zeros((rows, codec.words(size)), np.int64)
    raw = provider.ConsumeBytes(parts.nbytes)
    parts.reshape(-1).view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)

    def decode():
        out = np.zeros(size, np.float32)
        codec.decode(parts, 0.5, out)
        return out

    outcome(decode)


class Holder:
    def get_config(self):
        return {}

    def load_state_dict(self, state):
        assert all(r.dtype == np.float32 for r in state["residuals"].values())


def checkpoint(data):
    (FOLDER / "state").write_bytes(data)
    try:
        hvd_fec.checkpoint.restore(FOLDER / "state", Holder(), 0, 2)
    except hvd_fec.checkpoint.CheckpointError:
        pass


TARGETS = [payload, concatenation, frames, table, words, checkpoint]
FOLDER = Path(tempfile.mkdtemp())


def fuzz(data):
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds(folder):
    """What encoders write, one file each."""
    rng = np.random.default_rng(0)
    payloads = []
    for n in (0, 1, 9, 300, 40_000):
        for form in "planes", "coded":
            for density in (0.05, 0.6):
                x = np.where(rng.random(n) < density, rng.standard_normal(n), 0).astype(np.float32)
                payloads.append(FecCodec(-2, form).encode(x))
            payloads.append(FecCodec(0, form).encode(np.where(x, np.nan, x)))
    made = [(payload, p.tobytes()) for p in payloads if p.size < 4000]
    small = [p for p in payloads if p.size < 400]
    made.append((concatenation, b"".join(p.tobytes() for p in small[:4])))
    packed = [wire.pack_frame(0, small[:2]), wire.pack_frame(1, small[2:4])]
    made.append((frames, b"".join(f.tobytes() for f in packed)))
    made.append((frames, wire.pack_error("no").tobytes()))

    state = io.BytesIO()
    meta = '{"format": "%s", "version": %d, "rank": 0, "ranks": 2, "compressor": "Holder", '
    meta = meta % (hvd_fec.checkpoint.FORMAT, hvd_fec.checkpoint.VERSION)
    meta += '"config": {}, "keys": ["a"], "step": 0, "state": {"steps": {}, "control": []}}'
    np.savez(state, meta=meta, r0=np.ones(3, np.float32))
    made.append((checkpoint, state.getvalue()))
    for i, (target, data) in enumerate(made):
        (folder / f"seed{i}").write_bytes(bytes([TARGETS.index(target)]) + data)
        fuzz(bytes([TARGETS.index(target)]) + data)


if __name__ == "__main__":
    corpus = Path(sys.argv[1])
    corpus.mkdir(exist_ok=True)
    seeds(corpus)
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
