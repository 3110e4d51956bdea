"""``generate``: text from a trained model."""

import click

from spmd_engine.checkpoints import load_checkpoint
from spmd_engine.cli.options import (
    check_option,
    device_option,
    mesh_option,
    open_mesh,
    read_config,
    run_folder,
    what_it_computes,
)
from spmd_engine.engine.composition import build_engine
from spmd_engine.training.data import decode, encode
from spmd_engine.training.generate import generate as generate_tokens


@click.command(short_help="Write text with a trained model.")
@click.option("--run", metavar="DIR", required=True, help="Folder that 'train' wrote.")
@click.option("--prompt", default="def ", show_default=True, help="How the text begins.")
@click.option("--tokens", type=click.IntRange(min=1), default=240, show_default=True, help="Bytes to write.")
@click.option("--temperature", type=click.FloatRange(min=0.0), default=0.8, show_default=True, help="0: likeliest.")
@click.option("--seed", type=int, default=0, show_default=True)
@mesh_option
@device_option
@check_option
def generate(run, prompt, tokens, temperature, seed, mesh, device, check) -> None:
    """Continue a prompt with the model of a run, on any mesh. The text goes to standard output."""
    config = read_config(run)
    with open_mesh(mesh, check=check) as opened:
        engine = build_engine(what_it_computes(config), opened, device=device)
        load_checkpoint(run_folder(run), engine)
        text = decode(generate_tokens(engine, encode(prompt), tokens, temperature=temperature, seed=seed))
        if opened.rank == 0:
            click.echo(prompt + text)
