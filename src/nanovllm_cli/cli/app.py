"""The border between the program and the shell: every way out ends here, in an exit code and at most two lines on
stderr.

    0 done, or the reader closed the pipe     4 access refused
    1 failed                                  5 does not fit
    2 usage                                   6 not supported
    3 model not found                         130 Ctrl-C, 143 SIGTERM (128 + the signal)

Nothing heavy is imported at the top: a signal in the first milliseconds must already find its handler.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nanovllm_cli.cli import signals


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The `nanovllm` command. Never returns, never shows a traceback unless asked to."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["__complete"]:
        from nanovllm_cli.cli.complete import complete

        complete(words[1:])
        _leave(0)
    code = 1
    try:
        signals.install()
        from nanovllm_cli.cli.output import ReaderGone, console

        try:
            _first_sign(words)
            code = _invoke(words)
        except ReaderGone:
            code = 0
        except (KeyboardInterrupt, signals.Terminated):
            raise
        except BaseException as error:
            signals.check()  # what an interrupt broke is no error
            code = _explain(error, words)
        finally:
            with contextlib.suppress(Exception, ReaderGone):
                console().end_answer()
    except KeyboardInterrupt:
        code = 130
    except signals.Terminated as stop:
        code = 128 + stop.signum
    except ImportError as error:  # of what failures are told with, too
        with contextlib.suppress(Exception):
            print(f"error: {error}\nhint: the installation is incomplete: install nanovllm again", file=sys.stderr)
    except BaseException:
        pass  # the streams failed while the failure was told: there is nobody left to tell
    _leave(code)


def _invoke(words: list[str]) -> int:
    import typer
    from typer.main import get_command

    from nanovllm_cli.cli.program import PROGRAM, build

    command = get_command(build())
    try:
        with command.make_context(PROGRAM, words) as ctx:
            command.invoke(ctx)
    except typer.Exit as wanted:
        return wanted.exit_code
    return 0


def _first_sign(words: list[str]) -> None:
    """Something on the screen at once, where reading the options will be followed by a wait."""
    from nanovllm_cli.cli.output import console

    if len(words) > 1 and not {"-h", "--help", "--version", "-q", "--quiet"} & set(words):
        console().status("starting")


def _explain(error: BaseException, words: list[str]) -> int:
    """Says what went wrong and what to do, and returns the exit code for it."""
    from nanovllm_cli.cli.failures import explanation
    from nanovllm_cli.cli.output import console

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    told = explanation(error)
    if _debugs(words):
        import traceback

        console().end_answer()
        console().err.write("".join(traceback.format_exception(error)))
    console().error(told.message, told.hint)
    return told.exit_code


def _debugs(words: list[str]) -> bool:
    options = words[: words.index("--")] if "--" in words else words
    return "--debug" in options or os.environ.get("NANOVLLM_DEBUG", "").lower() in ("1", "true", "yes", "on", "t", "y")


def _leave(code: int) -> NoReturn:
    """Ends the process with `code`: what is registered for the end runs, but nothing is taken apart (that costs a
    second with torch, and the system does it anyway)."""
    signals.restore()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
