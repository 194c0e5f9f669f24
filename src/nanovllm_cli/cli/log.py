"""Where log records go: warnings to stderr, more with -v, and everything worth keeping to --log-file."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from nanovllm_cli.cli import output
from nanovllm_cli.cli.options import MessageOptions
from nanovllm_cli.cli.output import Console, one_line
from nanovllm_cli.errors import OutputError

PACKAGE = "nanovllm_cli"
ON_SCREEN = "on_screen"
"""Of a record, in `extra`: True where its words are on stderr anyway, as a line of their own."""


def screen_for(options: MessageOptions) -> Console:
    """The process's console, with logging as it was asked for. Raises OutputError for a log file that cannot be written."""
    console = output.console()
    if options.quiet:
        console.status("")
    console.quiet = options.quiet
    own = {0: logging.WARNING, 1: logging.INFO}.get(options.verbose, logging.DEBUG)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)  # other packages are heard when something is wrong
    package = logging.getLogger(PACKAGE)
    package.setLevel(min(own, logging.INFO) if options.log_file else own)
    screen = _on_screen(options, console)
    screen.setLevel(logging.ERROR if options.quiet else own)
    handlers: list[logging.Handler] = [screen]
    if options.log_file is not None:
        try:
            to_file = LogFile(options.log_file, console)
        except OSError as failure:
            raise OutputError(f"cannot write the log {options.log_file}: {failure.strerror}") from failure
        to_file.setFormatter(
            JsonFormatter()
            if options.log_json
            else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )
        handlers.append(to_file)
    root.handlers = handlers
    logging.raiseExceptions = False  # a record that cannot be shown is not worth a traceback
    logging.captureWarnings(True)
    return console


def hear(name: str, options: MessageOptions, console: Console) -> None:
    """Shows what the logger `name` says at level INFO, which others need -v for. With -q nothing."""
    if options.quiet:
        return
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if options.verbose == 0:
        logger.handlers = [_on_screen(options, console)]


def _on_screen(options: MessageOptions, console: Console) -> logging.Handler:
    handler = ConsoleHandler(console)
    if options.log_json and not options.log_file:
        handler.setFormatter(JsonFormatter())
    return handler


class LogFile(logging.FileHandler):
    """Records in a file. One that can't be written any more (a full disk) is no reason to end, and is said once."""

    def __init__(self, name: str, console: Console) -> None:
        super().__init__(name, encoding="utf-8", errors="replace")
        self._name = name
        self._console = console
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            failure = sys.exception()
            reason = failure.strerror if isinstance(failure, OSError) else failure
            self._console.line(f"warning: the log {self._name} is not complete: {reason}")


class ConsoleHandler(logging.Handler):
    """Records as lines on stderr, around the status line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(self.formatter, JsonFormatter):
            self._console.line(self.format(record))
        elif not getattr(record, ON_SCREEN, False):
            text = one_line(record.getMessage().split("\n")[0])
            self._console.line(
                f"{record.levelname.lower()}: {text}", "dim" if record.levelno < logging.WARNING else None
            )


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, the record's own `fields` and, where there is one, the exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
