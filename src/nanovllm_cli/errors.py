"""Every error that a user can cause or meet, in one tree.

    NanovllmError                     exit 1
    ├── UsageError                    exit 2   flags, request fields, input lines
    │   ├── UnmeetableError
    │   └── AbsentError                    an AttributeError, too
    ├── ModelNotFoundError            exit 3   no such model, or not here while offline
    ├── AccessRefusedError            exit 4   gated or private repository, unreadable file
    ├── DoesNotFitError               exit 5   memory, or more tokens than the context holds
    │   └── PromptTooLongError
    ├── UnsupportedError              exit 6   architecture, tensor type, file format, device
    ├── DifferenceError               exit 7   what was compared differs by more than it may: nothing failed
    ├── CheckpointError               exit 1   a model's files are broken, incomplete or contradict each other
    ├── TemplateError                 exit 1   a chat template that does not compile, or refuses the messages
    ├── DownloadError                 exit 1   the network, or the hub, failed
    ├── ServerError                   exit 1   a server that was asked cannot be reached, or fails
    ├── SessionError                  exit 1   a saved conversation is damaged, foreign or in use
    ├── OutputError                   exit 1   an answer could not be written (full disk, no permission)
    ├── BusyError                     exit 1   more is asked at once than there is room for; later it may be done
    ├── LostError                     exit 1   nothing more can be computed here, whoever asks
    │   ├── LostProcessError                   one of the processes that compute a model together has ended
    │   └── LostDeviceError                    a GPU does nothing more for this process
    └── RequestError                  exit 1   one request failed while it ran (NaN logits, a failing constraint)

Each carries one line of what went wrong (its message) and, where something can be done, one line of what to do
(`hint`). Exit codes are attributes here and are turned into process exits only in `cli/`.
"""

from __future__ import annotations

from typing import Self


class NanovllmError(Exception):
    """The root. `message`: what happened, one line. `hint`: what to do next, one line, or None."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(hint)  # which Python writes below a message that nobody catches


class UsageError(NanovllmError):
    """A flag, a request field or an input line that has no meaning."""

    exit_code = 2


class UnmeetableError(UsageError):
    """What a request asks of its answer cannot be had, which nobody knew before it ran: its constraint and its bans leave no
    token to draw, or the constraint is too involved to be followed."""


class AbsentError(UsageError, AttributeError):
    """An object has no attribute of that name, as `hasattr` is told too; the hint says what serves instead."""


class ModelNotFoundError(NanovllmError):
    """No model answers to that name, or it is not on this machine while offline."""

    exit_code = 3


class AccessRefusedError(NanovllmError):
    """The hub or the file system does not let this user read it."""

    exit_code = 4


class DoesNotFitError(NanovllmError):
    """It needs more memory, or more context, than there is."""

    exit_code = 5


class PromptTooLongError(DoesNotFitError):
    """A prompt that leaves no room for an answer. Counts are in tokens."""

    def __init__(self, prompt_len: int, limit: int, hint: str | None = None) -> None:
        super().__init__(
            f"the prompt has {prompt_len} tokens, the context holds {limit}",
            hint or "shorten the prompt, or raise --ctx-size if the model allows it",
        )
        self.prompt_len = prompt_len
        self.limit = limit

    def __reduce__(self) -> tuple[type[Self], tuple[int, int, str | None]]:
        """Pickling makes it again out of these, not out of its message, as it does with the others."""
        return type(self), (self.prompt_len, self.limit, self.hint)


class UnsupportedError(NanovllmError):
    """An architecture, tensor type, format or device that this version does not handle."""

    exit_code = 6


class DifferenceError(NanovllmError):
    """What was to be compared was compared, and differs by more than it may."""

    exit_code = 7


class CheckpointError(NanovllmError):
    """A model's files are broken, incomplete, or contradict each other."""


class TemplateError(NanovllmError):
    """A chat template does not compile, runs too long, or refuses the messages."""


class DownloadError(NanovllmError):
    """The network or the hub failed in a way that a retry may cure."""


class ServerError(NanovllmError):
    """A server that was asked cannot be reached, is too busy, or does not behave like one."""


class LostError(NanovllmError):
    """Nothing more can be computed in this process, and no request is to blame."""


class LostProcessError(LostError):
    """One of the processes that compute a model together has ended; the others can't go on."""


class LostDeviceError(LostError):
    """A GPU does nothing more for this process: a kernel went wrong there, or the GPU itself."""


class SessionError(NanovllmError):
    """A saved conversation cannot be read, or another process has it open."""


class OutputError(NanovllmError):
    """The answer could not be written where it was asked for."""


class BusyError(NanovllmError):
    """More is asked at once than there is room for; the same may be done later."""


class RequestError(NanovllmError):
    """One request failed while it ran; the others go on."""
