"""What fxpipe says besides its results: warnings that come once, and a folder of texts.

Modules log under their own names (``logging.getLogger(__name__)``), without handlers, so that
``TORCH_LOGS="+fxpipe"`` or the user's own configuration decides what is shown.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

_warned: set[tuple[str, str]] = set()


def warn_once(log: logging.Logger, message: str, *args: object) -> None:
    """Warns through `log` unless the same text has been logged by it in this process.

    Args:
        log: the calling module's logger.
        message: a %-style format of `args`; the same format with other values warns again.
    """
    key = (log.name, message % args if args else message)
    if key not in _warned:
        _warned.add(key)
        log.warning(message, *args, stacklevel=2)


def dump_folder() -> Path | None:
    """Where texts go: the folder ``FXPIPE_DUMP`` names, ``rank<r>`` inside it under torchrun.

    Returns:
        None if the variable is unset or empty: nothing is written.
    """
    folder = os.environ.get("FXPIPE_DUMP", "")
    if not folder:
        return None
    rank = os.environ.get("RANK", "")
    return Path(folder, f"rank{rank}") if rank else Path(folder)


def dump(name: str, text: str) -> None:
    """Writes `text` to the file `name` of the dump folder, over what a former compile left there.

    Args:
        name: as in ``01-assign-stages.txt``; characters a file name cannot hold become ``-``.
        text: ends in the file with one newline.
    """
    folder = dump_folder()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / re.sub(r"[^\w.+=-]+", "-", name)
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
