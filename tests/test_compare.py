"""recipes/compare.py: what it makes of results, without running any."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

import compare
import launch


@pytest.mark.parametrize(
    "run, label",
    [
        ("none", "none"),
        ("fec --threshold -9", "fec -9"),
        ("ternary --rounding stochastic --clip-sigma 2.5", "ternary stochastic 2.5"),
        ("fec --flag --threshold -7", "fec flag -7"),
    ],
)
def test_label(run, label):
    assert compare.label(run) == label


@pytest.mark.parametrize(
    "compression, ranks, dense, factor",
    [
        ("none", 2, 4e6, 1),
        ("fp16", 4, 4e6, 1.5),
        ("fec", 2, 4e6, 1),
        ("fec", 4, 4e4, 3),  # small gradients are gathered
        ("fec", 4, 4e8, 6 / 5),  # large ones go in two shots
        ("ternary", 3, 4e6, 2),  # gathered: 2 others are to get it
        ("twobit", 4, 4e6, 1.5),  # in a ring
    ],
)
def test_wire_factor(compression, ranks, dense, factor):
    assert compare.wire_factor(compression, ranks, dense) == pytest.approx(factor)


def test_wire_factor_of_a_chosen_exchange():
    assert compare.wire_factor("fec", 8, 4e8, "allgather") == 7
    assert compare.wire_factor("fec", 8, 4e4, "twoshot") == pytest.approx(14 / 9)


def test_wire_time():
    """2 MB sent in 4 steps, of which each takes 4 ms at 1 Gbit/s."""
    result = {"steps": 6, "first_step": 2, "mb_sent": 2, "mb_dense": 8}
    result |= {"compression": "none", "ranks": 2, "settings": {}}
    assert compare.wire_seconds(result, 1000) == pytest.approx(0.004)


def recipe(name, ranks, options):
    """A result as launch.run returns it; fp16 fails."""
    compression = options[options.index("--compression") + 1]
    if compression == "fp16":
        raise launch.RunError("no fp16 today")
    seed = options[-1]
    ratio = {"none": 1, "fec": 60}[compression]
    rows = [{"step": 10, "test_accuracy": 0.8}, {"step": 20, "test_accuracy": 0.9 + seed / 100}]
    return {
        **{"recipe": name, "compression": compression, "ranks": ranks, "steps": 20},
        **{
            "settings": {"batch_size": 8, "model": "cnn"},
            "first_step": 0,
            "loss": 0.5,
            "history": rows,
        },
        **{
            "test_accuracy": rows[-1]["test_accuracy"],
            "step_ms": 9.0 + seed,
            "ratio": float(ratio),
        },
        **{"mb_dense": 120.0, "mb_sent": 120 / ratio},
    }


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    compare.main()


def test_measured_once_and_drawn(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(
        launch, "run", lambda *arguments: calls.append(arguments) or recipe(*arguments)
    )
    out = tmp_path / "picture.png"
    command = ["mnist", "--out", out, "--seeds", 1, 2, "--runs", "none", "fp16"]
    command += ["fec --threshold -7", "--", "--epochs", 3]
    run(monkeypatch, *command)
    assert len(calls) == 6
    assert calls[-1] == (
        *("mnist", 2),
        ["--epochs", "3", "--compression", "fec", "--threshold", "-7", "--seed", 2],
    )
    said = capsys.readouterr()
    assert "fp16 failed and is left out:\nno fp16 today" in said.err
    table = said.out.splitlines()
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    # 120 MB in 20 steps at 1 Gbit/s are 48 ms each, and 60 times less are 0.8 ms.
    assert table[2] == "| none | 91.00 92.00 | 91.50 | 0.5000 | 1.00 | 120.00 | 10.0 | 58.0 |"
    assert table[3] == "| fec -7 | 91.00 92.00 | 91.50 | 0.5000 | 60.00 | 2.00 | 10.0 | 10.8 |"
    assert out.read_bytes()[:4] == b"\x89PNG"
    # Only what is missing is run again, and with other options all.
    for options, missing in ([], 2), (["--limit-steps", 4], 6):
        calls.clear()
        run(monkeypatch, *command, *options)
        assert len(calls) == missing
    results = [json.loads(path.read_text()) for path in (tmp_path / "picture").iterdir()]
    assert len(results) == 8


def test_redraw_runs_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch, "run", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "mnist", "--out", tmp_path / "picture.png", "--redraw")
    assert "nothing has been measured" in capsys.readouterr().err


def test_unknown_compression(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "mnist", "--runs", "zip --level 9")
    assert "not as 'zip --level 9' does" in capsys.readouterr().err


@pytest.fixture
def horovodrun(monkeypatch, tmp_path):
    """A horovodrun next to the interpreter, whose body a test writes."""

    def write(body):
        script = tmp_path / "horovodrun"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)

    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    return write


def test_result_line_is_found(horovodrun):
    horovodrun("""echo '[1,1]<stderr>:note'; echo '[1,0]<stdout>:{"recipe": "x", "steps": 3}'""")
    assert launch.run("x", 2, []) == {"recipe": "x", "steps": 3}


@pytest.mark.parametrize("ending", ["", """echo '{"recipe": "x"}'; exit 3"""])
def test_a_run_without_result_says_why(horovodrun, ending):
    horovodrun(f"echo noise; echo '[1,1]<stderr>:no data'\n{ending}")
    with pytest.raises(launch.RunError, match="no data") as caught:
        launch.run("x", 2, [])
    assert "noise" not in str(caught.value)


def test_options_of_the_recipe():
    assert launch.split_options(["a", "--b", "--", "--c", "--"]) == (["a", "--b"], ["--c", "--"])
    assert launch.split_options(["a"]) == (["a"], [])
