"""Conversion: what is written, what is refused, and that it is all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from draft_checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    OFFSETS,
    TARGET_IDS,
    VOCAB,
    Model,
    Spec,
    eagle1,
    eagle3,
    kimi_mla_draft,
    kimi_target,
    llama_target,
    longs,
    nextn,
    official_eagle3,
    speculators,
    write_safetensors,
)
from test_check_draft_reading import write_bin
from test_check_draft_rules import AUX, bad, sharded

from sglang_spec_ext.ops.check_draft import CheckpointError, ServerOptions, check
from sglang_spec_ext.ops.check_draft import convert as module
from sglang_spec_ext.ops.check_draft.checkpoint import read_checkpoint
from sglang_spec_ext.ops.check_draft.convert import ConversionRefused, convert
from sglang_spec_ext.ops.check_draft.tensors import FileRange, Literal

WEIGHTS = "model.safetensors"
SERVED = ServerOptions(dtype="float16", allow_longer_context=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def values(directory: Path, name: str) -> bytes:
    source = read_checkpoint(directory).tensors[name].source
    assert source is not None
    return b"".join(source.chunks())


def foreign() -> Model:
    """SGLang's layout turned into layers.0 with target ids in d2t."""
    model = eagle3()
    model.tensors = {
        name.replace("midlayer", "layers.0"): Spec(spec.dtype, spec.shape, spec.content(name))
        for name, spec in model.tensors.items()
    }
    model.tensors["d2t"] = longs(TARGET_IDS)
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return llama_target().write(tmp_path / "target")


# --- what is written ----------------------------------------------------------------------------


def test_round_trip_is_byte_for_byte(target: Path, tmp_path: Path) -> None:
    ours = eagle3().write(tmp_path / "ours")
    theirs = foreign().write(tmp_path / "theirs")
    before = contents(theirs)
    assert bad(check(target, theirs)) == {"layout-layers0", "d2t-absolute"}
    done = convert(target, theirs, tmp_path / "out")
    assert bad(done.findings) == set()
    assert len(done.edits) == 2
    assert contents(tmp_path / "out") == contents(ours)
    assert contents(theirs) == before


@pytest.mark.parametrize("release", [None, "0.5.9", "0.5.23"])
@pytest.mark.parametrize("model", [eagle3, eagle1, nextn], ids=lambda model: model.__name__)
def test_a_clean_checkpoint_is_copied_as_it_is(
    model: object, release: str | None, tmp_path: Path
) -> None:
    assert callable(model)
    draft = model().write(tmp_path / "draft")
    (draft / "tokenizer_config.json").write_text('{ "odd":   "spacing" }')
    (draft / "LICENSE").write_text("as it was")
    header = (draft / WEIGHTS).read_bytes()
    padded = (int.from_bytes(header[:8], "little") + 64).to_bytes(8, "little")
    end = 8 + int.from_bytes(header[:8], "little")
    (draft / WEIGHTS).write_bytes(padded + header[8:end] + b" " * 64 + header[end:])
    done = convert(None, draft, tmp_path / "out", ServerOptions(release=release))
    assert done.edits == ()
    assert contents(tmp_path / "out") == contents(draft)


def test_layers0_is_left_alone_for_a_release_that_takes_it(tmp_path: Path) -> None:
    draft = eagle3(layer="layers.0").write(tmp_path / "draft")
    convert(None, draft, tmp_path / "out", ServerOptions(release="0.5.23"))
    assert contents(tmp_path / "out") == contents(draft)


def test_mla_draft_is_left_alone(tmp_path: Path) -> None:
    target = kimi_target().write(tmp_path / "target")
    draft = kimi_mla_draft().write(tmp_path / "draft")
    done = convert(target, draft, tmp_path / "out")
    assert bad(done.findings) == {"arch-release"}  # of the server, so no reason to refuse
    assert contents(tmp_path / "out") == contents(draft)


def test_speculators_checkpoint(target: Path, tmp_path: Path) -> None:
    model = speculators()
    model.config[AUX] = [2, 12, 29]
    done = convert(target, model.write(tmp_path / "draft"), tmp_path / "out")
    # The layers are right now, but the oldest releases record their graphs with other ones.
    assert bad(done.findings) == {"aux-layer-ids-graph"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["eagle_config"][AUX] == [1, 11, 28]
    assert "transformer_layer_config" not in config
    assert "target_hidden_size" not in config
    assert "speculators_model_type" not in config
    expected = {k: v for k, v in eagle3().config.items() if k != "tie_word_embeddings"}
    assert {k: config[k] for k in expected} == expected


def test_official_checkpoint(target: Path, tmp_path: Path) -> None:
    draft = official_eagle3().write(tmp_path / "draft")
    done = convert(target, draft, tmp_path / "out", SERVED)
    assert bad(done.findings) == {"context-length-stretched"}
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (draft / WEIGHTS).read_bytes()


def test_shards_that_need_nothing_stay_as_they_are(target: Path, tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", foreign())
    convert(target, draft, tmp_path / "out")
    reference = sharded(tmp_path / "reference", eagle3())
    got, wanted = contents(tmp_path / "out"), contents(reference)
    index = "model.safetensors.index.json"
    assert json.loads(got.pop(index)) == json.loads(wanted.pop(index))
    assert got == wanted


def test_clean_shards(target: Path, tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", eagle3())
    convert(target, draft, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(draft)


def test_torch_file_becomes_safetensors(target: Path, tmp_path: Path) -> None:
    model = foreign()
    draft = Model(model.config).write(tmp_path / "draft")
    write_bin(draft / "pytorch_model.bin", model.tensors)
    done = convert(target, draft, tmp_path / "out")
    assert bad(done.findings) == set()
    assert set(contents(tmp_path / "out")) == {"config.json", WEIGHTS}
    for name, spec in eagle3().tensors.items():
        assert values(tmp_path / "out", name) == spec.content(name)


def test_int32_map_keeps_its_type(target: Path, tmp_path: Path) -> None:
    model = eagle3()
    model.tensors["d2t"] = longs(TARGET_IDS, "I32")
    convert(target, model.write(tmp_path / "draft"), tmp_path / "out")
    d2t = read_checkpoint(tmp_path / "out").tensors["d2t"]
    assert (d2t.dtype, d2t.integers()) == ("I32", OFFSETS)


def test_eagle1_gets_a_bias_of_zeros(target: Path, tmp_path: Path) -> None:
    model = eagle1()
    del model.tensors["fc.bias"]
    draft = model.write(tmp_path / "draft")
    done = convert(target, draft, tmp_path / "out")
    assert bad(done.findings) == set()
    assert values(tmp_path / "out", "fc.bias") == bytes(2 * HIDDEN)
    for name, spec in model.tensors.items():
        assert values(tmp_path / "out", name) == spec.content(name)


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", ["LlamaForCausalLMEagle3"]),
        ({"num_hidden_layers": 32}, "num_hidden_layers", 1),
        ({"draft_vocab_size": VOCAB}, "draft_vocab_size", DRAFT_VOCAB),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", False),
        ({"target_hidden_size": None}, "target_hidden_size", ...),
        ({"model_type": None}, "model_type", "llama"),
    ],
)
def test_config_repairs(
    change: dict[str, object], key: str, value: object, target: Path, tmp_path: Path
) -> None:
    model = eagle3()
    model.config |= change
    draft = model.write(tmp_path / "draft")
    done = convert(target, draft, tmp_path / "out")
    assert bad(done.findings) == set()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop(key, ...) == value
    assert config == {k: v for k, v in model.config.items() if k != key}
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (draft / WEIGHTS).read_bytes()


def test_missing_head_of_a_full_vocabulary_is_borrowed(target: Path, tmp_path: Path) -> None:
    model = eagle3()
    for name in ("d2t", "t2d", "lm_head.weight"):
        del model.tensors[name]
    model.config["draft_vocab_size"] = VOCAB
    done = convert(target, model.write(tmp_path / "draft"), tmp_path / "out")
    assert bad(done.findings) == set()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] is None


def test_what_is_no_part_of_the_draft_is_left_out(tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    (draft / "training_state.pt").write_bytes(b"optimizer")
    (draft / "runs").mkdir()
    (draft / "README.md").write_text("kept")
    done = convert(None, draft, tmp_path / "out")
    assert done.left_out == ("runs", "training_state.pt")
    assert set(contents(tmp_path / "out")) == {"README.md", "config.json", WEIGHTS}


def test_links_become_files(tmp_path: Path) -> None:
    blobs = foreign().write(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", WEIGHTS):
        (snapshot / name).symlink_to(blobs / name)
    convert(None, snapshot, tmp_path / "out")
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert not (tmp_path / "blobs" / "out").exists()


def test_tensors_stream_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_spec_ext.ops.check_draft import tensors

    monkeypatch.setattr(tensors, "CHUNK", 7)
    (tmp_path / "file").write_bytes(bytes(range(40)))
    pieces = list(FileRange(tmp_path / "file", 3, 20).chunks())
    assert max(map(len, pieces)) == 7
    assert b"".join(pieces) == bytes(range(3, 23))
    with pytest.raises(CheckpointError, match="ends inside a tensor"):
        list(FileRange(tmp_path / "file", 30, 20).chunks())


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "empty", "file", "dangling link"])
def test_out_that_exists(kind: str, tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    out = tmp_path / "out"
    if kind == "directory":
        eagle3().write(out)
    elif kind == "empty":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="out exists; name a directory that does not"):
        convert(None, draft, out)
    assert contents(tmp_path) == before


def test_out_in_a_bad_place(tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="inside the checkpoint"):
        convert(None, draft, draft / "out")
    with pytest.raises(CheckpointError, match="make it first"):
        convert(None, draft, tmp_path / "no" / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft"]


def test_second_run_refuses(tmp_path: Path) -> None:
    draft = foreign().write(tmp_path / "draft")
    convert(None, draft, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists"):
        convert(None, draft, tmp_path / "out")
    done = convert(None, tmp_path / "out", tmp_path / "again")
    assert done.edits == ()
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def lacking_a_weight() -> Model:
    model = foreign()
    del model.tensors["norm.weight"]
    return model


def both_layouts() -> Model:
    model = foreign()
    model.tensors["midlayer.hidden_norm.weight"] = Spec("BF16", (HIDDEN,))
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: speculators(norm_before_residual=True), "norm-before-residual"),
        (lambda: speculators(norm_before_residual=None), "norm-before-residual"),
        (lacking_a_weight, "tensors-random"),
    ],
)
def test_what_cannot_be_repaired(model: object, why: str, target: Path, tmp_path: Path) -> None:
    assert callable(model)
    draft = model().write(tmp_path / "draft")
    with pytest.raises(ConversionRefused, match="cannot repair") as caught:
        convert(target, draft, tmp_path / "out")
    assert [finding.id for finding in caught.value.findings] == [why]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft", "target"]


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    draft = both_layouts().write(tmp_path / "draft")
    with pytest.raises(ConversionRefused, match=r"become midlayer\.hidden_norm"):
        convert(None, draft, tmp_path / "out")


def test_unclear_files(tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    write_safetensors(draft / "extra.safetensors", {"norm.weight": Spec("BF16", (HIDDEN,))})
    with pytest.raises(ConversionRefused, match="not clear which files"):
        convert(None, draft, tmp_path / "out")


def test_unknown_type_is_copied_but_never_rewritten(tmp_path: Path) -> None:
    for name, model in (("clean", eagle3()), ("foreign", foreign())):
        draft = model.write(tmp_path / name)
        data = (draft / WEIGHTS).read_bytes()
        changed = data.replace(b'"dtype":"BOOL"', b'"dtype":"B2L8"')
        (draft / WEIGHTS).write_bytes(changed)
    convert(None, tmp_path / "clean", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(tmp_path / "clean")
    with pytest.raises(CheckpointError, match="t2d is B2L8, a type that this tool does not know"):
        convert(None, tmp_path / "foreign", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = eagle3().write(tmp_path / "draft")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"0\.0 GB free"):
        convert(None, draft, tmp_path / "out")


# --- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_interrupted(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = foreign().write(tmp_path / "draft")
    before = contents(draft)

    def fail(self: Literal) -> Iterator[bytes]:
        yield self.data[:8]
        raise error

    monkeypatch.setattr(Literal, "chunks", fail)
    with pytest.raises(type(error)):
        convert(None, draft, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]
    assert contents(draft) == before


def test_the_result_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not do what was planned must not get past the check of its result."""
    draft = foreign().write(tmp_path / "draft")
    write = module._write
    monkeypatch.setattr(module, "_write", lambda source, planned, out: write(source, source, out))
    with pytest.raises(ConversionRefused, match="still not load") as caught:
        convert(None, draft, tmp_path / "out")
    assert {finding.id for finding in caught.value.findings} == {"layout-layers0", "d2t-absolute"}
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]


def test_out_that_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = eagle3().write(tmp_path / "draft")
    write = module._write

    def slow(*args: object) -> object:
        done = write(*args)  # type: ignore[arg-type]
        (tmp_path / "out").mkdir()
        return done

    monkeypatch.setattr(module, "_write", slow)
    with pytest.raises(CheckpointError, match="meanwhile"):
        convert(None, draft, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft", "out"]
    assert not any((tmp_path / "out").iterdir())
