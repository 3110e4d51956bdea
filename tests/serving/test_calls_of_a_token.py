"""How many functions of this package a generated token calls."""

import sys

from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.models import DecoderConfig
from spmd_engine.serving import StoppingCriteria, generate
from support import tiny

SHAPE = DecoderConfig(layers=3, width=12, heads=6, key_value_heads=2, hidden=8, vocabulary=20, context=64)


def test_a_token_takes_few_calls_of_functions():
    """A token that continues a text of a Llama with three blocks."""
    engine = build_engine(ModelConfig("llama", shape=SHAPE), tiny.mesh_of_one(), trained=False)
    counts = []
    for tokens in (2, 2, 4):  # what is prepared once is prepared in the first text
        counts.append(0)

        def count(frame, event, _):
            counts[-1] += event == "call" and "spmd_engine" in frame.f_code.co_filename

        sys.setprofile(count)
        try:
            generate(engine, [[5, 6, 7]], stopping=StoppingCriteria(tokens))
        finally:
            sys.setprofile(None)
    assert 200 < (counts[2] - counts[1]) / 2 <= 445, counts
