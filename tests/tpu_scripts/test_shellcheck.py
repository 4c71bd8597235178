"""The scripts as shellcheck sees them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"

SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which(
    "shellcheck"
)


@pytest.mark.skipif(SHELLCHECK is None, reason="NO SHELLCHECK: pip install -e '.[dev]' brings it")
@pytest.mark.parametrize(
    "script", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: str(path.relative_to(SCRIPTS))
)
def test_shellcheck_has_nothing_to_say(script):
    done = subprocess.run([SHELLCHECK, script], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
