"""What pyproject.toml asks for is what the files import: nothing that nothing needs, nothing that another happens to bring."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = {  # by what is asked for, as parts of it
    "numba": {"llvmlite"},
    "fastapi": {"pydantic", "pydantic-core", "typing-extensions"},
    "uvicorn": {"httptools"},
    "cupy-cuda13x": {"cuda-pathfinder"},
    "pexpect": {"ptyprocess"},
    "langchain-openai": {"langchain-core"},
}


def asked(*extras: str) -> set[str]:
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}


def known() -> set[str]:
    """All that some extra asks for, and what comes with it."""
    names = asked(*PROJECT["optional-dependencies"])
    return names.union(*(BROUGHT.get(name, set()) for name in names))


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def imported(folder: Path) -> dict[str, set[str]]:
    """Modules of others that files in there import, wherever in the file, and what of all that is installed has them."""
    found = set()
    for node in (node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    installed = packages_distributions()
    others = {module: {normal(name) for name in installed.get(module, [])} for module in found - set(sys.stdlib_module_names)}
    return {module: names for module, names in others.items() if names - {"nanovllm-cli"}}


def test_the_package_needs_what_it_asks_for() -> None:
    modules = imported(ROOT / "src")
    assert asked() <= set().union(*modules.values())
    assert [module for module, names in modules.items() if not names & known()] == []


def test_what_tests_import_is_asked_for() -> None:
    assert [module for module, names in imported(ROOT / "tests").items() if not names & known()] == []
