"""``checkpoint``: what people type, and what they are told."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_engine import Mesh
from spmd_engine.checkpoints import CheckpointFolder, save_checkpoint
from spmd_engine.checkpoints.format.folder import RunLock
from spmd_engine.engine import AdamW
from spmd_engine.strategies import DataParallel
from support import saved


@pytest.fixture
def of_two_steps(tmp_path):
    """A run's folder with two checkpoints that differ in one row."""
    with Mesh(data=1) as mesh:
        engine = DataParallel(4, 6, mesh)
        engine.initialize(0)
        save_checkpoint(tmp_path / "runs" / "a", engine, AdamW(), step=1, seed=3)
        engine.parameters["layer_0/weights"][2] += 1
        save_checkpoint(tmp_path / "runs" / "a", engine, AdamW(), step=2, seed=3)
    return tmp_path / "runs" / "a"


def test_inspect_lists_what_is_there(here, of_two_steps):
    code, out, _ = here("checkpoint", "inspect", "runs/a")
    assert code == 0 and "step            2" in out and "seed            3" in out
    assert "model 2, optimizer 4; --arrays lists them" in out and "layer_1" not in out
    code, out, _ = here("checkpoint", "inspect", "runs/a", "--arrays")
    assert "optimizer square/layer_1/weights  F32[6, 4]" in out
    said = json.loads(here("checkpoint", "inspect", "--json", str(of_two_steps / "checkpoints" / "step-00000001"))[1])
    assert said["step"] == 1 and said["bytes"] == {"model": 192, "optimizer": 384} and len(said["arrays"]) == 6


def test_verify_finds_a_flipped_bit(here, of_two_steps):
    assert "sound; 6 blocks" in here("checkpoint", "verify", str(of_two_steps))[1]
    file = CheckpointFolder(of_two_steps).newest() / "model-00000.safetensors"
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    _, end = json.loads(content[8 : 8 + header])["layer_1/weights"]["data_offsets"]
    content[8 + header + end - 1] ^= 1
    file.write_bytes(content)
    code, out, errors = here("checkpoint", "verify", str(of_two_steps))
    assert code == 1 and out == "" and "layer_1/weights[0:6, 0:4] is not what was written" in errors


def test_digest_tells_what_differs(here, of_two_steps):
    one, two = (of_two_steps / "checkpoints" / f"step-0000000{n}" for n in (1, 2))
    same = here("checkpoint", "digest", str(two), str(of_two_steps))
    assert same[0] == 0 and same[1].split()[0] == same[1].split()[2]
    code, out, _ = here("checkpoint", "digest", "--arrays", str(one), str(two))
    assert code == 1 and out.splitlines()[-1] == "model/layer_0/weights: rows 0 to 3 of [4, 6] differ"
    assert len(out.splitlines()) == 6 + 2 + 1


def test_export_and_reshard(here, of_two_steps, tmp_path):
    assert here("checkpoint", "export", "runs/a", "plain.safetensors")[0] == 0
    plain = load_file(tmp_path / "plain.safetensors")
    assert plain.keys() == saved.parameters(of_two_steps).keys()
    for name, array in saved.parameters(of_two_steps).items():
        np.testing.assert_array_equal(plain[name], array, strict=True)
    code, out, _ = here("checkpoint", "reshard", "runs/a", "runs/b", "--files", "2")
    assert code == 0 and out == "runs/b/checkpoints/step-00000002\n"
    assert saved.everything(tmp_path / "runs" / "b") == saved.everything(of_two_steps)


def test_what_others_have_written_stays(here, of_two_steps, tmp_path):
    """Files of an export's name, and of its name while it is written; another run; and what is called latest."""
    for name in ("mine.safetensors", ".new.safetensors-unfinished"):
        (tmp_path / name).write_text("mine")
    for target, named in [("mine.safetensors", "mine.safetensors"), ("new.safetensors", ".new.safetensors-unfinished")]:
        code, out, errors = here("checkpoint", "export", "runs/a", target)
        assert (code, out, errors.count("\n")) == (2, "", 1) and f"{named} is there already" in errors
        assert (tmp_path / named).read_text() == "mine"
    assert not (tmp_path / "new.safetensors").exists()
    latest = tmp_path / "runs" / "b" / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    (latest / "notes").write_text("mine")
    assert here("checkpoint", "reshard", "runs/a", "runs/b")[0] == 0 and (latest / "notes").read_text() == "mine"
    code, _, errors = here("checkpoint", "reshard", "runs/a/checkpoints/step-00000001", "runs/b")
    assert code == 2 and "runs/b holds another run already (step-00000002)" in errors
    assert sorted(each.name for each in latest.parent.iterdir()) == ["latest", "step-00000002"]
    with RunLock(tmp_path / "runs" / "a"):
        assert "is being written by another run" in here("checkpoint", "reshard", "runs/a", "runs/a")[2]
    assert here("checkpoint", "reshard", "runs/a", "runs/a")[1] == "runs/a/checkpoints/step-00000002.1\n"


@pytest.mark.parametrize("path", ["nowhere", "plain.safetensors"])
def test_what_is_no_checkpoint_is_one_line(here, tmp_path, path):
    save_file({"a": np.zeros(3)}, tmp_path / "plain.safetensors")
    code, out, errors = here("checkpoint", "inspect", path)
    assert code == 2 and out == "" and errors.count("\n") == 1 and path in errors
