"""What every GPU kernel takes on every architecture, and the gate that holds it: tests/kernel_resources.json.

    python scripts/kernel_resources.py            # says what spills, or differs from the table; exit status 1
    python scripts/kernel_resources.py --all      # the same, and compiles what the table was made of, too
    python scripts/kernel_resources.py --write    # brings the table up to date

Needs NVRTC, and no GPU. Kernels are the `variants()` of the modules beside `nanovllm_cli/kernels/*.cu`, from each one's
`min_capability` on. The table says what it was made of, too: a kernel whose source, headers, options and compiler are the very
ones of the table needs no compiling to know what it takes. tests/test_compile_gate.py compiles some of those all the same.
Compiled code comes from the cache that running the model uses too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import compiler
from nanovllm_cli.kernels.compiler import Resources
from nanovllm_cli.kernels.kernel import SOURCES, Kernel, read_sources

TABLE = Path(__file__).parents[1] / "tests" / "kernel_resources.json"
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
# Dependent launch is an option of the launcher's; its two instructions are compiled here where there are any.
PDL = ("-DPDL",)


class Table(NamedTuple):
    """nvrtc: the compiler's version; another allots registers otherwise. sources: `digest` of each stem. kernels: by name of
    variant and architecture."""

    nvrtc: str
    sources: dict[str, str]
    kernels: dict[str, Resources]


def jobs(capabilities: tuple[int, ...] = CAPABILITIES) -> list[tuple[Kernel, int]]:
    """Every variant of every module that has a source of its name beside it, with each architecture that it is for."""
    modules = [
        importlib.import_module(f"nanovllm_cli.kernels.{source.stem}")
        for source in sorted(SOURCES.glob("*.cu"))
        if source.with_suffix(".py").is_file()
    ]
    return [
        (kernel, capability)
        for module in modules
        for capability in capabilities
        for kernel in module.variants()
        if kernel.min_capability <= capability <= kernel.max_capability
    ]


def measure(jobs: list[tuple[Kernel, int]]) -> tuple[dict[str, Resources], list[str]]:
    """What each kernel takes on an architecture, and what does not compile. NVRTC's threads run side by side."""
    resources, errors = {}, []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (kernel, capability), result in zip(jobs, pool.map(lambda job: _measure(*job), jobs), strict=True):
            if isinstance(result, Resources):
                resources[name(kernel, capability)] = result
            else:
                errors.append(result)
    return resources, errors


def _measure(kernel: Kernel, capability: int) -> Resources | str:
    extra = PDL if capability >= 90 else ()
    try:
        return compiler.compile(kernel, compiler.architecture(capability), extra).resources
    except UnsupportedError as error:
        return error.message


@functools.cache
def digest(stem: str) -> str:
    """Of all that the machine code of a source's kernels depends on, besides what their names say."""
    sources = read_sources(SOURCES / f"{stem}.cu", SOURCES)
    tools = compiler.toolchain()
    content = [compiler.OPTIONS, PDL, tools.nvrtc_version, tools.headers_version, sources]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def is_known(table: Table, kernel: Kernel, capability: int) -> bool:
    """True if the table was made of what compiling it now would read."""
    return table.sources.get(kernel.stem) == digest(kernel.stem) and name(kernel, capability) in table.kernels


def name(kernel: Kernel, capability: int) -> str:
    return f"{kernel.stem}: {kernel} {compiler.architecture(capability)}"


def spilling(resources: dict[str, Resources]) -> list[str]:
    return [f"{kernel} spills {taken.spills} bytes" for kernel, taken in resources.items() if taken.spills]


def read() -> Table:
    content = json.loads(TABLE.read_text())
    kernels = {kernel: Resources(**taken) for kernel, taken in content["kernels"].items()}
    return Table(content["nvrtc"], content["sources"], kernels)


def write(table: Table) -> None:
    """A line each, so that a diff shows what changed."""
    rows = [f"{json.dumps(kernel)}: {json.dumps(taken._asdict())}" for kernel, taken in sorted(table.kernels.items())]
    sources = f'"sources": {json.dumps(table.sources, indent=0)},'
    TABLE.write_text(
        "\n".join(
            ["{", f'"nvrtc": {json.dumps(table.nvrtc)},', sources, '"kernels": {', ",\n".join(rows), "}", "}", ""]
        )
    )


def differences(table: Table, resources: dict[str, Resources], nvrtc: str) -> list[str]:
    """What the table says otherwise: which kernels there are and, if it was made with this compiler, what they take."""
    found = [f"{kernel} is not in the table" for kernel in resources if kernel not in table.kernels]
    for kernel, known in table.kernels.items():
        taken = resources.get(kernel)
        if taken is None:
            found.append(f"{kernel} is in the table only")
        elif taken != known and nvrtc == table.nvrtc:
            found.append(f"{kernel} takes {taken._asdict()}, the table has {known._asdict()}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Registers, shared memory and spills of GPU kernels.")
    parser.add_argument("--write", action="store_true", help="bring the table up to date")
    parser.add_argument("--all", action="store_true", help="compile what the table was made of, too")
    options = parser.parse_args()
    wanted, table = jobs(), read()
    known = {} if options.all else {name(*job): table.kernels[name(*job)] for job in wanted if is_known(table, *job)}
    resources, errors = measure([job for job in wanted if name(*job) not in known])
    num_compiled, nvrtc = len(resources), compiler.toolchain().nvrtc_version
    resources |= known
    failures = errors + spilling(resources)
    if options.write:
        write(Table(nvrtc, {stem: digest(stem) for stem in sorted({kernel.stem for kernel, _ in wanted})}, resources))
    else:
        failures += differences(table, resources, nvrtc)
    summary = f"{len(resources)} kernels, {num_compiled} compiled, {len(failures)} complaints, NVRTC {nvrtc}"
    print(*failures, summary, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
