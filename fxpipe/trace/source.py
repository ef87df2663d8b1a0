"""Where in the user's code something happened: the line, and the module whose forward it is in."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",  # code made at run time: <string>, <eval_with_key>
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


def is_users(code: CodeType) -> bool:
    """Whether code is outside torch, fxpipe and Python. torchvision and the like are the user's."""
    path = code.co_filename
    if path.startswith(_STANDARD_LIBRARY) and not any(name in path for name in _INSTALLED):
        return False
    return not path.startswith(_NOT_THE_USERS)


def current_line(stop: CodeType) -> str:
    """The innermost user's line that is running, as ``model.py:12 in forward``.

    Args:
        stop: code of the function that called the model; what called that is not looked at.

    Returns:
        Empty if no user's code runs inside `stop`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stop:
        code = frame.f_code
        if is_users(code):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


class Place(NamedTuple):
    """Where an exception left the user's code."""

    line: str  # with the text of the line, as `/home/me/model.py:12 in forward: x.item()`; or empty
    module: nn.Module | None  # the innermost module whose method was running


def place_of(traceback: TracebackType | None, stop: CodeType) -> Place:
    """The innermost user's line and module of a traceback, looked for inside `stop` only."""
    line, module, inside = "", None, False
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        if inside:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                module = owner
            if is_users(code):
                text = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
                line = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}: {text}"
        inside = inside or code is stop
        traceback = traceback.tb_next
    return Place(line, module)
