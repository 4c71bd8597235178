"""Links between documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
ROOMS = ("jaxllm", "kernels", "tests", "benchmarks")
DOCUMENTS = [*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md"))]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
