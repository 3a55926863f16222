"""Every finding, on a checkpoint of a real shape, and none of them on its clean twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from draft_checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    INNER,
    OFFSETS,
    TARGET_IDS,
    VOCAB,
    Model,
    Spec,
    eagle1,
    eagle3,
    kimi_mha_draft,
    kimi_mla_draft,
    kimi_target,
    llama_target,
    longs,
    mask,
    nextn,
    official_eagle3,
    speculators,
    write_safetensors,
)

from sglang_spec_ext.compat.releases import RELEASES, describe
from sglang_spec_ext.ops.check_draft import Finding, FixBy, ServerOptions, Severity, check
from sglang_spec_ext.ops.check_draft.rules import RULES

AUX = "eagle_aux_hidden_state_layer_ids"
BLACKWELL = ServerOptions(attention_backend="trtllm_mla")
ON_FA3 = ServerOptions(draft_attention_backend="fa3")


@dataclass
class Scene:
    """What a case may change before the check."""

    draft: Model
    target: Model
    server: ServerOptions = field(default_factory=ServerOptions)


Change = Callable[[Scene], object]
Start = Callable[[], Scene]


def llama() -> Scene:
    return Scene(eagle3(), llama_target())


def llama_eagle1() -> Scene:
    return Scene(eagle1(), llama_target())


def kimi() -> Scene:
    return Scene(kimi_mha_draft(), kimi_target(), ON_FA3)


def kimi_mla() -> Scene:
    """Clean where the class exists."""
    return Scene(kimi_mla_draft(), kimi_target(), ServerOptions(release="0.5.23"))


def deepseek() -> Scene:
    target = Model(nextn().config)
    return Scene(nextn(), target)


def config(**values: object) -> Change:
    return lambda scene: scene.draft.config.update(values)


def target(**values: object) -> Change:
    return lambda scene: scene.target.config.update(values)


def without(*keys: str) -> Change:
    return lambda scene: [scene.draft.config.pop(key) for key in keys]


def tensor(name: str, spec: Spec) -> Change:
    return lambda scene: scene.draft.tensors.update({name: spec})


def drop(*names: str) -> Change:
    return lambda scene: [scene.draft.tensors.pop(name) for name in names]


def server(**values: object) -> Change:
    def change(scene: Scene) -> None:
        scene.server = scene.server.updated(**values)

    return change


def both(*changes: Change) -> Change:
    return lambda scene: [change(scene) for change in changes]


def rename(old: str, new: str) -> Change:
    def change(scene: Scene) -> None:
        scene.draft.tensors = {
            name.replace(old, new): spec for name, spec in scene.draft.tensors.items()
        }

    return change


def second_layer(scene: Scene) -> None:
    """Two decoder layers, as 0.5.12.post1 and later can have them; the second is one wide."""
    rename("midlayer", "layers.0")(scene)
    for name, spec in list(scene.draft.tensors.items()):
        if name.startswith("layers.0."):
            wide = spec.shape[1:] == (2 * HIDDEN,)
            shape = (spec.shape[0], HIDDEN) if wide else spec.shape
            scene.draft.tensors[name.replace("layers.0", "layers.1")] = Spec("BF16", shape)
    scene.draft.config["num_hidden_layers"] = 2


def five_states(scene: Scene) -> None:
    tensor("fc.weight", Spec("BF16", (HIDDEN, 5 * HIDDEN)))(scene)
    config(eagle_config={"use_aux_hidden_state": True, AUX: [1, 8, 15, 22, 28]})(scene)


def wider_target(scene: Scene) -> None:
    """A target twice as wide, for which the draft was made."""
    target(hidden_size=2 * HIDDEN)(scene)
    tensor("fc.weight", Spec("BF16", (HIDDEN, 6 * HIDDEN)))(scene)
    tensor("embed_tokens.weight", Spec("BF16", (VOCAB, HIDDEN)))(scene)


def full_vocabulary(scene: Scene) -> None:
    """The draft's vocabulary is the target's, its lm_head its own."""
    drop("d2t", "t2d")(scene)
    config(draft_vocab_size=VOCAB)(scene)
    tensor("lm_head.weight", Spec("BF16", (VOCAB, HIDDEN)))(scene)


def tokenizers(**other: int) -> Change:
    vocabulary = {"a": 0, "b": 1}

    def change(scene: Scene) -> None:
        for model, vocab in ((scene.target, vocabulary), (scene.draft, vocabulary | other)):
            model.files["tokenizer.json"] = json.dumps({"model": {"vocab": vocab}})

    return change


@dataclass(frozen=True)
class Case:
    """``change`` makes ``id`` appear, together with ``also`` and no other error or warning."""

    id: str
    start: Start
    change: Change
    also: tuple[str, ...] = ()
    releases: str | None = None  # as the report names them, where it is not all
    says: str = ""


CASES = [
    # architecture
    Case("arch-target-class", llama, config(architectures=["LlamaForCausalLM"]),
         says="the target's class"),
    Case("arch-target-class", llama, config(architectures=["Qwen3ForCausalLM"]),
         says="a full model"),
    Case("arch-target-class", llama, config(architectures=["DeepseekV3ForCausalLM"])),
    Case("arch-target-class", llama_eagle1, config(architectures=["LlamaForCausalLM"])),
    Case("arch-missing", llama, without("architectures")),
    Case("arch-unknown", llama, config(architectures=["Eagle3DraftModel"])),
    Case("arch-unknown", llama, config(architectures=["Eagle3LlamaForCausalLM"])),
    Case("arch-keys", llama, config(architectures=["LlamaForCausalLMEagle"])),
    Case("arch-keys", kimi_mla, config(architectures=["LlamaForCausalLMEagle3"]), says="MLA"),
    Case("arch-release", kimi_mla, server(release="0.5.11"), releases="0.5.9-0.5.11"),
    Case("not-a-draft", llama, both(config(architectures=["LlamaForCausalLM"]), lambda scene:
         setattr(scene.draft, "tensors", {"model.embed_tokens.weight":
                                          Spec("BF16", (VOCAB, HIDDEN))}))),
    Case("nextn-weights-missing", deepseek,
         drop(*(n for n in nextn().tensors if ".61." in n))),
    Case("class-not-checked", deepseek, lambda scene: None),
    Case("model-type-missing", llama, without("model_type")),
    Case("hidden-act", llama, config(hidden_act="gelu")),
    Case("num-hidden-layers", llama, config(num_hidden_layers=32), says="the file has 1"),
    Case("num-hidden-layers", llama, second_layer, releases="0.5.9-0.5.11"),
    Case("config-nested", llama, lambda scene: setattr(scene, "draft", speculators()),
         also=("arch-unknown", "layout-layers0")),
    Case("config-nested", llama, both(lambda scene: setattr(scene, "draft", speculators()),
         config(speculators_model_type="mtp")), also=("arch-unknown", "layout-layers0")),
    Case("norm-before-residual", llama, config(norm_before_residual=True)),
    Case("norm-before-residual", llama,
         lambda scene: setattr(scene, "draft", speculators(norm_before_residual=None)),
         also=("config-nested", "arch-unknown", "layout-layers0"), says="absent"),
    Case("algorithm", llama, server(algorithm="EAGLE")),
    Case("algorithm", llama_eagle1, server(algorithm="eagle3")),
    Case("algorithm", deepseek, server(algorithm="EAGLE3")),
    # files and tensors
    Case("layout-layers0", llama, rename("midlayer", "layers.0"), releases="0.5.9-0.5.11"),
    Case("layout-layers0", llama, rename("midlayer", "model.layers.0"), releases="0.5.9-0.5.11"),
    Case("tensors-random", llama, drop("midlayer.mlp.up_proj.weight", "norm.weight"),
         says="norm.weight, midlayer.mlp.up_proj.weight"),
    Case("tensors-random", llama_eagle1, config(bias=True), says="q_proj.bias"),
    Case("tensors-random", llama, config(fc_norm=True), also=("fc-norm-release",),
         releases="0.5.12.post1-0.5.23"),
    Case("tensors-skipped", llama,
         tensor("midlayer.self_attn.q_norm.weight", Spec("BF16", (16,)))),
    Case("tensors-skipped", llama,
         tensor("midlayer.self_attn.q_proj.bias", Spec("BF16", (HIDDEN,)))),
    Case("tensors-skipped", llama, rename("lm_head", "model.lm_head"),
         also=("lm-head-missing",)),
    Case("tensors-skipped", llama_eagle1, rename("fc.", "model.fc."),
         also=("tensors-random", "fc-bias-random")),
    Case("tensors-skipped", llama_eagle1,
         tensor("layers.0.input_layernorm.weight", Spec("BF16", (HIDDEN,)))),
    Case("tensors-unused", llama, both(
        tensor("verifier_lm_head.weight", Spec("BF16", (VOCAB, HIDDEN))),
        tensor("midlayer.self_attn.rotary_emb.inv_freq", Spec("F32", (8,))))),
    Case("tensor-shape", llama, config(intermediate_size=2 * INNER)),
    Case("tensor-shape", llama, config(num_key_value_heads=4)),
    Case("qkv-input-width", llama,
         tensor("midlayer.self_attn.k_proj.weight", Spec("BF16", (32, HIDDEN)))),
    Case("fc-bias-random", llama_eagle1, drop("fc.bias")),
    Case("embed-replaced", llama,
         tensor("embed_tokens.weight", Spec("BF16", (VOCAB, HIDDEN)))),
    Case("embed-missing", llama, both(wider_target, config(target_hidden_size=2 * HIDDEN),
                                      drop("embed_tokens.weight"))),
    # captured states
    Case("fc-width", llama, tensor("fc.weight", Spec("BF16", (HIDDEN, 5 * HIDDEN))),
         says="the file has 5"),
    Case("fc-width", llama_eagle1, tensor("fc.weight", Spec("BF16", (HIDDEN, 3 * HIDDEN)))),
    Case("fc-states-release", llama, five_states, also=("aux-layer-ids-graph",),
         releases="0.5.9-0.5.11"),
    Case("fc-states", llama, both(five_states, config(num_aux_hidden_states=3)),
         also=("fc-width", "aux-layer-ids-graph")),
    Case("fc-unused", llama, config(eagle_config={"use_aux_hidden_state": False})),
    Case("target-hidden", llama, wider_target),
    Case("target-hidden", llama_eagle1, target(hidden_size=2 * HIDDEN)),
    Case("target-hidden-size-null", llama, config(target_hidden_size=None)),
    Case("aux-layer-ids-place", llama, config(**{AUX: [2, 12, 29]})),
    Case("aux-layer-ids-place", kimi, config(**{AUX: [3, 30, 58]})),
    Case("aux-layer-ids-place", llama, config(**{AUX: [0, 12, 29]})),
    Case("aux-layer-ids-range", llama,
         config(eagle_config={AUX: [1, 15, 31]}), also=("aux-layer-ids-graph",)),
    Case("aux-layer-ids-shift", kimi, config(eagle_config={AUX: [2, 30, 58]}),
         also=("aux-layer-ids-graph",)),
    Case("aux-layer-ids-graph", llama, config(eagle_config={AUX: [1, 10, 28]}),
         releases="0.5.9-0.5.10.post1"),
    # EAGLE-3.1
    Case("fc-norm-release", llama, both(config(fc_norm=True), *(
        tensor(f"fc_norm.{i}.weight", Spec("BF16", (HIDDEN,))) for i in range(3))),
        releases="0.5.9-0.5.11"),
    Case("fc-norm-release", llama, both(config(use_aux_norm=True), *(
        tensor(f"aux_norm_{part}.weight", Spec("BF16", (HIDDEN,)))
        for part in ("low", "mid", "high"))), releases="0.5.9-0.5.11"),
    Case("norm-output-release", llama, config(norm_output=True), releases="0.5.9-0.5.11"),
    Case("norm-before-fc-release", llama, both(config(norm_before_fc=True),
         tensor("input_norm.weight", Spec("BF16", (3 * HIDDEN,)))), releases="0.5.9-0.5.16"),
    Case("norm-before-fc-release", kimi_mla, both(config(norm_before_fc=True),
         tensor("input_norm.weight", Spec("BF16", (3 * HIDDEN,))))),
    Case("eagle31-flag", llama, both(*(
        tensor(f"fc_norm.{i}.weight", Spec("BF16", (HIDDEN,))) for i in range(3))),
        also=("fc-norm-release",)),
    # lm_head and vocabulary
    Case("draft-vocab-size-missing", llama, without("draft_vocab_size")),
    Case("lm-head-tied", llama, config(tie_word_embeddings=True), also=("d2t-borrowed-head",)),
    Case("lm-head-missing", llama, drop("lm_head.weight")),
    Case("lm-head-rows", llama, config(draft_vocab_size=DRAFT_VOCAB + 1)),
    Case("lm-head-ignored", llama, both(full_vocabulary, config(draft_vocab_size=None))),
    Case("lm-head-borrowed", llama, both(full_vocabulary, config(draft_vocab_size=None),
                                         drop("lm_head.weight"))),
    Case("lm-head-borrowed-width", llama, both(
        wider_target, config(target_hidden_size=2 * HIDDEN), full_vocabulary,
        config(draft_vocab_size=None), drop("lm_head.weight"))),
    Case("d2t-missing", llama, drop("d2t")),
    Case("d2t-borrowed-head", llama, both(config(draft_vocab_size=None), drop("lm_head.weight"))),
    Case("d2t-dtype", llama, tensor("d2t", Spec("F32", (DRAFT_VOCAB,)))),
    Case("d2t-shape", llama, both(tensor("d2t", longs(OFFSETS[:-3])), drop("t2d"))),
    Case("d2t-shape", llama, tensor("d2t", Spec("I64", (1, DRAFT_VOCAB)))),
    Case("d2t-absolute", llama, tensor("d2t", longs(TARGET_IDS))),
    Case("d2t-absolute", llama, both(tensor("d2t", longs(TARGET_IDS, "I32")), drop("t2d"))),
    Case("d2t-absolute", llama, both(tensor("d2t", longs(TARGET_IDS[::-1])), drop("t2d"))),
    Case("d2t-ambiguous", llama, both(drop("t2d"),
                                      tensor("d2t", longs([2 * n for n in range(DRAFT_VOCAB)])))),
    Case("d2t-range", llama, both(tensor("d2t", longs([*OFFSETS[:-1], OFFSETS[-1] + 50])),
                                  drop("t2d"))),
    Case("d2t-range", llama, both(tensor("d2t", longs([-1, *OFFSETS[1:]])), drop("t2d"))),
    Case("d2t-duplicates", llama, both(tensor("d2t", longs([*OFFSETS[:-1], OFFSETS[-2] - 1])),
                                       drop("t2d"))),
    Case("d2t-zero", llama, both(tensor("d2t", longs([0] * DRAFT_VOCAB)), drop("t2d"))),
    Case("d2t-t2d", llama, tensor("t2d", mask([*TARGET_IDS[:-1], 299]))),
    Case("t2d-size", llama, tensor("t2d", mask(TARGET_IDS, VOCAB + 4))),
    Case("token-map", llama, server(token_map="map.pt")),
    Case("vocab-size", llama, both(full_vocabulary, target(vocab_size=VOCAB + 20)),
         also=("d2t-missing",)),
    Case("vocab-size", llama_eagle1, target(vocab_size=VOCAB + 20)),
    Case("vocab-size", llama, target(vocab_size=TARGET_IDS[-1]), also=("d2t-range",)),
    Case("vocab-size-padded", llama, target(vocab_size=VOCAB + 20)),
    Case("tokenizer", llama, tokenizers(b=2, c=3), says="3 tokens, the target's 2; 2 of them"),
    # serving
    Case("context-length", llama, config(max_position_embeddings=2048)),
    Case("context-length", llama, both(config(max_position_embeddings=2048),
                                       server(context_length=4096))),
    Case("context-length", llama, without("max_position_embeddings"), says="allows 2048"),
    Case("context-length-stretched", llama, both(config(max_position_embeddings=2048),
                                                 server(allow_longer_context=True))),
    Case("rope-differs", llama, config(rope_theta=10000.0), says="the target's 500000"),
    Case("rope-differs", llama, config(rope_scaling={"rope_type": "yarn", "factor": 8.0})),
    Case("rope-unstated", llama, without("rope_theta", "rope_scaling")),
    Case("rope-parameters-release", llama, both(
        without("rope_theta", "rope_scaling"),
        config(rope_parameters={"rope_theta": 500000.0,
                                **llama_target().config["rope_scaling"]})), releases="0.5.9"),
    Case("mla-draft-backend", kimi, server(draft_attention_backend="flashmla")),
    Case("mla-draft-backend", kimi, lambda scene: setattr(scene, "server", BLACKWELL)),
    Case("mla-draft-backend", kimi, both(
        lambda scene: setattr(scene, "server", ServerOptions()),
        lambda scene: scene.target.config["text_config"].update(index_topk=2048))),
    Case("mla-draft-backend-unset", kimi, lambda scene: setattr(scene, "server", ServerOptions())),
    Case("dtype", llama, config(torch_dtype="float16")),
    Case("dtype", llama, without("torch_dtype"), says="float16"),
    Case("dtype-stored", llama, server(dtype="float16")),
    Case("quantised-draft", llama, config(quantization_config={"quant_method": "fp8"})),
    Case("quantised-without-config", llama,
         tensor("midlayer.mlp.up_proj.weight", Spec("F8_E4M3", (INNER, HIDDEN)))),
    Case("quantised-fc", llama, both(
        config(quantization_config={"quant_method": "fp8"}),
        tensor("fc.weight", Spec("F8_E4M3", (HIDDEN, 3 * HIDDEN))))),
    Case("quantisation-inherited", llama, server(quantization="modelopt_fp4")),
]  # fmt: skip


# Findings about files, which a Model cannot have; their tests are further down.
FILES = {"shard-missing", "tensor-misplaced", "tensor-duplicated", "file-unlisted"}


def run(scene: Scene, path: Path) -> list[Finding]:
    return check(scene.target.write(path / "target"), scene.draft.write(path / "draft"),
                 scene.server)  # fmt: skip


def bad(findings: list[Finding]) -> set[str]:
    return {finding.id for finding in findings if finding.severity is not Severity.NOTE}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_finding_and_its_clean_twin(case: Case, tmp_path: Path) -> None:
    twin = case.start()
    clean = run(twin, tmp_path / "twin")
    assert bad(clean) == set()
    scene = case.start()
    case.change(scene)
    findings = run(scene, tmp_path / "changed")
    mine = [finding for finding in findings if finding.id == case.id]
    assert len(mine) == 1, findings
    severity = next(rule.severity for rule in RULES if rule.id == case.id)
    assert mine[0].severity is severity
    assert mine[0].fix or severity is Severity.NOTE
    assert bad(findings) - {case.id} == set(case.also), findings
    assert case.says in mine[0].message
    assert describe(mine[0].releases) == (case.releases or "")


@pytest.mark.parametrize(
    "options", [ServerOptions(disable_cuda_graph=True), ServerOptions(plugin=True)]
)
def test_no_graphs_or_ours_capture_the_drafts_layers(
    options: ServerOptions, tmp_path: Path
) -> None:
    scene = llama()
    config(eagle_config={AUX: [1, 10, 28]})(scene)
    assert bad(run(scene, tmp_path / "without")) == {"aux-layer-ids-graph"}
    scene.server = options
    assert bad(run(scene, tmp_path / "with")) == set()


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} - {"aux-layer-ids-unchecked"} - FILES == {
        case.id for case in CASES
    }


def test_rule_ids_are_unique() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)


# --- findings about files ----------------------------------------------------------------------


def sharded(path: Path, model: Model) -> Path:
    """The model in two files, as large ones are stored."""
    names = list(model.tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    Model(model.config).write(path)
    for file, mine in parts.items():
        write_safetensors(path / file, {name: model.tensors[name] for name in mine})
    weight_map = {name: file for file, mine in parts.items() for name in mine}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", eagle3())
    assert bad(check(llama_target().write(tmp_path / "target"), draft)) == set()


def test_missing_shard(tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", eagle3())
    (draft / "model-00002-of-00002.safetensors").unlink()
    findings = check(None, draft)
    assert bad(findings) == {"shard-missing"}
    assert "model-00002-of-00002.safetensors" in findings[0].message


def test_file_outside_the_index(tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", eagle3())
    write_safetensors(draft / "old.safetensors", {"fc.weight": Spec("BF16", (HIDDEN, HIDDEN))})
    assert bad(check(None, draft)) == {"file-unlisted"}


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    draft = sharded(tmp_path / "draft", eagle3())
    index = draft / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["fc.bias"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert bad(check(None, draft)) == {"tensor-misplaced"}


def test_tensor_in_two_files(tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    write_safetensors(draft / "extra.safetensors", {"norm.weight": Spec("BF16", (HIDDEN,))})
    assert bad(check(None, draft)) == {"tensor-duplicated"}


def test_mistral_copy_beside_the_weights_is_ignored_as_sglang_does(tmp_path: Path) -> None:
    draft = eagle3().write(tmp_path / "draft")
    write_safetensors(draft / "consolidated.safetensors", {"wq": Spec("BF16", (1,))})
    assert bad(check(None, draft)) == set()


# --- with and without a target, for one release and for all -------------------------------------


def test_without_target_says_what_was_left_out(tmp_path: Path) -> None:
    findings = check(None, eagle3().write(tmp_path / "draft"))
    assert [finding.id for finding in findings] == ["no-target"]
    for rule in RULES:
        assert (rule.id in findings[0].message) == rule.needs_target


def test_misplaced_layer_ids_without_target(tmp_path: Path) -> None:
    model = eagle3()
    model.config[AUX] = [2, 16, 29]
    draft = model.write(tmp_path / "draft")
    assert bad(check(None, draft)) == {"aux-layer-ids-unchecked"}
    # With the target: these are its default layers, as vLLM and SGLang count them alike.
    assert bad(check(llama_target().write(tmp_path / "target"), draft)) == set()


def test_misplaced_layer_ids_are_shifted(tmp_path: Path) -> None:
    model = eagle3()
    model.config[AUX] = [2, 12, 29]
    findings = check(llama_target().write(tmp_path / "target"), model.write(tmp_path / "draft"))
    assert "[1, 11, 28]" in findings[0].fix


@pytest.mark.parametrize("release", RELEASES)
def test_one_release_only(release: str, tmp_path: Path) -> None:
    model = eagle3(layer="layers.0")
    findings = check(None, model.write(tmp_path / "draft"), ServerOptions(release=release))
    old = release in ("0.5.9", "0.5.10.post1", "0.5.11")
    assert bad(findings) == ({"layout-layers0"} if old else set())


def test_unknown_newer_release_is_judged_as_the_newest(tmp_path: Path) -> None:
    draft = eagle3(layer="layers.0").write(tmp_path / "draft")
    findings = check(None, draft, ServerOptions(release="0.6.1"))
    assert {finding.id for finding in findings} == {"release-unknown", "no-target"}


# --- whole checkpoints --------------------------------------------------------------------------


def test_official_eagle3_checkpoint(tmp_path: Path) -> None:
    target = llama_target().write(tmp_path / "target")
    draft = official_eagle3().write(tmp_path / "draft")
    findings = check(target, draft)
    assert bad(findings) == {"arch-target-class", "context-length", "dtype"}
    assert "rope-unstated" in {finding.id for finding in findings}
    served = ServerOptions(dtype="float16", allow_longer_context=True, algorithm="EAGLE3")
    assert bad(check(target, draft, served)) == {"arch-target-class", "context-length-stretched"}


def test_multimodal_target_is_read_through_its_text_config(tmp_path: Path) -> None:
    scene = kimi()
    assert bad(run(scene, tmp_path)) == set()
    scene.target.config["text_config"]["hidden_size"] = 2 * HIDDEN
    assert bad(run(scene, tmp_path / "wider")) == {"target-hidden"}


def test_errors_come_first(tmp_path: Path) -> None:
    scene = llama()
    both(config(torch_dtype="float16"), drop("t2d"), config(rope_theta=1.0))(scene)
    severities = [finding.severity for finding in run(scene, tmp_path)]
    assert severities == sorted(severities)
    assert set(severities) == set(Severity)


def test_shipped_pair(tmp_path: Path) -> None:
    models = Path(__file__).parents[2] / "testbed" / "models"
    if not (models / "draft" / "config.json").exists():
        pytest.skip("the test bed's models are not built")
    newest = ServerOptions(release=RELEASES[-1], algorithm="EAGLE3")
    assert bad(check(models / "target", models / "draft", newest)) == set()


# --- what is right must not be called wrong -----------------------------------------------------


@pytest.mark.parametrize(
    ("start", "change"),
    [
        (kimi_mla, server(attention_backend="trtllm_mla")),
        (llama, server(attention_backend="flashmla")),
        (kimi, server(attention_backend="trtllm_mla")),  # the draft's own flag decides
        (llama, server(quantization="fp8")),
        (llama, server(quantization="modelopt_fp4", draft_quantization="unquant")),
        (llama, server(context_length=131072, dtype="bfloat16", algorithm="eagle3")),
        (llama_eagle1, server(algorithm="NEXTN")),
        (deepseek, server(algorithm="EAGLE")),
        (llama, config(eagle_config={AUX: [1, 15, 28]})),  # the default layers, stated
        (llama, config(**{AUX: [2, 16, 29]})),  # the same as vLLM counts them
        (llama, config(norm_before_residual=False)),
        (llama, rename("midlayer", "model.midlayer")),
        (llama, both(wider_target, config(target_hidden_size=2 * HIDDEN))),
        (llama, both(full_vocabulary, config(draft_vocab_size=None), drop("lm_head.weight"))),
        (llama, full_vocabulary),
        (llama, tokenizers()),
    ],
)
def test_good_variants(start: Start, change: Change, tmp_path: Path) -> None:
    scene = start()
    change(scene)
    assert bad(run(scene, tmp_path)) == set()


def test_fused_projections_are_understood(tmp_path: Path) -> None:
    scene = llama()
    for part in ("q", "k", "v"):
        del scene.draft.tensors[f"midlayer.self_attn.{part}_proj.weight"]
    fused = Spec("BF16", (2 * HIDDEN, 2 * HIDDEN))
    tensor("midlayer.self_attn.qkv_proj.weight", fused)(scene)
    assert bad(run(scene, tmp_path)) == set()


def test_packed_weights_of_a_quantised_draft_are_understood(tmp_path: Path) -> None:
    scene = llama()
    config(quantization_config={"quant_method": "awq"})(scene)
    for name in list(scene.draft.tensors):
        if name.endswith("_proj.weight"):
            del scene.draft.tensors[name]
            for kind in ("qweight", "qzeros", "scales"):
                tensor(name.replace("weight", kind), Spec("I32", (4, 4)))(scene)
    assert bad(run(scene, tmp_path)) == set()


@pytest.mark.parametrize(
    ("ids", "fix_by"), [([2, 30, 57], FixBy.CONVERT), ([3, 30, 58], FixBy.AUTHOR)]
)
def test_layer_ids_of_a_deepseek_target_are_shifted_only_where_all_releases_agree(
    ids: list[int], fix_by: FixBy, tmp_path: Path
) -> None:
    scene = kimi()
    config(**{AUX: ids})(scene)
    mine = [f for f in run(scene, tmp_path) if f.id == "aux-layer-ids-place"]
    assert [f.fix_by for f in mine] == [fix_by]
    assert bool(mine[0].edits) == (fix_by is FixBy.CONVERT)


def test_same_tokenizer_written_differently(tmp_path: Path) -> None:
    scene = llama()
    tokenizers()(scene)
    scene.draft.files["tokenizer.json"] = json.dumps(
        {"model": {"vocab": {"b": 1}}, "added_tokens": [{"content": "a", "id": 0}]}
    )
    assert bad(run(scene, tmp_path)) == set()


def test_tokenizer_of_an_unknown_kind_is_left_alone(tmp_path: Path) -> None:
    scene = llama()
    tokenizers()(scene)
    scene.draft.files["tokenizer.json"] = "[]"
    assert bad(run(scene, tmp_path)) == set()
