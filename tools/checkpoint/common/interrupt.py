"""Ctrl-C ends a command in one line, whatever it is at."""

import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from .stdout import complain


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process from here on, which is a command and nothing else.

    For its first lines: what Python does by default is a traceback.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def ends_on_interrupt[**P](main: Callable[P, int]) -> Callable[P, int]:
    """Decorate the ``main`` of a command, which a program may call as well, with words of its own.

    The command's process ends in a handler, not by ``KeyboardInterrupt``: torch, while it is
    imported, makes other errors of that, or none. What has to be undone is a publication's, which
    puts handlers of its own in while it is under way. A program's process, such as a notebook's,
    goes on.
    """

    @functools.wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        if args or kwargs:
            try:
                return main(*args, **kwargs)
            except KeyboardInterrupt:
                return _stopped(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
            return main(*args, **kwargs)
        signal.signal(signal.SIGINT, _end)
        try:
            return main(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return command


def _end(signum: int, frame: FrameType | None) -> None:
    try:
        _stopped(signum)
    finally:
        os._exit(128 + signum)


def _stopped(signum: int) -> int:
    complain(f'stopped by {signal.Signals(signum).name}')
    return 128 + signum
