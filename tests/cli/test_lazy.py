"""Commands are imported when they are asked for."""

import subprocess
import sys

import pytest

from spmd_engine.cli import cli
from spmd_engine.cli.bench import bench
from spmd_engine.cli.show import show


@pytest.mark.parametrize("group", [cli, show, bench], ids=lambda group: group.name)
def test_every_name_is_that_of_its_command(group):
    context = group.make_context(group.name, ["--help"], resilient_parsing=True)
    names = group.list_commands(context)
    assert len(names) >= 3
    assert [group.get_command(context, name).name for name in names] == names
    assert group.get_command(context, "no-such-command") is None


def test_a_rank_that_trains_loads_no_other_command():
    program = "import sys; from spmd_engine.cli import cli; cli.get_command(None, 'train'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "spmd_engine.cli.train" in loaded
    others = ("rich", "spmd_engine.verification", *(f"spmd_engine.cli.{name}" for name in ("bench", "show", "verify")))
    others += (
        *(
            f"spmd_engine.planning.{name}"
            for name in ("dry_run.analyze", "machine.machine", "plan", "search", "simulator")
        ),
        "spmd_engine.serving",
        "spmd_engine.layers.moe.moe",
        "spmd_engine.layers.convolution",
    )
    others += (
        "spmd_engine.formats.safetensors_file",
        "spmd_engine.formats.tensor",
        "spmd_engine.training.data.token_data",
        "spmd_engine.strategies.page",
        "shutil",
    )
    others += "spmd_engine.checkpoints.read", "spmd_engine.checkpoints.hf.weights", "spmd_engine.models.hf"
    assert not [name for name in loaded if name.startswith(others)]


def test_the_command_line_itself_loads_no_arrays():
    program = "import sys; from spmd_engine.cli import cli; cli.get_command(None, 'new'); print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
