"""Hostile bytes: any string gives values or PayloadError, and no access out of bounds.

Run as a script, this file fuzzes for as long as one likes::

    python tests/test_fuzz.py 1000000 SEED
"""

import os
import random
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import test_coded

import hvd_fec
from hvd_fec import PayloadError, wire
from hvd_fec.codecs import FecCodec, _numpy, fec

try:
    from hvd_fec._ext import _kernels
except ImportError:
    _kernels = None

CHUNK = 32768
STRINGS = 10_000


# ---- strings that look like payloads ------------------------------------------------------------


class Parts:
    """A payload taken apart, so that its parts can be changed and the lengths still agree."""

    def __init__(self, payload):
        header = wire.read_header(payload)
        self.fields = list(header[:5])  # codec, dtype, flags, threshold, count
        body = payload[wire.HEADER.size :].tobytes()
        chunks = -(-header.count // CHUNK)
        table = struct.unpack_from(f"<{2 * chunks}H", body)
        self.streams = []  # code streams, then sign streams, then the non-finite stream
        at = 4 * chunks
        for length in table[::2] + table[1::2] + header.sections[2:]:
            self.streams.append(bytearray(body[at : at + length]))
            at += length

    def join(self, rng):
        *streams, nonfinite = self.streams
        half = len(streams) // 2
        codes, signs = streams[:half], streams[half:]
        table = [len(stream) & 0xFFFF for pair in zip(codes, signs) for stream in pair]
        sections = [b"".join(part) for part in (codes, signs)]
        table = struct.pack(f"<{len(table)}H", *table)
        kept = rng.choice([0, 1, self.fields[4]])
        if rng.random() < 0.95 and len(table) == 4 * -(-self.fields[4] // CHUNK):
            arrays = [np.frombuffer(part, np.uint8) for part in sections]
            kept = _numpy.fec_check(*arrays, np.frombuffer(table, "<u2"), self.fields[4])[2]
        if rng.random() < 0.95:
            self.fields[2] = wire.NONFINITE if nonfinite else 0
        lengths = len(table) + len(sections[0]), len(sections[1]), len(nonfinite)
        codec, dtype, flags, threshold, count = self.fields
        mantissa = rng.choice([0, 0, 1, rng.randrange(2**23), 2**23])
        fields = (codec, dtype, flags, threshold, 0, mantissa, count, kept)
        header = wire.HEADER.pack(wire.MAGIC, wire.VERSION, *fields, *lengths)
        return header + table + b"".join(sections) + nonfinite


INTERESTING = [0, 0, 1, 2, 7, 8, 15, 16, 127, 128, 240, 254, 255, 255]


def change_bytes(rng, data):
    """Overwrite, insert, repeat or cut a few bytes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(6)
        byte = rng.choice(INTERESTING) if rng.random() < 0.7 else rng.randrange(256)
        if what < 2 and data:
            data[at % len(data)] = byte
        elif what == 2 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif what == 3:
            data[at:at] = bytes([byte] * rng.choice([1, 1, 2, 3, 300]))
        elif what == 4:
            del data[at : at + rng.choice([1, 1, 2, 50])]
        else:
            data[at:at] = data[: rng.randrange(20)]


def change_parts(rng, payload):
    """Change what the payload says and keep its lengths right, to get past the header."""
    parts = Parts(payload)
    for _ in range(rng.choice([1, 1, 2, 3])):
        what = rng.randrange(10)
        if what < 6:
            change_bytes(rng, rng.choice(parts.streams))
        elif what < 8:
            count = parts.fields[4] + rng.choice([-1, 1, -2, 7, -7, 8, 100, CHUNK])
            parts.fields[4] = max(0, count)
            missing = -(-parts.fields[4] // CHUNK) - len(parts.streams) // 2
            if 0 < missing < 9 and rng.random() < 0.9:  # chunks for the new elements
                half = len(parts.streams) // 2
                parts.streams[half:half] = [bytearray() for _ in range(missing)]
                parts.streams[-1:-1] = [bytearray() for _ in range(missing)]
        elif what == 8:
            parts.fields[3] = rng.choice([-126, 113, 0, -9, rng.randrange(-(2**15), 2**15)])
        else:
            i = rng.randrange(5)
            parts.fields[i] = rng.choice([0, 1, 2, 3, 4, 255]) if i != 4 else parts.fields[4]
    return parts.join(rng)


def seeds(rng):
    """Sound payloads of all kinds, most of them small."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    payloads = []
    for n in [0, 1, 2, 3, 7, 8, 9, 31, 32, 100, 101, 500, 1000, 4000, CHUNK, CHUNK + 1]:
        for keep in 0, 0.002, 0.05, 0.5, 1:
            x = numbers.choice([-1, 1], n) * 2.0 ** numbers.integers(0, 17, n)
            x = np.where(numbers.random(n) < keep, x, 0).astype(np.float32)
            payloads.append(FecCodec(0).encode(x))
            payloads.append(FecCodec(0).encode(abs(x)))
            if n:
                x[numbers.random(n) < 0.1] = np.nan
                x[-1] = np.inf
                payloads.append(FecCodec(0).encode(x))
    return payloads


def strings(number, seed):
    """``number`` byte strings: noise, headers with noise, damaged payloads, changed payloads."""
    rng = random.Random(seed)
    payloads = seeds(rng)
    for i in range(number):
        payload = rng.choice(payloads)
        kind = i % 10
        if kind == 0:
            yield rng.randbytes(rng.choice([0, 1, 55, 56, 57, rng.randrange(400)]))
        elif kind == 1:
            header = payload[: wire.HEADER.size].tobytes()
            size = sum(wire.read_header(payload).sections)
            yield header + bytes(rng.choice(INTERESTING) for _ in range(min(size, 2000)))
        elif kind < 4:
            data = bytearray(payload.tobytes()[:3000])
            change_bytes(rng, data)
            yield bytes(data)
        else:
            yield change_parts(rng, payload)


# ---- what must hold for each --------------------------------------------------------------------


def says_why(error):
    return any(character.isdigit() for character in str(error))


def decoded(data):
    """The values or the error. The buffer is exactly as large as the string."""
    try:
        return FecCodec().decode(data)
    except PayloadError as error:
        return error


def check(data):
    """decode and decode_add agree, and an error changes nothing. Returns the values or error."""
    data = np.array(bytearray(data), np.uint8)
    result = decoded(data)
    if isinstance(result, PayloadError):
        assert says_why(result)
        claimed = int.from_bytes(data[16:24].tobytes(), "little")
        count = claimed if claimed < 2**20 else 9
    else:
        count = result.size
    out = np.full(count, -0.0, np.float32)
    before = out.tobytes()
    try:
        FecCodec().decode_add(data, out)
    except PayloadError as error:
        assert str(error) == str(result)
        assert out.tobytes() == before
    else:
        np.testing.assert_array_equal(out, result)
    return result


def check_all(hostile):
    """How many strings decoded to values, and the faults that others were refused for."""
    accepted, faults = 0, set()
    for data in hostile:
        try:
            result = check(data)
        except BaseException:
            print(data.hex(), file=sys.stderr)
            raise
        if isinstance(result, PayloadError):
            faults.update(code for code, text in fec._FAULTS.items() if text in str(result))
        else:
            accepted += 1
    return accepted, faults


def test_fuzz():
    accepted, faults = check_all(strings(STRINGS, seed=1))
    assert accepted > STRINGS / 20, "hardly any string gets to the values"
    assert faults >= set(range(1, 9)), "a fault that no string has"


@pytest.mark.skipif(_kernels is None, reason="the compiled extension is not there")
def test_kernels_and_twins_agree_on_every_string(monkeypatch):
    """Which strings are payloads does not depend on the machine, nor does what they say."""
    before = _kernels.isa()
    for data in strings(1500, seed=2):
        monkeypatch.setattr(fec, "kernels", _numpy)
        expected = decoded(data)
        monkeypatch.setattr(fec, "kernels", _kernels)
        for isa in _kernels.available():
            _kernels.use(isa)
            result = decoded(data)
            _kernels.use(before)
            if isinstance(expected, PayloadError):
                assert str(result) == str(expected), data.hex()
            else:
                np.testing.assert_array_equal(result, expected)


def test_fuzz_concatenations():
    """split and split_frames, and that their errors say something."""
    rng = random.Random(3)
    payloads = [payload for payload in seeds(rng) if payload.size < 500]
    whole = 0
    for _ in range(3000):
        parts = rng.choices(payloads, k=rng.randrange(4))
        frames = [wire.pack_frame(rng.randrange(2), rng.choices(parts, k=2)) for _ in parts]
        for read, data in (wire.split, parts), (wire.split_frames, frames):
            data = bytearray(b"".join(part.tobytes() for part in data))
            if data and rng.random() < 0.9:
                change_bytes(rng, data)
            try:
                list(read(data))
                whole += 1
            except PayloadError as error:
                assert says_why(error)
            except RuntimeError as error:
                assert str(error).startswith("rank ") and b"HFEX\1\1" in data
    assert whole > 500


# ---- the same under AddressSanitizer and UBSan --------------------------------------------------

ROOT = Path(__file__).parents[1]


def encode_everything():
    """Encoding has no hostile input, but it has lengths. Buffers are exactly as large as needed."""
    rng = np.random.default_rng(0)
    for n in [*range(70), 255, 256, 257, 2047, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK + 5]:
        for dtype in np.float16, np.float32, np.float64:
            for scale in 0.1, 1.0, 100.0:
                x = (rng.standard_normal(n) * scale).astype(dtype)
                residual = np.zeros(n, np.float32)
                payload = FecCodec(0).encode(x, residual)
                FecCodec(0).decode_add(payload, residual)
                np.testing.assert_array_equal(residual, x.astype(np.float32))
        x[: n // 2] = np.nan
        FecCodec().decode(FecCodec(0).encode(x))
        for y in x[n // 2 :], x:
            FecCodec().decode(FecCodec(0, "coded").encode(y))
        FecCodec().encode(np.frombuffer(bytes(8 * n + 1), np.float64, offset=1))  # unaligned


def main(number, seed):
    print(Path(hvd_fec.__file__).parent)
    hostile = list(strings(number, seed))
    coded = list(test_coded.hostile(number // 3, seed))
    for isa in _kernels.available() if _kernels else []:
        _kernels.use(isa)
        encode_everything()
        check_all(coded)
        accepted, faults = check_all(hostile)
        print(f"{isa}: {number} strings, {accepted} decoded, faults {sorted(faults)}")


def run(*command, **options):
    return subprocess.run(command, text=True, capture_output=True, **options)


SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Runs Python in a folder with a copy of the package whose kernels have sanitizers."""
    pytest.importorskip("Cython", reason="compiling the kernels needs Cython")
    folder = tmp_path_factory.mktemp("sanitized")
    if lacking := lacks_sanitizers(folder):
        pytest.skip(lacking)
    source, package = ROOT / "hvd_fec", folder / "hvd_fec"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ext = package / "_ext"
    python_h, suffix = sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX")
    for command in (
        f"{sys.executable} -m cython -3 --module-name hvd_fec._ext._kernels _kernels.pyx -o x.c",
        f"gcc -c -fPIC -I{python_h} x.c",  # sanitizers would take long here, and find nothing
        f"gcc -c -fPIC -std=gnu11 -ffp-contract=off {' '.join(SANITIZE)} kernels.c",
        f"gcc -shared {' '.join(SANITIZE)} x.o kernels.o -o _kernels{suffix}",
    ):
        built = run(*command.split(), cwd=ext)
        assert built.returncode == 0, built.stderr
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": run("gcc", "-print-file-name=libasan.so").stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "HVD_FEC_NUM_THREADS": "2",
        "HVD_FEC_ISA": "",
    }
    return lambda *arguments: run(sys.executable, *arguments, cwd=folder, env=environment)


def lacks_sanitizers(folder):
    if not shutil.which("gcc"):
        return "gcc is not there"
    program = folder / "empty.c"
    program.write_text("int main(void) { return 0; }\n")
    built = run("gcc", *SANITIZE, str(program), "-o", str(folder / "empty"))
    if built.returncode:
        return f"gcc has no sanitizers: {built.stderr.strip().splitlines()[-1]}"
    if run(str(folder / "empty")).returncode:
        return "programs with sanitizers do not run here"
    return None


def test_sanitizers_find_nothing(sanitized):
    result = sanitized(__file__, str(STRINGS), "1")
    assert result.returncode == 0, result.stderr[-5000:]
    where, *lines = result.stdout.splitlines()
    assert where != str(ROOT / "hvd_fec"), "not the sanitized build"
    assert lines[-1].startswith(f"baseline: {STRINGS} strings"), lines


@pytest.mark.parametrize("table, found", [([2, 0], "heap-buffer-overflow")])
def test_sanitizers_would_find_something(sanitized, table, found):
    """Their silence means something: unchecked, the kernels do read what a table promises."""
    result = sanitized(
        "-c",
        "import numpy as np; from hvd_fec._ext import _kernels; "
        f"_kernels.fec_decode_add(np.uint8([1]), np.uint8([0]), np.uint16({table}), 1.0, 1.0, "
        "np.zeros(9, np.float32))",
    )
    assert result.returncode != 0
    assert f"AddressSanitizer: {found}" in result.stderr, result.stderr[-3000:]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (STRINGS, 1)))
