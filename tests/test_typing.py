"""The public interface has types; ``make lint`` has mypy check them."""

import importlib
import inspect
from pathlib import Path

import pytest

import hvd_fec

MODULES = ["codecs", "cost", "sharding", "wire", "checkpoint", "stats", "callbacks", "compression"]


def public(module):
    """Public functions, methods and properties of our own, by name."""
    for name, thing in vars(module).items():
        if name.startswith("_") or not getattr(thing, "__module__", "").startswith("hvd_fec"):
            continue
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for method in dir(thing):
                function = inspect.getattr_static(thing, method)
                function = getattr(function, "fget", None) or inspect.unwrap(function)
                if (
                    inspect.isfunction(function)
                    and function.__module__.startswith("hvd_fec")
                    and (method == "__init__" or not method.startswith("_"))
                ):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_is_annotated(name):
    if name in ("callbacks", "compression"):
        pytest.importorskip("horovod.tensorflow")
    module = importlib.import_module(f"hvd_fec.{name}")
    seen = dict(public(module))
    assert seen
    for function, code in seen.items():
        signature = inspect.signature(code)
        assert signature.return_annotation is not signature.empty, f"{function} returns what?"
        for parameter in signature.parameters.values():
            typed = parameter.annotation is not signature.empty
            assert typed or parameter.name == "self", f"{parameter.name} of {function}"


def test_type_checkers_may_read_the_annotations():
    assert (Path(hvd_fec.__file__).parent / "py.typed").exists()
