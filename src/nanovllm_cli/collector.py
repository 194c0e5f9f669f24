"""Python's garbage collector in processes of our own, which load a model once and then step."""

from __future__ import annotations

import gc

NEW_OBJECTS = 100_000
"""More than a step makes and lets go of. By default the collector comes at each 700: several times in a step of many sequences,
going through the lists of all their tokens."""


def come_seldom() -> None:
    """From before anything is imported: going through what modules make took a sixth of a command's time with a small model."""
    gc.set_threshold(NEW_OBJECTS)


def keep_loaded() -> None:
    """What is there now is not gone through again until `gc.unfreeze()`, and what is new more rarely."""
    gc.freeze()
    come_seldom()
