"""GGUF files that are written: as llama.cpp's own converter writes them, and read as the same model."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.export import export_gguf, export_huggingface
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.errors import UsageError
from spmd_engine.formats.gguf import read_gguf
from spmd_engine.models.names import tokenizer_at
from spmd_engine.tokens.gguf import PROBES, facts_of_tokenizer, gguf_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {path.stem.partition("-0000")[0]: path for path in sorted(GOLDEN.glob("gguf*/*.gguf"), reverse=True)}
#: Golden files that cannot be written, and why.
REFUSED = {
    "llama_short": "rotary.scaling 'divided', which would be read as 'none'",
    "phi3": "rotary.scaling 'divided', which would be read as 'none'",
    "mistral3": "rotary.magnitude 1.0",
}
#: Metadata of golden files that says what llama.cpp assumes without it.
OMITTED = {
    "tensor_data_layout", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "expert_count", "expert_used_count", "expert_shared_feed_forward_length"
}  # fmt: skip


def values(tensor):
    return np.asarray(tensor.read([[size] for size in tensor.shape], [slice(None)] * len(tensor.shape)), np.float32)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_llama_cpps_converter_is_written_again_as_it_was(name, tmp_path):
    pretrained, out = Pretrained(FILES[name]), tmp_path / "out.gguf"
    if name in REFUSED:
        with pytest.raises(UsageError, match=f"a GGUF file of a .* cannot represent {REFUSED[name]}"):
            export_gguf(pretrained, pretrained.shape, out)
        assert not list(tmp_path.iterdir())
        return
    export_gguf(pretrained, pretrained.shape, out, beside=FILES[name])
    found, expected = read_gguf(out), read_gguf(FILES[name])
    assert found.tensors.keys() == expected.tensors.keys()
    for tensor, other in expected.tensors.items():
        assert found.tensors[tensor].shape == other.shape
        np.testing.assert_allclose(values(found.tensors[tensor]), values(other), rtol=1e-6, err_msg=tensor)
    for fact, value in expected.facts.items():
        kind, _, short = fact.partition(".")
        if kind == "tokenizer":
            assert found.facts[fact] == value
        elif kind == expected.facts["general.architecture"] and not short.startswith("ssm."):
            value = value[0] if isinstance(value, list) and len({*value}) == 1 else value
            assert found.facts[fact] == value if fact in found.facts else short in OMITTED, fact


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "mixtral", "qwen3", "gemma", "stablelm", "falcon"])
def test_a_folder_is_written_as_a_file_that_is_read_as_the_same(family, tmp_path):
    one, out = Pretrained(GOLDEN / "decoders" / family), tmp_path / "out.gguf"
    export_gguf(one, one.shape, out)
    export_huggingface(other := Pretrained(out), other.shape, tmp_path / "folder")
    again = Pretrained(tmp_path / "folder")
    assert one.keys() == other.keys() == again.keys()
    for name in one:
        expected = one[name][...].astype(np.float32)
        np.testing.assert_allclose(other[name][...], expected, rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(again[name][...], expected, rtol=1e-6, atol=1e-7, err_msg=name)


def test_several_ranks_write_the_file_of_one(tmp_path, caplog):
    def program():
        pretrained = Pretrained(GOLDEN / "decoders" / "llama")
        with Mesh() as mesh:
            group = mesh.group() if mesh.size > 1 else None
            export_gguf(pretrained, pretrained.shape, tmp_path / f"{mesh.size}.gguf", group, dtype="bfloat16")

    run_threads(program, 1), run_threads(program, 3)
    assert [text.partition(",")[0] for text in caplog.messages] == 2 * ["the file has no tokenizer"]
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()
    dtypes = {name: tensor.dtype for name, tensor in read_gguf(tmp_path / "1.gguf").tensors.items()}
    assert dtypes["output_norm.weight"] == "F32" and dtypes["blk.0.ffn_up.weight"] == "BF16"


def test_what_files_of_llama_cpp_do_not_have_is_refused(tmp_path):
    for family, said in {
        "gptj": "llama.cpp has no architecture for a gptj; export it as huggingface",
        "qwen2_moe": "a qwen2-moe cannot represent mixture.dense '0', which would be read as ''",
        "gemma2": "a gemma2 cannot represent attention_scale 0.18257418583505536, which would be read as 0.5",
        "smollm3": "a smollm3: smollm3.attention.sliding_window is 7, which is not supported",
    }.items():
        pretrained = Pretrained(GOLDEN / "decoders" / family)
        with pytest.raises(UsageError, match=said):
            export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf")
    with pytest.raises(UsageError, match="--format gguf: dtype float64 is not written; "):
        export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf", dtype="float64")


def test_a_mixture_that_was_trained_with_losses_of_its_routers_is_exported(tmp_path):
    pretrained = Pretrained(GOLDEN / "decoders" / "mixtral")
    mixture = pretrained.shape.mixture
    trained = pretrained.shape.changed(
        mixture=mixture.changed(router=mixture.router.changed(balance_loss=0.01, capacity_factor=1.5))
    )
    export_gguf(pretrained, trained, tmp_path / "out.gguf")
    assert Pretrained(tmp_path / "out.gguf").shape.mixture == mixture


def test_numbers_beyond_float16_are_refused_by_name(tmp_path):
    shutil.copytree(GOLDEN / "decoders" / "phi", tmp_path / "phi")
    tensors = load_file(tmp_path / "phi" / "model.safetensors")
    tensors["model.layers.1.mlp.fc1.weight"] = tensors["model.layers.1.mlp.fc1.weight"] * 1e6
    save_file(tensors, tmp_path / "phi" / "model.safetensors")
    pretrained = Pretrained(tmp_path / "phi")
    with pytest.raises(UsageError, match="blk.1.ffn_up.weight has a number of magnitude .*: export bfloat16"):
        export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf", dtype="float16")
    export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf", dtype="bfloat16")


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
def test_the_format_s_own_package_reads_what_is_written(tmp_path):
    from gguf import GGUFReader

    pretrained = Pretrained(FILES["llama"])
    export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf", dtype="float16", beside=FILES["llama"])
    reader, expected = GGUFReader(tmp_path / "out.gguf"), read_gguf(tmp_path / "out.gguf")
    assert {tensor.name for tensor in reader.tensors} == expected.tensors.keys()
    for tensor in reader.tensors:
        np.testing.assert_array_equal(np.asarray(tensor.data, np.float32), values(expected.tensors[tensor.name]))
    for name, value in expected.facts.items():
        assert reader.fields[name].contents() == value


# --- Tokenizers


def byte_level(library, split):
    tokenizer = library.Tokenizer(library.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = split
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(PROBES * 3, trainer)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def sentence_piece(library):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = library.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    module = library.normalizers
    tokenizer.normalizer = module.Sequence([module.Prepend("▁"), module.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "spm"])
def test_a_tokenizer_is_handed_on(kind, tmp_path):
    library = pytest.importorskip("tokenizers")
    from spmd_engine.tokens.gguf import SPLITS

    made = sentence_piece(library) if kind == "spm" else byte_level(library, SPLITS[kind].pre_tokenizer(library))
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    given = tokenizer_at(tmp_path)
    facts = facts_of_tokenizer(given, given.vocabulary + 3)
    written = gguf_tokenizer(facts)
    assert facts["tokenizer.ggml.model"] == ("llama" if kind == "spm" else "gpt2")
    assert len(facts["tokenizer.ggml.tokens"]) == given.vocabulary + 3
    for text in (*PROBES, "hello hello", "<s>x</s>"):
        assert written.encode(text) == given.encode(text)
    assert written.chat_template == given.chat_template and written.end == given.end
    with pytest.raises(UsageError, match="tokens, but the model 9"):
        facts_of_tokenizer(given, 9)


def test_a_tokenizer_that_files_cannot_describe_is_left_out_with_a_warning(tmp_path, caplog):
    library = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / "decoders" / "llama", tmp_path / "llama")
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "llama" / "tokenizer.json"))
    pretrained = Pretrained(tmp_path / "llama")
    export_gguf(pretrained, pretrained.shape, tmp_path / "out.gguf", beside=tmp_path / "llama")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("its tokenizer is not handed on: it is neither a byte-level BPE nor")
