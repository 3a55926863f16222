"""Model classes of SGLang without the EAGLE-3 hooks that can be given them, as data.

The hooks are the methods of a target that SGLang calls under EAGLE3 and DFLASH:
``set_eagle3_layers_to_capture``, ``set_dflash_layers_to_capture``, ``get_embed_and_head`` and
``set_embed_and_head``. tests/contract holds this table against the sources of every release
(`tools/eagle3_models.py` reads them): a class that could be here and is not fails there, and so
does one that SGLang has mended or removed. Imports neither torch nor SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_spec_ext.compat.releases import RELEASES, nearest, span


class How(Enum):
    """Where a class's hooks come from."""

    DELEGATE = "the language model that it wraps has them"
    SETTER = "its layers collect states and its forward hands them on; only the setter is missing"
    UNPACK = "its layers collect states; its forward hands states and hidden state on as one pair"
    DFLASH = "it has the DFLASH setter, which names layers as the EAGLE-3 one does"


@dataclass(frozen=True)
class Row:
    """One class in a run of releases.

    Attributes:
        name, module: the class and the module below ``sglang.srt.models`` that defines it.
        how: where its hooks come from.
        inner: attribute path to the model that it wraps (DELEGATE) or whose layers collect
            (SETTER, UNPACK).
        why: what is special about the class, for the reader of the table.
        since, until: first and last release in which it is so.
        own_forward: DELEGATE only: its forward takes a verify for a prefill and places image
            embeddings itself, so that verify has to go to the inner model and the draft has to be
            handed the embeddings.
    """

    name: str
    module: str
    how: How
    inner: str = ""
    why: str = ""
    since: str = RELEASES[0]
    until: str = RELEASES[-1]
    own_forward: bool = False

    def covers(self, release: str) -> bool:
        return release in span(self.since, self.until)


def _wrappers(inner: str, *classes: tuple[str, str], since: str = RELEASES[0]) -> tuple[Row, ...]:
    return tuple(Row(name, module, How.DELEGATE, inner, since=since) for name, module in classes)


def _setters(how: How, *classes: tuple[str, str], since: str = RELEASES[0]) -> tuple[Row, ...]:
    return tuple(Row(name, module, how, "model", since=since) for name, module in classes)


def _dflash(since: str, *classes: tuple[str, str]) -> tuple[Row, ...]:
    return tuple(Row(name, module, How.DFLASH, since=since) for name, module in classes)


_LLAVA = "its forward takes a verify for a prefill and places image embeddings itself"
_ANY_LLM = "which class it wraps is decided by the checkpoint"

ROWS: tuple[Row, ...] = (
    *_wrappers(
        "language_model",
        ("DeepseekVL2ForCausalLM", "deepseek_vl2"),
        ("DotsVLMForCausalLM", "dots_vlm"),
        ("GlmAsrForConditionalGeneration", "glmasr"),
        ("InternS1ForConditionalGeneration", "interns1"),
        ("InternVLChatModel", "internvl"),
        ("KimiVLForConditionalGeneration", "kimi_vl"),
        ("LightOnOCRForConditionalGeneration", "lightonocr"),
        ("MiDashengLMModel", "midashenglm"),
        ("MultiModalityCausalLM", "deepseek_janus_pro"),
        ("Phi4MMForCausalLM", "phi4mm"),
        ("PixtralForConditionalGeneration", "pixtral"),
        ("Qwen2AudioForConditionalGeneration", "qwen2_audio"),
        ("StepVLForConditionalGeneration", "step3_vl_10b"),
    ),
    *_wrappers(
        "language_model",
        ("Qwen3ASRForConditionalGeneration", "qwen3_asr"),
        ("VoxtralForConditionalGeneration", "voxtral"),
        since="0.5.11",
    ),
    *_wrappers(
        "language_model",
        ("LocateAnythingForConditionalGeneration", "locate_anything"),
        since="0.5.15",
    ),
    *_wrappers(
        "llm",
        ("NVILAForConditionalGeneration", "nvila"),
        ("NVILALiteForConditionalGeneration", "nvila_lite"),
        ("POINTSV15ChatModel", "points_v15_chat"),
    ),
    *_wrappers("model", ("DeepseekOCRForCausalLM", "deepseek_ocr")),
    *_wrappers(
        "model",
        ("BailingMMNativeForConditionalGeneration", "bailing_mm"),
        ("BailingMM2NativeForConditionalGeneration", "bailing_mm"),
        since="0.5.21",
    ),
    *_wrappers(
        "thinker", ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"), since="0.5.11"
    ),
    Row(
        "DotsOCRForCausalLM", "dots_ocr", How.DELEGATE, "model",
        "its own get_embed_and_head looks for the embedding one level too high",
    ),
    Row(
        "KimiK25ForConditionalGeneration", "kimi_k25", How.DELEGATE, "language_model",
        "native from the next release on", until="0.5.9",
    ),
    Row("LlavaForConditionalGeneration", "llava", How.DELEGATE, "language_model", _ANY_LLM),
    Row(
        "Mistral3ForConditionalGeneration", "mistral", How.DELEGATE, "language_model",
        f"{_ANY_LLM}; up to 0.5.22 it stands before a LLaVA, which it asks for every attribute",
    ),
    Row("MiniCPMO", "minicpmo", How.DELEGATE, "llm", _ANY_LLM),
    Row(
        "MiniCPMV", "minicpmv", How.DELEGATE, "llm",
        f"{_ANY_LLM}; it stands before a class for each version, which it asks for every attribute",
    ),
    Row(
        "MiniCPMV4_6ForConditionalGeneration", "minicpmv", How.DELEGATE, "llm", _ANY_LLM,
        since="0.5.12.post1",
    ),
    Row(
        "MiniCPMV4_7ForConditionalGeneration", "minicpmv", How.DELEGATE, "llm", _ANY_LLM,
        since="0.5.23",
    ),
    *(
        Row(name, module, How.DELEGATE, "language_model", _LLAVA, own_forward=True)
        for name, module in (
            ("LlavaLlamaForCausalLM", "llava"),
            ("LlavaMistralForCausalLM", "llava"),
            ("LlavaQwenForCausalLM", "llava"),
            ("LlavaVidForCausalLM", "llavavid"),
            ("YiVLForCausalLM", "yivl"),
        )
    ),
    Row(
        "JetVLMForConditionalGeneration", "jet_vlm", How.DELEGATE, "llm",
        "the class that it wraps is in this table itself",
    ),
    Row(
        "Sarashina2VisionForCausalLM", "sarashina2_vision", How.UNPACK, "llm.model",
        "it runs the layers of the model that it wraps and its own logits processor",
    ),
    *_setters(
        How.SETTER,
        ("ArceeForCausalLM", "arcee"),
        ("Glm4ForCausalLM", "glm4"),
        ("Glm4vForConditionalGeneration", "glm4v"),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe"),
        ("GlmOcrForConditionalGeneration", "glm_ocr"),
        ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    ),
    *_setters(
        How.SETTER, ("Cosmos3EdgeForConditionalGeneration", "cosmos3_edge"), since="0.5.20"
    ),
    *(
        Row(name, module, How.SETTER, "model", "its DFLASH setter counts layers by their inputs",
            since="0.5.18")
        for name, module in (
            ("MuseGlimmerForCausalLM", "muse_glimmer"),
            ("MuseGlimmerForConditionalGeneration", "muse_glimmer"),
        )
    ),
    *_setters(
        How.UNPACK,
        ("JetNemotronForCausalLM", "jet_nemotron"),
        ("MiMoForCausalLM", "mimo"),
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
    ),
    *_setters(How.UNPACK, ("MiMoV2ASRForCausalLM", "mimo_v2_asr"), since="0.5.14"),
    *(
        Row(name, module, How.UNPACK, "model", "native from the next release on",
            until="0.5.10.post1")
        for name, module in (
            ("InternS1ProForConditionalGeneration", "interns1pro"),
            ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
            ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
            ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
            ("Qwen3_5MoeForConditionalGeneration", "qwen3_5"),
        )
    ),
    *_dflash("0.5.15", ("LagunaForCausalLM", "laguna")),
    *_dflash("0.5.17", ("InklingForConditionalGeneration", "inkling")),
    *(
        Row(name, "qwen3_5_text", How.DFLASH, why="native from the next release on",
            since="0.5.18", until="0.5.21")
        for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    ),
    *_dflash(
        "0.5.19",
        ("Lfm2ForCausalLM", "lfm2"),
        ("Lfm2MoeForCausalLM", "lfm2_moe"),
        ("NemotronHForCausalLM", "nemotron_h"),
        ("NemotronHPuzzleForCausalLM", "nemotron_h"),
    ),
    *_dflash(
        "0.5.20",
        ("MiMoV2FlashForCausalLM", "mimo_v2"),
        ("MiMoV2ForCausalLM", "mimo_v2"),
        ("NanbeigeForCausalLM", "nanbeige"),
        ("NemotronH_Nano_Omni_Reasoning_V3", "nano_nemotron_vl"),
        ("NemotronH_Nano_VL_V2", "nano_nemotron_vl"),
        ("NemotronH_Omni_Reasoning_V3", "nano_nemotron_vl"),
    ),
    *_dflash(
        "0.5.21",
        ("KimiK3ForConditionalGeneration", "kimi_k3"),
        ("KimiK3LinearForCausalLM", "kimi_k3"),
        ("Lfm2VlForConditionalGeneration", "lfm2_vl"),
    ),
    *_dflash(
        "0.5.23",
        ("BeamForCausalLM", "beam"),
        ("MuseSparkForConditionalGeneration", "muse_spark_omni"),
    ),
)  # fmt: skip


def row_of(name: str, version: str | None) -> Row | None:
    """The row of a class in one release; None where the table has none.

    Args:
        version: of SGLang; None, or one that names no release, stands for the newest.
    """
    try:
        release, _ = nearest(version or RELEASES[-1])
    except ValueError:
        release = RELEASES[-1]
    return next((row for row in ROWS if row.name == name and row.covers(release)), None)
