"""The command line, as its users call it."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvd_fec
from hvd_fec import checkpoint, wire
from hvd_fec.cli import advise, bench, contents, sets
from hvd_fec.codecs import FecCodec
from hvd_fec.cost import COMPRESSORS

pytest.importorskip("click")
from click.testing import CliRunner  # noqa: E402

from hvd_fec.cli import commands  # noqa: E402

INSTALLED = Path(hvd_fec.__file__).parents[1]
DOCS = Path(__file__).parents[1] / "docs"


def call(*arguments, path=(), code=0, **env):
    """What ``hvd-fec`` prints, given folders that come first on PYTHONPATH."""
    paths = [*map(str, path), str(INSTALLED), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "hvd_fec.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "HVD_FEC_ISA": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **env,
        },
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def invoke(*arguments, code=0):
    """What ``hvd-fec`` prints, called in this process, which is quicker."""
    done = CliRunner().invoke(commands.hvd_fec, list(map(str, arguments)))
    assert done.exit_code == code and isinstance(done.exception, (SystemExit, type(None)))
    return done.output


def without(folder, *modules):
    """A folder for PYTHONPATH that makes imports of ``modules`` fail."""
    (folder / "sitecustomize.py").write_text(f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        for module in {modules!r}:
            if (name + ".").startswith(module + "."):
                raise ModuleNotFoundError(f"No module named {{module!r}}", name=module)

sys.meta_path.insert(0, Block())
""")
    return folder


def finding(output, subject):
    """The line about ``subject``, and the line after it."""
    lines = output.splitlines()
    i = next(i for i, line in enumerate(lines) if f" {subject}: " in line)
    return lines[i], lines[i + 1]


# ---- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong():
    pytest.importorskip("hvd_fec._ext._kernels")
    pytest.importorskip("horovod.tensorflow")
    output = call("doctor", HVD_FEC_NUM_THREADS="3")
    assert "FAULT" not in output and "Nothing is wrong" in output
    assert "3 for one rank as HVD_FEC_NUM_THREADS asks" in finding(output, "threads")[0]
    assert "gloo" in finding(output, "Horovod")[0]
    assert "FEC(threshold=-9" in finding(output, "compressors")[0]


def test_doctor_without_tensorflow_and_horovod(tmp_path):
    pytest.importorskip("hvd_fec._ext._kernels")
    output = call("doctor", path=[without(tmp_path, "tensorflow", "horovod")], code=1)
    for name in ("TensorFlow", "Horovod"):
        line, mend = finding(output, name)
        assert line.startswith("FAULT") and "not installed" in line and "pip install" in mend
    assert "2 faults found" in output


def test_doctor_with_horovod_built_without_tensorflow(tmp_path):
    horovod = pytest.importorskip("horovod")
    installed = Path(horovod.__file__).parent
    shutil.copytree(installed, tmp_path / "horovod", ignore=shutil.ignore_patterns("mpi_lib*.so"))
    line, mend = finding(call("doctor", path=[tmp_path], code=1), "Horovod")
    assert line.startswith("FAULT") and line.endswith("built without TensorFlow")
    assert "HOROVOD_WITH_TENSORFLOW=1" in mend


def test_doctor_without_the_extension(tmp_path):
    hidden = without(tmp_path, "hvd_fec._ext._kernels", "tensorflow", "horovod")
    line, mend = finding(call("doctor", path=[hidden], code=1), "kernels")
    assert line.startswith("FAULT") and "compiled extension cannot be loaded" in line
    assert "C compiler" in mend


STALE = """
import sys, types
sys.modules["hvd_fec._ext._kernels"] = types.ModuleType("hvd_fec._ext._kernels")
"""


def test_an_extension_of_other_sources_is_named(tmp_path):
    without(tmp_path, "tensorflow", "horovod")
    with open(tmp_path / "sitecustomize.py", "a") as file:
        file.write(STALE)
    output = call("doctor", path=[tmp_path], code=1)
    line, mend = finding(output, "kernels")
    assert line.startswith("FAULT") and "built from other sources" in line
    assert "--force-reinstall" in mend
    assert finding(output, "Horovod"), "doctor goes on"


@pytest.mark.parametrize("use", ["hvd_fec.codecs", "hvd_fec.FEC", "hvd_fec.cost"])
def test_an_extension_of_other_sources_is_not_used(use):
    done = subprocess.run(
        [sys.executable, "-c", f"{STALE}\nimport hvd_fec\n{use}"],
        capture_output=True, text=True, env={**os.environ, "HVD_FEC_ISA": ""},
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the compiled extension") and "install" in last


@pytest.mark.parametrize("isa", ["avx1024", "AVX2"])
def test_doctor_names_a_wrong_instruction_set(tmp_path, isa):
    pytest.importorskip("hvd_fec._ext._kernels")
    hidden = without(tmp_path, "tensorflow", "horovod")
    output = call("doctor", path=[hidden], code=1, HVD_FEC_ISA=isa)
    line, mend = finding(output, "kernels")
    assert line.startswith("FAULT") and f"not {isa!r}" in line and "unset HVD_FEC_ISA" in mend
    assert finding(output, "Horovod"), "doctor goes on"


def test_other_commands_name_a_wrong_instruction_set():
    pytest.importorskip("hvd_fec._ext._kernels")
    output = call("inspect", __file__, code=1, HVD_FEC_ISA="avx1024")
    assert output.startswith("Error: HVD_FEC_ISA must be one of") and "doctor" in output


def test_doctor_tells_a_crash_from_an_absence(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os; os.abort()")
    line, _ = finding(call("doctor", path=[tmp_path, without(tmp_path, "horovod")], code=1),
                      "TensorFlow")  # fmt: skip
    assert line.startswith("FAULT") and "crashed with SIGABRT" in line


def test_doctor_with_wrong_settings(tmp_path):
    hidden = without(tmp_path, "tensorflow", "horovod")
    output = call("doctor", path=[hidden], code=1, HVD_FEC_NUM_THREADS="x", HVD_FEC_ISA="numpy")
    assert finding(output, "threads")[0].startswith("FAULT")
    assert "unset it" in finding(output, "kernels")[1]


def test_missing_click_is_named(tmp_path):
    output = call("doctor", path=[without(tmp_path, "click")], code=1)
    assert output.splitlines()[-1].endswith("pip install 'hvd_fec[cli]'")


# ---- advise -------------------------------------------------------------------------------------

SETS = {"a": "20x1m", "b": "20x100k", "c": "resnet50", "d": "vgg16", "e": "mlp"}


def measured():
    """Milliseconds by compressor, from docs/benchmarks.md: (network, set) to a dict."""
    text = (DOCS / "benchmarks.md").read_text().split("## Cost model against measurements")[1]
    rows = re.findall(r"^\| 2 \| (.*?) \| ([a-e]) \| (.*) \|$", text, re.MULTILINE)
    return {
        (network.split(" (")[0], name): dict(
            zip(COMPRESSORS, (float(cell.split(" / ")[0]) for cell in cells.split(" | ")))
        )
        for network, name, cells in rows
    }


def advised(output):
    """Milliseconds by compressor, as advise prints them, in its order."""
    rows = re.findall(r"^  (none|fp16|fec \w+|ternary|twobit) +([\d.]+) ", output, re.MULTILINE)
    assert len(rows) == 6, output
    return {name.split()[0] if name == "fec allgather" else name: float(ms) for name, ms in rows}


def check_ranking(network, name, output):
    ranked, steps = advised(output), measured()[network, name]
    assert list(ranked.values()) == sorted(ranked.values())
    compared = 0
    for fast, slow in itertools.permutations(COMPRESSORS, 2):
        if 1.1 * steps[fast] < steps[slow]:
            assert ranked[fast] < ranked[slow], f"{fast} was measured to be faster than {slow}"
            compared += 1
    assert compared >= 7
    # What is advised was measured to be the fastest, or next to it.
    advice = {"hvd.Compression.none": "none", "hvd_fec.FEC(threshold=-9)": "fec"}
    chosen = advice[output.split("Recommended: compression=")[1].strip()]
    assert steps[chosen] < 1.1 * min(steps.values())


def test_the_measured_table_is_found():
    assert {network for network, _ in measured()} == {"unlimited", "1 Gbit/s", "100 Mbit/s"}
    assert len(measured()) == 11


@pytest.mark.parametrize(
    "network, name", [case for case in sorted(measured()) if case[1] in "be"]
)  # fmt: skip
def test_advise_ranks_as_measured(network, name):
    rate = network.replace(" ", "").lower()
    check_ranking(network, name, invoke("advise", "--set", SETS[name], "--bandwidth", rate))


@pytest.mark.parametrize("network, name", sorted(measured()))
def test_ranking_of_all_measured_sets(network, name):
    rate = {"unlimited": float("inf"), "1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}[network]
    sizes = [int(np.prod(shape)) for shape in sets.SETS[SETS[name]]()]
    ranked = advise.rank(sizes, 2, advise.Network(rate), 400)
    rows = [f"  {row.name}  {1e3 * row.step.seconds:.2f} " for row in ranked]
    advice = f"Recommended: compression={advise.recommended(ranked).code}"
    check_ranking(network, name, "\n".join([*rows, advice]))


def gradients(density=0.004, size=400_000, seed=1):
    sigma = np.float32(2.0**-9 * density**0.5)
    return np.random.default_rng(seed).standard_normal(size, np.float32) * sigma


def test_advise_from_a_file(tmp_path):
    files = [tmp_path / f"{i}.npz" for i in range(3)]
    for file in files:
        np.savez(file, **{"dense/kernel:0": gradients(), "dense/bias:0": gradients()[:9]})
    output = call(
        "advise", *files, "--workers", "16", "--bandwidth", "2.5 Gbit/s",
        "--threshold", "-9.5", "--plot", tmp_path / "plot.svg",
    )  # fmt: skip
    assert "0.npz and 2 more: 2 tensors, 0.40 million values" in output
    assert "16 workers, 2,500 Mbit/s" in output
    assert advised(output)["fec twoshot"] < advised(output)["none"]
    assert "FEC(threshold=-9.5" in output
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("density", [0.002, 0.02])
def test_the_lasting_ratio_is_that_of_many_steps(density):
    """Fresh gradients, from residuals of zero on: their density rises until the two agree."""
    codec, residual = FecCodec(-9), np.zeros(30_000, np.float32)
    sent = [
        codec.encode(gradients(density, residual.size, seed), residual).size
        for seed in range(round(5 / density))
    ]
    lasting = advise.lasting([{"g": gradients(density, residual.size, 2**32)}], -9)
    assert lasting.density == pytest.approx(density, rel=0.3)
    late = sent[len(sent) // 2 :]
    assert lasting.ratio == pytest.approx(4 * residual.size * len(late) / sum(late), rel=0.15)
    assert sent[1] < 0.8 * sum(late) / len(late), "the first steps say something else"


def test_the_lasting_ratio_of_steps_that_differ():
    """A batch with small gradients says little about those with large ones."""
    steps = [{"g": gradients(density, 30_000)} for density in (0.0001, 0.01)]
    assert advise.lasting(steps, -9).density == pytest.approx(0.005, rel=0.3)
    other = {"g": gradients(size=30_000), "h": gradients(size=9)}
    with pytest.raises(ValueError, match="steps 1 and 3 differ in h: are they of one model"):
        advise.lasting([*steps, other], -9)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"PK\x03\x04 and no more", "torn, or not a .npz file"),
        (b"", "torn, or not a .npz file"),
        ({}, "there are no gradients in it"),
        ({"step": np.arange(5)}, "step is of int64"),
        ({"g": np.array([1, np.nan])}, "g has elements that are NaN"),
        ({"g": np.array([{}])}, "Object arrays cannot be loaded"),
        (np.ones(5), "it is a single array"),
    ],
)
def test_advise_refuses(tmp_path, content, message):
    path = tmp_path / "g.npz"
    with open(path, "wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        elif isinstance(content, dict):
            np.savez(file, **content)
        else:
            np.save(file, content)
    output = invoke("advise", path, code=1)
    assert message in output.replace("\n", " ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "give FILEs, or --set 20x1m"),
        (("--set", "lenet"), "'lenet' is none of 20x1m"),
        (("--set", "mlp", "--bandwidth", "fast"), "'fast' is none of 100mbit"),
        (("--set", "mlp", "--bandwidth", "0"), "'0' is none of"),
        (("--set", "mlp", "--workers", "1"), "x>=2"),
    ],
)
def test_advise_of_wrong_options(arguments, message):
    output = invoke("advise", *arguments, code=2)
    assert message in output


def test_a_missing_matplotlib_is_named(tmp_path):
    np.savez(tmp_path / "g.npz", g=gradients())
    hidden = without(tmp_path, "matplotlib")
    output = call("advise", tmp_path / "g.npz", "--plot", tmp_path / "p.png", path=[hidden], code=1)
    assert "pip install 'hvd_fec[plot]'" in output


# ---- inspect ------------------------------------------------------------------------------------


def rows(output):
    """Cells of the lines below the rule of each table."""
    lines = [line for line in output.split("── \n", 1)[1].splitlines() if line.startswith("  ")]
    return [line.split() for line in lines if line.strip()]


def payload(threshold=-9, form="planes"):
    x = np.zeros(1000, np.float16)
    x[::100] = 3 * 2.0**threshold
    return FecCodec(threshold, form).encode(x)


def test_inspect_payloads(tmp_path):
    bad = FecCodec(-7.5).encode(np.float32([1, np.nan, 0])).tobytes()
    (tmp_path / "p").write_bytes(payload().tobytes() + bad)
    first, second = rows(invoke("inspect", tmp_path / "p"))
    size = payload().size
    assert first[:5] == ["planes", "float16", "2^-9", "1,000", "1.000%"]
    assert first[5:] == [str(size), f"{4000 / size:.1f}", f"{4 / 3 * 2**-8:.3g}", "0"]
    assert second[:5] == ["planes", "float32", "2^-7.5", "3", "33.333%"] and second[-1] == "1"


def test_inspect_frames_and_forms(tmp_path):
    dense = FecCodec(-9, "coded").encode(gradients(0.5, 50_000))
    frames = [wire.pack_frame(1, [payload(), dense]), wire.pack_frame(0, [])]
    (tmp_path / "f").write_bytes(np.concatenate(frames).tobytes())
    output = invoke("inspect", tmp_path / "f")
    assert "Frame 0, 2 payloads" in output and "Frame 1, 0 payloads" in output
    assert [row[0] for row in rows(output)[:2]] == ["planes", "coded"]


class State:
    """As much of a compressor as the checkpoint wants."""

    def state_dict(self):
        return {"residuals": {"dense/[kernel]:0#0": np.float32([3, -4])}, "steps": {"a": 7}}

    def get_config(self):
        return {"threshold": -9}


def test_inspect_a_state(tmp_path):
    checkpoint.save(tmp_path / "c.npz", State(), 1, 4)
    output = invoke("inspect", tmp_path / "c.npz")
    assert "State of State(threshold=-9), rank 1 of 4" in output and "{'a': 7}" in output
    assert rows(output) == [["dense/[kernel]:0#0", "2", "5", "4"]]


def test_inspect_refuses_what_is_torn_or_foreign(tmp_path):
    checkpoint.save(tmp_path / "c.npz", State(), 1, 4)
    np.savez(tmp_path / "g.npz", weights=np.ones(3))
    state = (tmp_path / "c.npz").read_bytes()
    frame = wire.pack_frame(1, [payload()]).tobytes()
    cases = {
        payload().tobytes()[:-1]: "damaged (payload claims",
        payload().tobytes() + b"x": "damaged (payload of 1 bytes",
        frame[:-1]: "damaged (rank 0 sent a frame of",
        wire.pack_error("no room").tobytes(): "reports an error, rank 0: no room",
        state[: len(state) // 2]: "damaged, or no file of hvd_fec",
        state.replace(b"\0\0\x80\xc0", b"\0\0\x80\xc1"): "damaged, or no file of hvd_fec",
        (tmp_path / "g.npz").read_bytes(): "not the state of a compressor",
        b"": "starts with b''",
        b"%PDF-1.4": "starts with b'%PDF', so it is no payload",
    }
    for i, (content, message) in enumerate(cases.items()):
        path = tmp_path / str(i)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(message)):
            contents.read(path)
    output = invoke("inspect", path, code=1)
    assert output.startswith("Error: ") and message in output


@given(st.data())
def test_damaged_files_are_read_or_refused(data):
    """Any one byte, of any kind of file."""
    whole = data.draw(st.sampled_from([payload().tobytes(), STATE]))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    with tempfile.NamedTemporaryFile() as file:
        file.write(damaged)
        file.flush()
        try:
            contents.read(file.name)
        except ValueError:
            pass


def _state():
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "c.npz", State(), 1, 4)
        return (Path(folder) / "c.npz").read_bytes()


STATE = _state()


# ---- bench --------------------------------------------------------------------------------------


def test_bench():
    pytest.importorskip("hvd_fec._ext._kernels")
    pytest.importorskip("horovod.tensorflow")
    output = call("bench", "--size", "300000", "--rounds", "1", "--step", HVD_FEC_NUM_THREADS="1")
    assert "300,000 float32" in output and "1 thread" in output
    codecs, steps = output.split("the add took")
    found = rows(codecs)
    assert [row[:2] for row in found[:-1]] == [["fec", "planes"], ["fec", "coded"]] * 2
    assert found[-1][0] == "ternary" and float(found[-1][-1]) == pytest.approx(20, abs=0.1)
    # As docs/benchmarks.md has them, within what chunks cost in so small a gradient.
    entropies = [float(row[-1]) for row in found[:-1]]
    assert entropies == pytest.approx([2.47, 1.01, 1.88, 1.0], rel=0.1)
    found = {row[0]: row for row in rows(steps)}
    assert list(found) == list(COMPRESSORS)
    assert float(found["none"][-1]) == 1 and float(found["none"][-3]) == 8
    assert float(found["fec"][-3]) < 0.05 < float(found["ternary"][-3])


@pytest.mark.parametrize(
    "script, message",
    [
        (None, "horovodrun is not here: hvd-fec doctor"),
        ("echo '[0]<stdout>:>>>[3, 50]'; echo no network; exit 3", "ranks failed:\nno network"),
    ],
)
def test_bench_of_steps_that_cannot_run(tmp_path, monkeypatch, script, message):
    if script:
        (tmp_path / "horovodrun").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "horovodrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said = []
    with pytest.raises(RuntimeError, match=message):
        for progress in bench.steps("mlp", 3):
            said.append(progress)
    assert said == [(3, 50)] * bool(script)
