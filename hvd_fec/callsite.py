"""What Horovod knows about a gradient and does not tell its compressor.

``Compressor.compress`` is handed a tensor and nothing else. The names, the op, the process set and
the variable are local variables of the Horovod functions that call it, so they are read from
there. Nothing here changes Horovod; where a frame is not found, a fact is simply missing and the
caller has to do without it.
"""

import sys
from types import FrameType
from typing import Any, NamedTuple, Optional

_DEPTH = 64
"""Frames to look at: Horovod's own are near, but AutoGraph puts its frames in between."""


class CallSite(NamedTuple):
    """The facts, each None where it is not known."""

    name: Optional[str] = None
    op: Any = None
    process_set: Any = None
    variable: Any = None
    index: Optional[int] = None  # type: ignore[assignment]  # tuples have a method of that name
    """Of the variable among those reduced together."""


def find(compressor, tensor) -> CallSite:
    """The facts about ``tensor``, which a Horovod function up the stack gave to ``compressor``."""
    site = CallSite()
    frame: Optional[FrameType] = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = frame and frame.f_back
        if frame is None:
            break
        seen = frame.f_locals
        if site.op is None and seen.get("compression") is compressor and "process_set" in seen:
            site = CallSite(seen.get("name"), seen.get("op"), seen["process_set"])
        grads, variables = seen.get("grads"), seen.get("vars")
        if isinstance(grads, (list, tuple)) and isinstance(variables, (list, tuple)):
            for index, (grad, variable) in enumerate(zip(grads, variables)):
                if grad is tensor:
                    return site._replace(variable=variable, index=index)
    return site


def momentum_of_optimizer() -> Optional[str]:
    """What of an optimizer up the stack accumulates gradients, in words; None if nothing does or
    no optimizer is there."""
    frame: Optional[FrameType] = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = frame and frame.f_back
        if frame is None:
            return None
        optimizer = frame.f_locals.get("self")
        if not hasattr(optimizer, "apply_gradients"):
            continue
        for name in ("momentum", "_momentum", "beta_1"):  # Keras's, its legacy SGD's, Adam's
            value = getattr(optimizer, name, None)
            if isinstance(value, (bool, float, int)) and value:
                return f"{name.lstrip('_')}={value}"
    return None
