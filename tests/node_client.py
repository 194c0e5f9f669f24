"""A client of the server that is written for Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def told_by(script: str, package: str, url: str, tmp_path: Path) -> Any:
    """The JSON that the script prints, which gets the address and may require a package.

    TEST_NANOVLLM_NODE_MODULES: a folder into which `npm install PACKAGE` has put it."""
    modules = os.environ.get("TEST_NANOVLLM_NODE_MODULES")
    if modules is None or shutil.which("node") is None or not (Path(modules) / package).is_dir():
        pytest.skip(f"needs node, and TEST_NANOVLLM_NODE_MODULES: a node_modules folder with {package} in it")
    file = tmp_path / "client.js"
    file.write_text(script)
    ran = subprocess.run(
        ["node", str(file), url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "NODE_PATH": modules},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
