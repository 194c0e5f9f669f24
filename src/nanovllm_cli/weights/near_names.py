"""What may have been meant by a name that is no model's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def near_files(name: str) -> str | None:
    """The nearest models' files and folders where the name would be one, with or without what their names end with."""
    try:
        path = Path(os.path.expanduser(name))
        models = (each for each in path.parent.iterdir() if each.suffix in (".gguf", ".safetensors") or each.is_dir())
        there = [each for each in models if each.exists()]
    except (OSError, ValueError, RuntimeError):
        return None
    forms = {each.stem: each.name for each in there} | {each.name: each.name for each in there}
    near = dict.fromkeys(forms[form] for form in difflib.get_close_matches(path.name, forms, n=4, cutoff=0.75))
    return _told([str(path.parent / each) for each in near][:3])


def near_names(name: str, candidates: Iterable[str]) -> str | None:
    """The nearest of `candidates`, aliases and repositories, compared whole and without their organization. Ollama's names end in
    :latest where no size is said."""
    forms = {
        form.lower(): candidate
        for candidate in reversed(list(candidates))
        for form in (candidate, candidate.split("/")[-1])
    }
    wanted = name[:200].lower().removesuffix(":latest")
    close = difflib.get_close_matches(wanted, forms, n=6, cutoff=0.6)
    close += difflib.get_close_matches(wanted.split("/")[-1], forms, n=6, cutoff=0.75)
    return _told(list(dict.fromkeys(forms[form] for form in close))[:3])


def _told(nearest: list[str]) -> str | None:
    return f"did you mean {' or '.join(nearest)}?" if nearest else None
