"""Everything that needs a GPU, in one call of less than ten minutes on a machine without internet: is it right, how fast is it,
and how near is that to what the device can do.

    python benchmarks/gpu/all.py --output results.json --table results.md
    python benchmarks/gpu/all.py --wheels .whl --only batch-1,attention
    python benchmarks/gpu/all.py --resume results.json --output more.json
    python benchmarks/gpu/all.py --list

Runs from the source tree; nothing needs to be installed but what the package imports. Sections run in order of importance, each
in a process of its own; results are written as they come, so that who is killed loses none. Random weights of real shapes, random
data, medians. --resume runs what an earlier call never came to, and then once more what failed there or took too long; what it
does not come to again it keeps, unless that was another card. --wheels: a folder of wheels that pip is to install, without an
index, into a folder of the run's own. A machine with torch, CuPy, numba and transformers mostly lacks gguf and llguidance
(`pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_31_x86_64 -d .whl gguf
'llguidance>=1.9'`); what a section misses it says.
Without a GPU it says why and ends with status 6.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import report, sections

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / folder) for folder in ("src", "tests", "benchmarks")]
DEFAULT_BUDGET = 560.0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="results as JSON (%(default)s)")
    parser.add_argument("--table", type=Path, help="the table, which is printed too")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET, help="seconds for everything (%(default)s)")
    parser.add_argument("--only", type=known_sections, help="NAME[,NAME]: these sections")
    parser.add_argument("--resume", type=Path, help="results of an earlier call: what is done there is kept, and not run")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install for this run")
    parser.add_argument("--list", action="store_true", help="name the sections and leave")
    parser.add_argument("--section", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.section:
        return sections.run_inside(options.section[0], Path(options.section[1]))
    if options.list:
        for section in sections.SECTIONS:
            print(f"{section.name:14} at most {section.limit:3.0f} s  {section.what}")
        return 0
    try:
        known = earlier(options.resume) if options.resume else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # not there, or not what this program writes
        parser.error(f"--resume {options.resume} has no results of an earlier call: {error!r}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        if options.wheels:
            install(options.wheels, site)
        sys.path[:0] = [site, *PATHS]
        reason = why_not()
        if reason is not None:
            print(f"no GPU run: {reason.message}{f' ({reason.hint})' if reason.hint else ''}", file=sys.stderr)
            return reason.exit_code
        card = known.get("environment", {}).get("results", {}).get("gpu", {}).get("name")
        if card is not None and card != this_card():
            print(f"{options.resume} is of another card ({card}): all runs anew", file=sys.stderr)
            known = {}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([site, *PATHS, os.environ.get("PYTHONPATH", "")])}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        return measure(options, known, options.budget - (time.monotonic() - begin), environment)


def measure(
    options: argparse.Namespace, results: dict[str, sections.Record], budget: float, environment: dict[str, str]
) -> int:
    """0 where every section is done or has a reason to be skipped, else 1. results: of an earlier call; these are added."""

    def launch_as_found() -> None:
        """Whatever is wrong with kernels that overlap takes no other section with it."""
        environment.pop(sections.ONE_BY_ONE, None)
        if report.one_by_one_is_better(results):
            environment[sections.ONE_BY_ONE] = "1"

    def keep(name: str, record: sections.Record) -> None:
        results[name] = known_better(results.get(name), record)
        launch_as_found()
        if record["status"] != "running":
            print(f"{name}: {record['status']}, {record['seconds']} s {report.last_line(record.get('why'))}", flush=True)
        bars, table = shown(results)
        sections.write_json(options.output, {"sections": results, "bars": bars})
        if options.table:
            options.table.parent.mkdir(parents=True, exist_ok=True)
            options.table.write_text(table)

    launch_as_found()
    command = [sys.executable, __file__, "--section"]
    sections.run_all(still_to_do(options.only or known_names(), results), command, budget, keep, environment)
    print("\n" + shown(results)[1])
    return int(any(record["status"] in ("failed", "timed out") for record in results.values()))


def known_better(before: sections.Record | None, now: sections.Record) -> sections.Record:
    """A section's record in two calls: what the second came to, and behind it what the first had that it did not come to."""
    if before is None or not before["results"] or now["status"] == "done":
        return now
    if not now["results"]:
        came_to_it = now["status"] not in ("running", "skipped")
        return now | {"results": before["results"], "earlier": True} if came_to_it else before
    longer = {
        key: value
        for key, value in before["results"].items()
        if key not in now["results"] or (isinstance(value, list) and len(value) > len(now["results"][key]))
    }
    return now | {"results": now["results"] | longer}


def shown(results: dict[str, sections.Record]) -> tuple[list[dict[str, Any]], str]:
    """Bars and table. What breaks while they are made is said in their place: the results are worth more."""
    try:
        return report.bars(results), report.markdown(results)
    except Exception:
        problem = traceback.format_exc()
        print(problem, file=sys.stderr)
        return [], problem


def still_to_do(names: list[str], results: dict[str, sections.Record]) -> list[str]:
    """First what no earlier call came to, each kind in the order of sections."""
    ordered = [name for name in known_names() if name in names]
    return [name for name in ordered if name not in results] + [
        name for name in ordered if name in results and results[name]["status"] != "done"
    ]


def why_not() -> Any:
    """What keeps this machine from running it, as the package's own error, or None."""
    from nanovllm_cli.kernels.launcher import why_unavailable

    return why_unavailable()


def this_card() -> str:
    import torch

    return torch.cuda.get_device_properties(0).name


def install(wheels: Path, site: str) -> None:
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"no wheels in {wheels}")
    flags = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", site]
    command = [sys.executable, "-m", "pip", "install", *flags]
    if subprocess.run([*command, *files]).returncode:
        for file in files:  # one that does not fit this machine keeps none of the others away
            subprocess.run([*command, file])


def earlier(path: Path) -> dict[str, sections.Record]:
    """What another call has found, marked as that call's. What ran when it was ended did not come to its end."""
    found = json.loads(path.read_text())["sections"]
    ended = {"status": "timed out", "why": "the call was ended"}
    return {
        name: record | (ended if record["status"] == "running" else {}) | {"earlier": True}
        for name, record in found.items()
        if record["status"] != "skipped"
    }


def known_names() -> list[str]:
    return [section.name for section in sections.SECTIONS]


def known_sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known_names()]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; known: {', '.join(known_names())}")
    return names


def end_whole() -> None:
    """SIGTERM, which `timeout` sends, ends the section too that runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def leave(status: int) -> NoReturn:
    """A section's process ends here: all is written, and libraries that let go of a GPU one after the other can crash at it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_whole()
    (leave if "--section" in sys.argv else sys.exit)(main())
