"""`python -m nanovllm_cli`, and where the `nanovllm` command begins: with what must be there before anything is imported."""

import contextlib
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored: nohup, background jobs
    with contextlib.suppress(ValueError):  # imported by another thread than the main one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a word until `signals.install`

from nanovllm_cli.cli.app import main

if __name__ == "__main__":
    main()
