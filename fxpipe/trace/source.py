"""Where in the user's code something happened: the line, and the module whose forward it is in."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NOT_THE_USERS = (
    _TORCH,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",  # code made at run time: <string>, <eval_with_key>
)
_COMPILERS = tuple(
    os.path.join(_TORCH, package) + os.sep
    for package in ("_export", "_functorch", "_higher_order_ops", "_subclasses", "fx")
)
_LAYERS = os.path.join(_TORCH, "nn") + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


def is_users(path: str) -> bool:
    """Whether a file is not of torch, fxpipe or Python. torchvision and the like are the user's."""
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
        if is_users(code.co_filename):
            return _short(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return ""


def _short(path: str, line: int | str, function: str) -> str:
    return f"{os.path.basename(path)}:{line} in {function}"


def inside_compiler() -> bool:
    """Whether what runs was called by torch's own compilers, not by the user's code or a layer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_users(path) or path.startswith(_LAYERS):
            return False
        if path.startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


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
            if is_users(code.co_filename):
                text = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
                line = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}: {text}"
        inside = inside or code is stop
        traceback = traceback.tb_next
    return Place(line, module)
