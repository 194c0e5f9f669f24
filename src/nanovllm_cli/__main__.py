"""`python -m nanovllm_cli`, and where the `nanovllm` command begins: with what must be there before anything is imported."""

import contextlib
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored: nohup, background jobs
    with contextlib.suppress(ValueError):  # imported by another thread than the main one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a word until `signals.install`

from nanovllm_cli.collector import come_seldom
from nanovllm_cli.errors import UnsupportedError

try:
    come_seldom()
    import nanovllm_cli.system  # noqa: F401
except UnsupportedError as refusal:  # before what would fail over modules that Windows' Python lacks
    hint = f"\nhint: {refusal.hint}" if refusal.hint else ""
    print(f"error: {refusal.message}{hint}", file=sys.stderr)
    sys.exit(refusal.exit_code)

from nanovllm_cli.cli.app import main

if __name__ == "__main__":
    main()
