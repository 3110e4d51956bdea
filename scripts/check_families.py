"""Runs every command on every family of models, on 1, 2 and 4 ranks, and loads the exported models with transformers.

    python scripts/check_families.py --peer-python PATH/TO/python        # with torch and transformers
    python scripts/check_families.py --only gemma3,qwen3_moe --ranks 4

The configurations are those of `tests/golden/decoders`, with 300 tokens and random weights. Each is written as a folder
with a tokenizer, then inspected, planned, trained for three steps and verified; it generates text, and the run is
exported. The logits of both models in transformers, in float32, must agree with those computed here (for the run by
`infer`) to 1e-5 of the largest logit, beyond attention windows and over more than 64 positions.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
import tokenizers

from spmd_engine import Mesh
from spmd_engine.checkpoints.hf.export import export_huggingface
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.cli.bench.measuring import mpiexec
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.models.families import FAMILIES as RECORDS
from spmd_engine.models.hf.read_config import read_config

FOLDERS = Path(__file__).resolve().parent.parent / "tests" / "golden" / "decoders"
FAMILIES = sorted(path.name for path in FOLDERS.iterdir())
MESHES = {1: "data=1", 2: "model=2", 4: "pipe=2,model=2"}
OF_EXPERTS = {1: "data=1", 2: "expert=2", 4: "expert=2,model=2"}
EXPERTS = [record.model_type for record in RECORDS.values() if record.experts is not None]
VOCABULARY, LENGTH = 300, 72
PEER = """
import sys, numpy, torch, transformers
torch.set_num_threads(1)
for folder in sys.argv[2:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"  # others want widths that are multiples of 16 bytes
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(numpy.load(sys.argv[1])), use_cache=False).logits
    numpy.save(folder + "/logits.npy", logits.numpy())
"""


def write_model(family, folder, tokens):
    """Write a folder with the family's configuration and random weights, and a file with its logits."""
    config = json.loads((FOLDERS / family / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    shape = read_config({name: value for name, value in config.items() if not name.endswith("_token_id")}, family)[0]
    random = np.random.default_rng(0)
    with Mesh() as mesh:
        engine = build_engine(ModelConfig(family, shape=shape), mesh)
        arrays = {}
        for name in engine.names:
            drawn = random.standard_normal(engine.global_shape(name)) * 0.2
            arrays[name] = (drawn + name.endswith(("scale", "_norm"))).astype(np.float32)
        engine.load_checkpoint(arrays)
        with engine.inference():
            np.save(f"{folder}.npy", engine.forward(tokens))
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    export_huggingface({n: Sliceable(a.shape, a.dtype, a.__getitem__) for n, a in arrays.items()}, shape, folder)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": None}  # 32000 in some classes
    (folder / "config.json").write_text(json.dumps(config))


def tokenizer():
    """A tokenizer of bytes and of pairs that are frequent in this file."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=letters, show_progress=False)
    bpe.train_from_iterator([Path(__file__).read_text()], trainer)
    return bpe


def call(folder, ranks, *arguments):
    """Run a command of the package on ``ranks`` ranks."""
    command = [sys.executable, "-m", "spmd_engine", *map(str, arguments)]
    command = [*(mpiexec(ranks) if ranks > 1 else []), *command]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"SPMD_FAST": "0"},
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, arguments))} on {ranks} ranks:\n{done.stdout}{done.stderr}")


def all_commands(folder, family, ranks):
    """The commands that a user would run on the folder; the last is the export."""
    model, run, out = folder / family, f"runs/{family}-{ranks}", folder / f"{family}-{ranks}"
    mesh = ("--mesh", (OF_EXPERTS if family in EXPERTS else MESHES)[ranks])
    if ranks > 1:
        call(folder, 1, "inspect", "--model", model, *mesh)
        call(folder, 1, "plan", "--model", model, "--ranks", ranks, "--batch-size", 4)
    options = ("--batch-size", 4, "--length", LENGTH, "--data", folder / "corpus.tokens", "--seed", 3)
    call(folder, ranks, "train", "--model", model, *mesh, *options, "--steps", 3, "--eval-samples", 4, "--run", run)
    call(folder, ranks, "verify", "--model", model, *mesh, "--batch-size", 4, "--steps", 1)
    source = ("--model", model) if ranks == 2 else ("--run", run)
    call(folder, ranks, "generate", *source, *mesh, "--prompt", "abc", "--tokens", 5)
    call(folder, ranks, "infer", "--run", run, *mesh, "--input", folder / "tokens.npy", "--output", f"{out}.npy")
    call(folder, ranks, "checkpoint", "export", run, out, "--format", "huggingface")
    return out


@click.command(help=__doc__.splitlines()[0])
@click.option("--peer-python", help="A Python with torch and transformers; without it, only the commands run.")
@click.option("--only", default=",".join(FAMILIES), show_default=True, help="Families, separated by commas.")
@click.option("--ranks", default="1,2,4", show_default=True, help="Numbers of ranks; none: no commands are run.")
def main(peer_python, only, ranks):
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "text.txt").write_text(Path(__file__).read_text() * 3)
        tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH))
        np.save(root / "tokens.npy", tokens)
        outs = []
        for family in only.split(","):
            write_model(family, root / family, tokens)
            outs.append(root / family)
            if not (root / "corpus.tokens").exists():
                encoded = "--tokenizer", root / family, "--output", root / "corpus.tokens"
                call(root, 1, "data", "prepare", root / "text.txt", *encoded)
            for count in map(int, filter(None, ranks.split(","))):
                try:
                    outs.append(all_commands(root, family, count))
                except click.ClickException as error:
                    failed = True
                    print(f"{family}: {error.message}", flush=True)
                else:
                    print(f"{outs[-1].name}: all commands", flush=True)
        if peer_python:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run([peer_python, "-c", PEER, root / "tokens.npy", *outs], env=environment, check=False)
            failed |= done.returncode != 0
            for out in outs:
                if not (out / "logits.npy").is_file():
                    continue
                expected, actual = np.load(out / "logits.npy"), np.load(f"{out}.npy")
                off = abs(actual - expected).max() / abs(expected).max()
                failed |= bool(off > 1e-5)
                print(f"{out.name}: {off:.1e} off transformers" + (" TOO MUCH" if off > 1e-5 else ""))
    sys.exit(failed)


if __name__ == "__main__":
    main()
