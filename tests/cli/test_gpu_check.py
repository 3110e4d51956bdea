"""The script for a machine with a GPU runs every part where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


@pytest.mark.soak
def test_every_part_of_the_dry_run(tmp_path):
    command = [SCRIPT, "--dry-run", "--json", tmp_path / "table.json"]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True
    )
    table = json.loads((tmp_path / "table.json").read_text())
    assert done.returncode == 0 and done.stdout.startswith("DRY RUN"), done.stdout + done.stderr
    rows = table["rows"]
    assert table["dry_run"] and not [name for name, facts in rows.items() if "failed" in facts]
    for precision in "float32", "tf32", "bfloat16":
        assert rows[f"gpt2, {precision}"]["tokens/s"] > 0
        assert rows[f"gpt2, {precision}, predicted"]["launches"] > 100
        assert rows[f"gpt2, {precision}, PyTorch eager"].keys() & {"tokens/s", "left out"}
    assert rows["decoding, Llama 135M"]["batch 8, tokens/s"] > 0
