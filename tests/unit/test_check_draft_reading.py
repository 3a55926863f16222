"""Reading checkpoints: every broken file gets one clear error, and weights are never read."""

from __future__ import annotations

import json
import os
import pickletools
import random
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from draft_checkpoints import DRAFT_VOCAB, Model, Spec, eagle3, longs, write_safetensors

from sglang_spec_ext.compat.releases import RELEASES, describe, nearest, span
from sglang_spec_ext.ops.check_draft import CheckpointError, ServerOptions, check
from sglang_spec_ext.ops.check_draft.checkpoint import read_checkpoint
from sglang_spec_ext.ops.check_draft.config import ModelConfig
from sglang_spec_ext.ops.check_draft.safetensors_file import read_header
from sglang_spec_ext.ops.check_draft.server import parse_command_line
from sglang_spec_ext.ops.check_draft.token_map import Reading, TokenMap

WEIGHTS = "model.safetensors"


def raw(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# --- safetensors --------------------------------------------------------------------------------


def test_header_is_read_as_written(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / WEIGHTS, {"a": longs([3, 4]), "b": Spec("BF16", (0, 7))}, {"k": "v"}
    )
    metadata, tensors = read_header(tmp_path / WEIGHTS)
    assert metadata == {"k": "v"}
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in tensors] == [
        ("a", "I64", (2,), 16),
        ("b", "BF16", (0, 7), 0),
    ]
    assert tensors[0].integers() == [3, 4]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "no valid JSON"),
        (b"[" * 200_000, b"", "no valid JSON"),
        (b"\xff\xfe{}", b"", "no valid JSON"),
        ([], b"", "no JSON object"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ({"a": 7}, b"", "'a' is malformed"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "malformed"),
        ({"a": entry("F32", [-1], 0, 4)}, b"1234", "malformed"),
        ({"a": entry("F32", [True], 0, 4)}, b"1234", "malformed"),
        ({"a": entry("F32", [1], 4, 0)}, b"1234", "malformed"),
        ({"a": entry("F32", [3], 0, 4)}, b"1234", "is 12 bytes, but the header gives it 4"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234", "overlap"),
        ({"a": entry("F32", [1], 4, 8)}, b"12345678", "gaps"),
        ({"a": entry("F32", [2], 0, 8)}, b"1234", "truncated"),
        ({"a": entry("F32", [1], 0, 4)}, b"12345", "truncated or"),
        (b'{"a":' + json.dumps(entry("U8", [0], 0, 0)).encode() + b',"a":{}}', b"", "'a' appears"),
    ],
)
def test_bad_header(header: object, data: bytes, says: str, tmp_path: Path) -> None:
    file = raw(tmp_path / WEIGHTS, header, data)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 40])
def test_no_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match="safetensors file"):
        read_header(tmp_path / WEIGHTS)


def test_huge_header_length_is_not_believed(tmp_path: Path) -> None:
    file = raw(tmp_path / WEIGHTS, b"{}", length=1 << 40)
    with pytest.raises(CheckpointError, match="claims 1099511627776 bytes"):
        read_header(file)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(tmp_path / WEIGHTS)


def test_unknown_dtype_is_no_reason_to_refuse(tmp_path: Path) -> None:
    file = raw(tmp_path / WEIGHTS, {"a": entry("F2_NEW", [8], 0, 2)}, b"12")
    assert read_header(file)[1][0].dtype == "F2_NEW"


def test_damaged_files_raise_nothing_else(tmp_path: Path) -> None:
    """Cut and flip at random: a check or one clear error, never a traceback."""
    draft = eagle3().write(tmp_path / "draft")
    file = draft / WEIGHTS
    whole = file.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    chance = random.Random(7)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        if chance.random() < 0.4:
            del damaged[chance.randrange(len(damaged)) :]
        else:
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(header_end)] = chance.randrange(256)
        file.write_bytes(damaged)
        try:
            check(None, draft)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
            refused += 1
    assert refused > 200


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A sparse file of 256 GiB: reading its data would not end within the test."""
    draft = Model(eagle3().config).write(tmp_path / "draft")
    size = 1 << 38
    file = raw(draft / WEIGHTS, {"big": entry("U8", [size], 0, size)})
    try:
        os.truncate(file, file.stat().st_size + size)
    except OSError:
        pytest.skip("no sparse files here")
    assert read_checkpoint(draft).tensors["big"].nbytes == size


# --- directories --------------------------------------------------------------------------------


def test_hub_snapshot_of_links(tmp_path: Path) -> None:
    blobs = eagle3().write(tmp_path / "hub" / "blobs")
    snapshot = tmp_path / "hub" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, name in enumerate(["config.json", WEIGHTS]):
        (blobs / name).rename(blobs / f"blob{number}")
        (snapshot / name).symlink_to(f"../../blobs/blob{number}")
    checkpoint = read_checkpoint(snapshot)
    assert set(checkpoint.metadata) == {WEIGHTS}
    assert {tensor.file for tensor in checkpoint.tensors.values()} == {WEIGHTS}
    with pytest.raises(CheckpointError, match=f"name its snapshot: {snapshot}"):
        read_checkpoint(tmp_path / "hub")
    (blobs / "blob1").unlink()
    with pytest.raises(CheckpointError, match="run the download again"):
        read_checkpoint(snapshot)
    (blobs / "blob0").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: a link to a file that is not here"):
        read_checkpoint(snapshot)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "is empty"),
        ({"draft.gguf": ""}, "holds GGUF"),
        ({"params.json": "{}"}, "Mistral's own format"),
        ({"readme": ""}, "no config.json"),
        ({"config.json": "{"}, "no valid JSON"),
        ({"config.json": "[]"}, "must be a JSON object"),
        ({"config.json": '{"a": 1, "a": 2}'}, "'a' appears twice"),
        ({"config.json": "{}"}, "no .*safetensors and no pytorch_model"),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "needs a weight_map"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": '{"weight_map": {"a": "../b.safetensors"}}',
            },
            "files of this directory",
        ),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": ["b"]}}'},
            "files of this directory",
        ),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": ""}}'},
            "files of this directory",
        ),
    ],
)
def test_bad_directory(files: dict[str, str], says: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_checkpoint(tmp_path)


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hf download"):
        read_checkpoint(tmp_path / "nowhere")
    file = tmp_path / WEIGHTS
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        read_checkpoint(file)


def test_config_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match="no UTF-8"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, is '64'"),
        ({"hidden_size": 0}, "hidden_size must be"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"vocab_size": None}, "vocab_size must be"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures must be a list"),
        ({"eagle_config": []}, None),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}},
            "must be a list of layer numbers",
        ),
        ({"max_position_embeddings": "x"}, None),
    ],
)
def test_impossible_config_values(
    change: dict[str, object], says: str | None, tmp_path: Path
) -> None:
    model = eagle3()
    model.config |= change
    draft = model.write(tmp_path / "draft")
    if says is None:
        check(None, draft)
        return
    with pytest.raises(CheckpointError, match=says):
        check(None, draft)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "model_max_length": 512}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32,
                    "original_max_position_embeddings": 4096,
                },
            },
            131072,
        ),
        ({"text_config": {"max_position_embeddings": 99}}, 99),
        ({}, None),
    ],
)
def test_context_length_as_sglang_derives_it(config: dict[str, object], length: int | None) -> None:
    assert ModelConfig(config, Path("x")).context_length == length


# --- pytorch_model.bin --------------------------------------------------------------------------


def torch_pickle(tensors: dict[str, Spec], extra: bytes = b"") -> bytes:
    """The pickle that torch.save writes for a state dict, spelled out."""
    kinds = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "I64": "LongStorage",
             "F16": "HalfStorage", "BOOL": "BoolStorage"}  # fmt: skip

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    out = b"\x80\x02}(" + extra
    for key, (name, spec) in enumerate(tensors.items()):
        stride, step = [], 1
        for size in reversed(spec.shape):
            stride.insert(0, step)
            step *= size
        out += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage")
        out += b"ctorch\n" + kinds[spec.dtype].encode() + b"\n" + text(str(key)) + text("cpu")
        out += number(step) + b"tQ" + number(0) + numbers(spec.shape) + numbers(tuple(stride))
        out += b"\x89ccollections\nOrderedDict\n)RtR"
    return out + b"u."


def write_bin(file: Path, tensors: dict[str, Spec], pickled: bytes | None = None) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled or torch_pickle(tensors))
        archive.writestr("archive/byteorder", "little")
        for key, (name, spec) in enumerate(tensors.items()):
            archive.writestr(f"archive/data/{key}", spec.content(name))
        archive.writestr("archive/version", "3\n")


def test_torch_file_without_torch(tmp_path: Path) -> None:
    model = eagle3()
    draft = Model(model.config).write(tmp_path / "draft")
    write_bin(draft / "pytorch_model.bin", model.tensors)
    checkpoint = read_checkpoint(draft)
    assert {(t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()} == {
        (name, spec.dtype, spec.shape) for name, spec in model.tensors.items()
    }
    assert len(checkpoint.tensors["d2t"].integers()) == DRAFT_VOCAB
    assert [finding.id for finding in check(None, draft)] == ["no-target"]


def test_file_that_torch_itself_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    draft = Model(eagle3().config).write(tmp_path / "draft")
    state = {"d2t": torch.arange(5), "a": torch.nn.Parameter(torch.ones(2, 3).bfloat16())}
    torch.save(state, draft / "pytorch_model.bin")
    tensors = read_checkpoint(draft).tensors
    assert tensors["d2t"].integers() == [0, 1, 2, 3, 4]
    assert (tensors["a"].dtype, tensors["a"].shape) == ("BF16", (2, 3))
    assert b"".join(tensors["a"].source.chunks()) == b"\x80\x3f" * 6
    torch.save({"a": torch.ones(4, 4).t()}, draft / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="view or cut off; make it a safetensors file"):
        read_checkpoint(draft)
    torch.save(state, draft / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="make it a safetensors file: python -c"):
        read_checkpoint(draft)


def test_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    draft = Model(eagle3().config).write(tmp_path / "draft")
    trap = tmp_path / "ran"
    evil = b"\x80\x02cos\nmkdir\nX" + struct.pack("<I", len(str(trap))) + str(trap).encode()
    pickled = evil + b"\x85R."
    pickletools.dis(pickled, out=open(os.devnull, "w"))  # noqa: SIM115 - it is a valid pickle
    write_bin(draft / "pytorch_model.bin", {}, pickled)
    with pytest.raises(CheckpointError, match=r"asks for os\.mkdir"):
        read_checkpoint(draft)
    assert not trap.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]q\x00.",  # a list
        b"\x80\x02}(X\x01\x00\x00\x00aK\x01u.",  # {"a": 1}
        b"\x80\x02",  # cut off
        b"garbage",
        b"\x80\x02(X\x07\x00\x00\x00storageNNNNtQ.",
    ],
)
def test_other_pickles(pickled: bytes, tmp_path: Path) -> None:
    draft = Model(eagle3().config).write(tmp_path / "draft")
    write_bin(draft / "pytorch_model.bin", {}, pickled)
    with pytest.raises(CheckpointError, match="make it a safetensors file"):
        read_checkpoint(draft)


def test_cut_off_storage(tmp_path: Path) -> None:
    draft = Model(eagle3().config).write(tmp_path / "draft")
    spec = Spec("F32", (8,))
    write_bin(
        draft / "pytorch_model.bin", {"a": Spec("F32", (8,), b"1234")}, torch_pickle({"a": spec})
    )
    with pytest.raises(CheckpointError, match="'a' is a view or cut off"):
        read_checkpoint(draft)


# --- small parts --------------------------------------------------------------------------------


def test_token_map_readings() -> None:
    absolute = (0, 1, 5, 9)
    offsets = (0, 0, 3, 6)
    assert TokenMap(absolute, 10).reading is Reading.ABSOLUTE
    assert TokenMap(absolute, 10).offsets == offsets
    assert TokenMap(offsets, 10).reading is Reading.OFFSETS
    assert TokenMap(offsets, 10).ids == list(absolute)
    assert TokenMap((0, 1, 2), 10).reading is Reading.AMBIGUOUS
    assert TokenMap((0, 1, 2), 10, frozenset({0, 1, 2})).reading is Reading.ABSOLUTE
    assert TokenMap((0, 1, 2), 10, frozenset({0, 2, 4})).reading is Reading.OFFSETS
    assert TokenMap((9, 9, 9), 10).reading is Reading.NONSENSE
    assert TokenMap((9, 8, 0), 10).reading is Reading.ABSOLUTE


def test_releases_in_words() -> None:
    assert describe(RELEASES) == ""
    assert describe(span("0.5.12.post1", "0.5.14")) == "0.5.12.post1-0.5.14"
    assert describe(("0.5.9", "0.5.11", "0.5.23")) == "0.5.9, 0.5.11, 0.5.23"


@pytest.mark.parametrize(
    ("version", "release", "read"),
    [
        ("0.5.9", "0.5.9", True),
        ("0.5.10", "0.5.10.post1", True),
        ("0.5.12.post2.dev7+g1", "0.5.12.post1", True),
        ("v0.5.23rc0", "0.5.23", True),
        ("0.6.0", "0.5.23", False),
    ],
)
def test_nearest_release(version: str, release: str, read: bool) -> None:
    assert nearest(version) == (release, read)


@pytest.mark.parametrize("version", ["0.5.8", "0.4.9.post6", "main", ""])
def test_no_release(version: str) -> None:
    with pytest.raises(ValueError, match=r"older than|no SGLang version"):
        nearest(version)


def test_server_command_line() -> None:
    line = (
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server "
        "--model big --tp 8 --speculative-algo EAGLE3 --speculative-draft-model-path=small "
        "--speculative-draft-model-revision main --context-length 4096 --trust-remote-code "
        "--attention-backend fa3 --quantization fp8 --disable-cuda-graph"
    )
    assert parse_command_line(shlex.split(line), {}) == ServerOptions(
        algorithm="EAGLE3",
        attention_backend="fa3",
        context_length=4096,
        quantization="fp8",
        target="big",
        draft="small",
        allow_longer_context=True,
        disable_cuda_graph=True,
    )


def test_server_environment() -> None:
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    assert parse_command_line([], {name: "True"}).allow_longer_context
    assert not parse_command_line([], {name: "0"}).allow_longer_context


@pytest.mark.parametrize("words", [["--dtype"], ["--context-length", "many"]])
def test_bad_server_command_line(words: list[str]) -> None:
    with pytest.raises(ValueError, match="the server's command line: argument"):
        parse_command_line(words, {})


def test_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; import sglang_spec_ext.ops.check_draft.command; "
        "print({'torch', 'sglang', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_wide_model_is_still_only_headers(tmp_path: Path) -> None:
    """Reading d2t touches its own bytes only: the rest of the file may be a hole."""
    draft = Model(eagle3().config).write(tmp_path / "draft")
    size = 1 << 34
    header = {"d2t": entry("I64", [2], 0, 16), "x": entry("U8", [size], 16, 16 + size)}
    file = raw(draft / WEIGHTS, header, struct.pack("<2q", 5, 6))
    os.truncate(file, file.stat().st_size + size)
    assert read_checkpoint(draft).tensors["d2t"].integers() == [5, 6]
