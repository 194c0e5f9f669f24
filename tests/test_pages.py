"""The pages that a person reads: what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")] + sorted((ROOT / "docs").rglob("*.md"))


def without_code(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, hyphens for blanks, punctuation left out."""
    headings = re.findall(r"(?m)^#+ (.*)$", without_code(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\(docs/(\w+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}
