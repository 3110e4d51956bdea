"""Jobs on files of tokens: damaged files, tokenizers kept beside runs, documents of helper ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import run_threads, train
from spmd_engine.errors import UsageError
from spmd_engine.jobs.run_job import keep_tokenizer
from spmd_engine.training import TrainConfig
from support.token_files import SMALL_TEXT, prepared

pytestmark = pytest.mark.usefixtures("narrow")


def test_a_run_neither_begins_nor_goes_on_with_a_damaged_file(pairs, tmp_path):
    path = tmp_path / "x.tokens"
    begin = prepared(pairs, path).arrays["tokens"].offset
    whole = path.read_bytes()
    job = TrainConfig.of(**SMALL_TEXT, data=str(path))
    train(job, tmp_path / "run", stop_at=1)
    path.write_bytes(whole[:begin] + b"?" + whole[begin + 1 :])
    for resume, name in (True, "run"), (False, "another"):
        with pytest.raises(UsageError, match="x.tokens is damaged: its documents are not what was written"):
            train(job, tmp_path / name, resume=resume)
    assert not (tmp_path / "another").exists()


def test_only_the_tokenizer_s_own_files_are_taken_from_a_file_of_tokens(tmp_path):
    """Others' files name what they like."""
    files = {"tokenizer_config.json": "{}", "../victim": "", "config.json": "", "/nowhere/at/all": ""}
    (tmp_path / "run").mkdir()
    keep_tokenizer(SimpleNamespace(tokenizer=files), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer_config.json"]
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("documents", [None, "restarted"], ids=["instructions", "restarted"])
def test_a_helper_rank_is_sent_the_documents_as_predicted(texts, pairs, tmp_path, documents):
    prepared(texts if documents else pairs, tmp_path / "x.tokens")
    options = {"data": str(tmp_path / "x.tokens"), "documents": documents, "precision": "float64", "steps": 1}
    alone = TrainConfig.of(**SMALL_TEXT | options)
    helped = alone.with_options(mesh={"data": 1}, assign="block1:rank1")
    for ranks, job in (1, alone), (2, helped):
        run_threads(lambda job=job, run=tmp_path / f"run{ranks}": train(job, run), ranks)
    lines = [json.loads((tmp_path / f"run{n}" / "metrics.jsonl").read_text().splitlines()[0]) for n in (1, 2)]
    assert lines[1]["predicted"]["differences"] == 0
    np.testing.assert_allclose(lines[1]["loss"], lines[0]["loss"], rtol=1e-10)
