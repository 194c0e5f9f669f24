"""The tiers of docs/architecture.md: a file imports from its own tier or a lower one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "nanovllm_cli"
TIERS = {
    "errors": 0, "config": 0, "sampling_params": 0, "sampling_fields": 0,
    "batch": 0, "mixer_spec": 0, "model_spec": 0, "progress": 0, "folders": 0,
    "constraint": 0, "prompts": 0, "processors": 0, "children": 0, "system": 0, "collector": 0, "vision_spec": 0, "tower_spec": 0,
    "router_spec": 0, "mosaic": 0, "sam_spec": 0, "fastvit_spec": 0, "pictures": 0, "control_groups": 0, "tokens_spec": 0,
    "limited": 0, "together": 0,
    "tiles_spec": 0, "resampler_spec": 0, "leading": 0,
    "video_spec": 0,
    "sent": 0, "hearing_spec": 0, "reading_spec": 0, "canvas_spec": 0, "size_spec": 0, "overrides": 0,
    "samplers": 0, "streams_spec": 0, "curve_spec": 0, "passes_spec": 0, "norm_spec": 0, "mlp_spec": 0,
    "rope_spec": 0, "vllm_names": 0, "state_spec": 0, "index_spec": 0, "digest_spec": 0,
    "kernels": 1, "distributed": 1,
    "quant": 2, "attention": 2,
    "layers": 3,
    "models": 4,
    "weights": 5, "text": 5, "constrain": 5, "client": 5, "images": 5, "sounds": 5,
    "engine": 6,
    "llm": 7, "judging": 7, "steering": 7, "senses": 6, "quantization": 7, "planning": 7, "transcribing": 7, "cross_spec": 0,
    "cli": 8, "server": 8, "bench": 8, "chat": 8, "__main__": 8,
}  # fmt: skip
SIDE_ROOMS = {"text", "constrain", "client", "images", "sounds"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "nanovllm_cli"


def module_of(path: Path) -> str:
    return ".".join(["nanovllm_cli", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    """Absolute names of the project's own modules that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += names if node.module == "nanovllm_cli" else [str(node.module)]
    return [name for name in found if name.startswith("nanovllm_cli.")]


def wrong_imports(path: Path) -> Iterator[str]:
    own = room(module_of(path))
    if own == "nanovllm_cli":
        return
    if own not in TIERS:
        yield f"{own} has no tier"
        return
    for target in imports(path):
        theirs = room(target)
        if theirs == "__version__":
            continue
        if theirs not in TIERS:
            yield f"{path.name} imports {target}, which has no tier"
        elif TIERS[theirs] > TIERS[own]:
            yield f"{path.name} (tier {TIERS[own]}) imports {target} (tier {TIERS[theirs]})"
        elif own in SIDE_ROOMS and theirs != own and TIERS[theirs] != 0:
            yield f"{path.name}: a side room imports {target}"


def test_imports_look_down() -> None:
    assert [wrong for path in FILES for wrong in wrong_imports(path)] == []


def test_a_file_is_read_in_a_sitting() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 450] == []


def test_what_a_weekend_is_for_is_there_and_no_longer() -> None:
    """docs/reading.md promises 13,000 lines."""
    named = re.findall(r"`([\w/]+\.(?:py|cu))`", (PACKAGE.parents[1] / "docs" / "reading.md").read_text())
    assert len(named) == len(set(named)) > 50
    num_lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in named)
    assert 12_500 < num_lines < 13_500
