"""A program that runs another file, within limits: `limited.py FILE SECONDS BYTES`, of a processor and of memory.

What decodes strangers' files runs so, in a process of its own (`children.start_decoder`). Imports nothing of the package, as it
starts with every sound.
"""

import contextlib
import runpy
import sys


def limit(seconds: int, num_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        if hasattr(resource, "prlimit"):  # Linux: elsewhere much more is mapped than there is
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


if __name__ == "__main__":
    limit(int(sys.argv[2]), int(sys.argv[3]))
    runpy.run_path(sys.argv[1], run_name="__main__")
