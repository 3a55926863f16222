"""Tiny random models of many families, plain and under EAGLE-3, in SGLang's real scheduler on CPU.

A program, run by test_eagle3_families.py: ``python eagle3_families.py FOLDER [FAMILY...]`` writes
``FOLDER/report.json``: by family what was set, what was captured, and the greedy output with and
without speculation, of some also with requests in flight across our threshold. SGLang is imported
once; each model runs in a forked process of its own.

In SGLang 0.5.9 it runs the one family whose users are there, Kimi-K2.5.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import in_process

from sglang_spec_ext.ops.bench.server import free_port
from testbed import engine

VOCAB, HIDDEN, LAYERS, HEADS = 96, 64, 6, 2
PROMPTS = ([5, 9, 17, 33, 65, 2, 71, 80, 12, 44], [7, 61, 3, 28, 50, 19, 84, 36])
PLACEHOLDER, MEDIA_TOKENS, MEDIA_START, MEDIA_END = 90, 4, 91, 92
"""An image or audio stands for so many copies of this id, between two, until SGLang pads them."""
NEW_TOKENS = 12
N, LEAD, LONG, SHORT = 2, 8, 40, 10
"""The threshold; tokens of the long requests before a burst comes; tokens of each; of the burst."""
TOPKS = (1, 4)
"""Of the drafts that cross the threshold."""
DRAFT_IDS = [0, 2, 4]
HOOKS = (
    "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "get_embed_and_head",
    "set_embed_and_head",
)  # fmt: skip
TIMEOUT_S = 300
WINDOW = 6
"""Verifies after which the plugin says that none is accepted; a random draft has no chance."""

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN2 = {**TEXT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA = {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = {**TEXT, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
DEEPSEEK = {
    **TEXT,
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,  # in none of the layers, all of which are dense
    "n_shared_experts": 1,
    "n_group": 1,
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": 1,
    "use_mla": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
del DEEPSEEK["head_dim"]
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
}
DRAFT = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": DRAFT_IDS,
    },
}
MOONVIT_3D = {
    "hidden_size": 32,
    "vt_hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "text_hidden_size": HIDDEN,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
AUDIO = {
    "model_type": "qwen2_audio_encoder",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 16,
}


@dataclass(frozen=True)
class Family:
    """One tiny target.

    Attributes:
        architecture: class that SGLang loads.
        config: the rest of its config.json.
        modality: what stands in the prompt besides text; empty for text alone.
        patches: side of an image that goes through the vision tower, in patches; 0 for media that
            have been encoded already.
        native: whether its class has the hooks itself in the installed release.
        topk: of the draft; with 4, for which people stay on the first release, even a random
            draft has a token accepted now and then.
        crosses: whether requests of it are also run together, and across the threshold.
    """

    architecture: str
    config: dict[str, Any]
    modality: str = "IMAGE"
    patches: int = 0
    native: bool = False
    topk: int = 1
    crosses: bool = False


KIMI = {
    "Kimi-K2.5": Family(
        "KimiK25ForConditionalGeneration",
        {
            "model_type": "kimi_k25",
            "text_config": DEEPSEEK_V3,
            "vision_config": MOONVIT_3D,
            "media_placeholder_token_id": PLACEHOLDER,
        },
        patches=4,
        native=not engine.FIRST_RELEASE,
        topk=4 if engine.FIRST_RELEASE else 1,
        crosses=True,
    ),
}
OTHERS: dict[str, Family] = {
    "LLaVA": Family(
        "LlavaForConditionalGeneration",
        {
            "model_type": "llava",
            "text_config": LLAMA,
            "vision_config": PIXTRAL,
            "image_token_index": PLACEHOLDER,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "LLaVA, tied embeddings": Family(
        "LlavaForConditionalGeneration",
        {
            "model_type": "llava",
            "text_config": {**LLAMA, "tie_word_embeddings": True},
            "vision_config": PIXTRAL,
            "image_token_index": PLACEHOLDER,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "LLaVA with a forward of its own": Family(
        "LlavaLlamaForCausalLM",
        {
            **LLAMA,
            "model_type": "llava",
            "text_config": LLAMA,
            "vision_config": CLIP,
            "mm_hidden_size": CLIP["hidden_size"],
            "pad_token_id": 2,
        },
        modality="",
    ),
    "Mistral3": Family(
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "mistral3",
            "text_config": MISTRAL,
            "vision_config": PIXTRAL,
            "image_token_index": PLACEHOLDER,
            "spatial_merge_size": 2,
        },
    ),
    "InternVL": Family(
        "InternVLChatModel",
        {
            "model_type": "internvl_chat",
            "llm_config": QWEN2,
            "vision_config": {**CLIP, "model_type": "intern_vit_6b", "norm_type": "layer_norm"},
            "force_image_size": 28,
            "downsample_ratio": 0.5,
            "ps_version": "v2",
            "template": "internlm2-chat",
        },
    ),
    "Kimi-VL": Family(
        "KimiVLForConditionalGeneration",
        {
            "model_type": "kimi_vl",
            "text_config": DEEPSEEK,
            "vision_config": {
                "model_type": "moonvit",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "init_pos_emb_height": 4,
                "init_pos_emb_width": 4,
            },
            "media_placeholder_token_id": PLACEHOLDER,
        },
    ),
    "DeepSeek-VL2": Family(
        "DeepseekVL2ForCausalLM",
        {
            "model_type": "deepseek_vl_v2",
            "language_config": DEEPSEEK,
            "projector_config": {"input_dim": 192, "n_embed": HIDDEN},
            "vision_config": {},
            "tile_tag": "2D",
        },
    ),
    "Phi-4-MM": Family(
        "Phi4MMForCausalLM",
        {
            **TEXT,
            "model_type": "phi3",
            "embd_layer": {"audio_embd_layer": {"embedding_cls": "audio"}},
            "audio_processor": {
                "name": "cascades",
                "config": {
                    "attention_dim": 32,
                    "attention_heads": 2,
                    "linear_units": 32,
                    "num_blocks": 1,
                    "input_size": 16,
                    "encoder_embedding_config": {"input_size": 16},
                    "depthwise_seperable_out_channel": 32,
                    "nemo_conv_settings": {"conv_channels": 32},
                    "time_reduction": 8,
                    "kernel_size": 3,
                    "ext_pw_kernel_size": 1,
                    "ext_pw_out_channel": 32,
                    "input_layer": "nemo_conv",
                    "activation": "swish",
                    "conv_activation": "swish",
                    "conv_glu_type": "swish",
                    "bias_in_glu": True,
                    "causal": True,
                    "chunk_size": -1,
                    "cnn_layer_norm": True,
                    "left_chunk": 18,
                    "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 500},
                },
            },
            "pad_token_id": 2,
        },
    ),
    "Qwen2-Audio": Family(
        "Qwen2AudioForConditionalGeneration",
        {
            "model_type": "qwen2_audio",
            "audio_config": AUDIO,
            "text_config": QWEN2,
            "audio_token_index": PLACEHOLDER,
        },
        "AUDIO",
    ),
    "GLM-ASR": Family(
        "GlmAsrForConditionalGeneration",
        {
            "model_type": "glmasr",
            "audio_config": {
                "model_type": "glmasr_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
            },
            "text_config": LLAMA,
            "audio_token_id": PLACEHOLDER,
        },
        "AUDIO",
    ),
    "Qwen2-VL": Family(
        "Qwen2VLForConditionalGeneration",
        {
            "model_type": "qwen2_vl",
            "text_config": {
                **QWEN2,
                "model_type": "qwen2_vl_text",
                "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": HIDDEN,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 14,
                "in_chans": 3,
            },
            "image_token_id": PLACEHOLDER,
        },
        modality="",
    ),
    "GLM-4": Family(
        "Glm4ForCausalLM",
        {**TEXT, "model_type": "glm4", "pad_token_id": 2, "partial_rotary_factor": 0.5},
        modality="",
    ),
}
FAMILIES = KIMI if engine.FIRST_RELEASE else {**OTHERS, **KIMI}


def deafen() -> None:
    """Let a language model's setter do nothing."""
    from sglang.srt.models.llama import LlamaForCausalLM

    LlamaForCausalLM.set_eagle3_layers_to_capture = lambda self, layer_ids=None: None


def silence() -> None:
    """Take a language model's setter away."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

    del DeepseekV2ForCausalLM.set_eagle3_layers_to_capture


Faults = dict[str, tuple[Family, Callable[[], None]]]
FAULTS: Faults = {
    "a wrapped model without hooks": (
        KIMI["Kimi-K2.5"] if engine.FIRST_RELEASE else OTHERS["Kimi-VL"], silence
    ),
}  # fmt: skip
if not engine.FIRST_RELEASE:
    FAULTS |= {
        "a hook without effect": (OTHERS["LLaVA"], deafen),
        "a loop that collects nothing": (
            Family("GemmaForCausalLM", {**TEXT, "model_type": "gemma", "pad_token_id": 2}),
            lambda: None,
        ),
    }
"""Targets that must stop the server, and what is done to SGLang first."""


def shrink_towers() -> None:
    """Two classes build a vision tower of a fixed, large size; here a small one will do."""
    import timm
    import transformers

    create = timm.create_model
    timm.create_model = lambda name, **options: create("vit_tiny_patch16_224", **options)
    siglip = transformers.SiglipVisionConfig
    transformers.SiglipVisionConfig = lambda **fields: siglip(**{**SIGLIP, "image_size": 56})


def norm_in_place() -> None:
    """Let a norm write the new residual over the old one, as the kernel on a GPU does.

    The embeddings are the first residual, so whoever keeps them for later has to know.
    """
    from sglang.srt.layers.layernorm import RMSNorm

    original = RMSNorm.forward_native

    def forward_native(self: Any, x: Any, residual: Any = None, *rest: Any) -> Any:
        if residual is None:
            return original(self, x)
        normed, new = original(self, x, residual, *rest)
        residual.copy_(new)
        return normed, residual

    RMSNorm.forward_native = forward_native


def capture_graphs(told: dict[str, Any]) -> None:
    """Make the runner of the verify graphs on CPU, too, and write down which layers it captures.

    It is made by SGLang's own constructor; only the capture itself needs a GPU.
    """
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
    from sglang.srt.model_executor.model_runner import ModelRunner

    class Runner(CudaGraphRunner):
        def capture(self) -> None:
            told["graphs"] = list(loop_of(self.model_runner.model).layers_to_capture)

    original = ModelRunner.init_device_graphs

    def init_device_graphs(runner: Any) -> None:
        original(runner)
        if not runner.is_draft_worker:
            backend = runner.attn_backend
            backend.init_cuda_graph_state = lambda *_: None
            backend.get_cuda_graph_seq_len_fill_value = lambda: 1
            Runner(runner)

    ModelRunner.init_device_graphs = init_device_graphs


# ------------------------------------------------------------------------------- one process
def main(folder: Path, names: list[str]) -> None:
    import_everything()
    norm_in_place()
    if not engine.FIRST_RELEASE:
        shrink_towers()
    report: dict[str, dict[str, Any]] = {}
    jobs: list[tuple[str, str, Callable[..., dict[str, Any]]]] = []
    for name, family in FAMILIES.items():
        place = write_models(family, folder / name.replace(" ", "-"))
        if not names or name in names:
            jobs.append((name, "plain", partial(run, family, place, None)))
            jobs.append((name, "eagle3", partial(run, family, place, family.topk)))
            for topk in TOPKS if family.crosses else ():
                work = partial(run, family, place, topk, threshold=N)
                jobs.append((name, crossing_kind(topk), work))
    for name, (family, prepare) in FAULTS.items():
        place = write_models(family, folder / name.replace(" ", "-"))
        jobs.append((name, "eagle3", partial(run, family, place, family.topk, prepare=prepare)))
    for pair in zip_longest(jobs[::2], jobs[1::2]):
        # forks share the state of `random`, by which SGLang would give both the same port
        running = [
            (name, kind, Forked(partial(work, port=free_port())))
            for name, kind, work in filter(None, pair)
        ]
        for name, kind, child in running:
            report.setdefault(name, {})[kind] = child.result()
    (folder / "report.json").write_text(json.dumps(report))


def crossing_kind(topk: int) -> str:
    """Under what `report.json` has the run of a family with the threshold."""
    return f"threshold, topk {topk}"


def import_everything() -> None:
    """What each fork would otherwise import for itself: all model files, and transformers' own."""
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from transformers import AutoModel

    for config in AutoModel._model_mapping:
        with contextlib.suppress(ValueError):  # a broken entry; SGLang skips it, too
            AutoModel._model_mapping.get(config, None)


class Forked:
    """``work`` in a child process."""

    def __init__(self, work: Callable[[], dict[str, Any]]) -> None:
        reading, writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(reading)
            signal.alarm(TIMEOUT_S)
            try:
                made = work()
            except BaseException:
                made = {"error": traceback.format_exc()}
            with os.fdopen(writing, "w") as out:
                json.dump(made, out)
            os._exit(0)
        os.close(writing)
        self._reading = reading

    def result(self) -> dict[str, Any]:
        """What it returned, or the traceback that it ended with."""
        with os.fdopen(self._reading) as pipe:
            text = pipe.read()
        os.waitpid(self._child, 0)
        made: dict[str, Any] = json.loads(text) if text else {"error": "the process ended"}
        return made


def write_models(family: Family, place: Path) -> Path:
    """Directories ``target`` and ``draft`` with a config.json each."""
    target = {"torch_dtype": "float32", **family.config, "architectures": [family.architecture]}
    for name, config in (("target", target), ("draft", DRAFT)):
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text(json.dumps(config))
    return place


def run(
    family: Family,
    place: Path,
    topk: int | None,
    *,
    port: int,
    threshold: int | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What came of one server: with a draft unless ``topk`` is None, perhaps with our threshold."""
    prepare()
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_spec_ext.args import Drafting, Settings
    from sglang_spec_ext.compat import hooks, sglang_api
    from sglang_spec_ext.observe import AcceptWatch
    from sglang_spec_ext.wiring import drafting, scheduler

    speculate = topk is not None
    arguments = engine.server_args(
        topk,
        model_path=str(place / "target"),
        speculative_draft_model_path=str(place / "draft") if speculate else None,
        load_format="dummy",
        nccl_port=port,
        skip_tokenizer_init=True,
        max_total_tokens=1024,
        log_level="info",
        trust_remote_code=True,
        cuda_graph_bs=[1] if engine.FIRST_RELEASE else None,
    )
    AcceptWatch.WINDOW = WINDOW
    log = Log()
    logging.getLogger("sglang_spec_ext").addHandler(log)
    logging.getLogger("sglang_spec_ext").setLevel(logging.INFO)
    told: dict[str, Any] = {"set": [], "captured": [], "draft_embeds": [], "borrowed": False}
    if engine.FIRST_RELEASE and speculate:
        capture_graphs(told)
    load = ModelRunner.load_model

    def load_random(runner: Any) -> Any:
        result = load(runner)
        randomise(runner.model, "draft" if runner.is_draft_worker else "target")
        return result

    ModelRunner.load_model = load_random
    # as in a scheduler process
    if threshold is not None:
        scheduler.bind(Settings(threshold, resume_threshold=threshold))
    with_draft = Drafting(hooks=True, check="stop")
    drafting.bind_in_scheduler(with_draft)
    assert hooks.unbound(drafting.table(with_draft)) == []
    bound = ModelRunner.load_model

    def watched(runner: Any) -> Any:
        cls = sglang_api.target_class(runner)
        before, own = set(dir(cls)), dict(vars(cls))
        result = bound(runner)
        if runner.is_draft_worker:
            watch_draft(runner.model, told)
        else:
            told["lacked"] = "set_eagle3_layers_to_capture" not in before
            told["set"] = sorted({*dir(cls)} & {*HOOKS} - before)
            told["replaced"] = sorted(n for n, value in own.items() if vars(cls)[n] is not value)
            hooked = [type(m).__name__ for m in runner.model.modules() if m._forward_pre_hooks]
            told["hooked"] = sorted(hooked)
            watch(runner.model, told)
        return result

    ModelRunner.load_model = watched
    driver = Driver(in_process.scheduler_of(arguments))
    eyes = None
    if speculate:
        target = driver.scheduler.tp_worker.model_runner.model
        draft = in_process.draft_runner(driver.scheduler).model
        embedding = target.get_embed_and_head()[0]
        told["borrowed"] = draft.model.embed_tokens.weight.data_ptr() == embedding.data_ptr()
        eyes = Eyes(target, draft)
    told["text"] = [driver.greedy(prompt) for prompt in PROMPTS]
    if family.modality:
        told["mixed"] = [driver.greedy(prompt, family) for prompt in PROMPTS]
    told["same"] = list(eyes.same) if eyes is not None else []
    if family.crosses:
        told |= driver.cross(family)
    told |= {"verifies": driver.verifies, "accepted": driver.accepted, "log": log.lines}
    told["placeholders"] = driver.placeholders
    return told


def randomise(model: Any, salt: str) -> None:
    """Weights that depend on nothing but their names, and that make each token's logits differ."""
    import torch

    for name, parameter in sorted(model.named_parameters()):
        seed = torch.Generator().manual_seed(zlib.crc32(f"{salt}.{name}".encode()))
        if parameter.ndim == 1:  # biases and the weights of norms
            signs = torch.randint(2, parameter.shape, generator=seed) * 2 - 1
            parameter.data.copy_(0 * signs if name.endswith("bias") else signs)
            continue
        values = torch.randn(parameter.shape, generator=seed) * parameter.shape[-1] ** -0.5
        if "embed_tokens" in name:
            values *= 0.1  # so that a token does not simply repeat itself
        parameter.data.copy_(values.to(parameter.dtype))
    for module in model.modules():
        if hasattr(module, "post_load_weights"):
            module.post_load_weights()  # MLA splits a weight after the load


def loop_of(model: Any) -> Any:
    """The module whose forward runs the layers and collects states."""
    return next(module for module in model.modules() if hasattr(module, "layers_to_capture"))


def watch(model: Any, told: dict[str, Any]) -> None:
    """Write down, for each forward, its mode and what arrives of captured states.

    That is their widths and, in the first release, whether they are the outputs of the layers that
    the draft names. In the newest the layers keep their residual to themselves.
    """
    from sglang_spec_ext.compat import sglang_api

    outputs: dict[int, Any] = {}

    def keep(place: int, output: Any) -> None:
        outputs[place] = output[0] + output[1]  # hidden state and residual

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[4] if len(args) > 4 else kwargs.get("aux_hidden_states")
        widths, right = None, None
        if states is not None:
            packed = hasattr(states, "shape")
            given = states.split(HIDDEN, dim=-1) if packed else states
            widths = [state.shape[-1] for state in given]
            if engine.FIRST_RELEASE:
                wanted = [outputs[place] for place in DRAFT_IDS]
                right = all(a.equal(b) for a, b in zip(given, wanted, strict=True))
        told["captured"].append((args[3].forward_mode.name, widths, right))

    for place in DRAFT_IDS if engine.FIRST_RELEASE else ():
        layer = loop_of(model).layers[place]
        layer.register_forward_hook(lambda _, __, output, place=place: keep(place, output))
    for processor in sglang_api.logits_processors(model):
        processor.register_forward_pre_hook(note, with_kwargs=True)


class Eyes:
    """What target and draft see of a prompt: the inputs of their first layers.

    `same` tells of each prefill of the draft whether it saw what the target embedded, one token on,
    and at the end the token that the target sampled.
    """

    def __init__(self, target: Any, draft: Any) -> None:
        self.same: list[bool] = []
        self._embed = draft.model.embed_tokens
        inner = draft.model
        first = inner.midlayer if hasattr(inner, "midlayer") else inner.layers[0]
        loop_of(target).layers[0].register_forward_pre_hook(self._target, with_kwargs=True)
        inner.register_forward_pre_hook(self._ids)
        first.register_forward_pre_hook(self._draft)

    def _target(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._embedded = (args[1] if len(args) > 1 else kwargs["hidden_states"]).clone()

    def _ids(self, _: Any, args: tuple[Any, ...]) -> None:
        self._last = args[0][-1:]

    def _draft(self, _: Any, args: tuple[Any, ...]) -> None:
        _, seen, _, batch, *_ = args
        if batch.forward_mode.name == "EXTEND":
            sampled = self._embed.weight[self._last]
            self.same.append(seen[:-1].equal(self._embedded[1:]) and seen[-1:].equal(sampled))


def watch_draft(model: Any, told: dict[str, Any]) -> None:
    """Write down which ids the draft looks up in its embedding."""

    def note(_: Any, args: tuple[Any, ...]) -> None:
        told["draft_embeds"] = sorted({*told["draft_embeds"], *args[0].flatten().tolist()})

    model.model.embed_tokens.register_forward_pre_hook(note)


class Log(logging.Handler):
    """Keeps what the plugin says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Driver:
    """Runs requests through a scheduler without its sockets, one after the other."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.verifies = 0
        self.accepted = 0
        self.placeholders: list[int] = []

    def greedy(self, prompt: list[int], family: Family | None = None) -> list[int]:
        """Greedy output; with an image or audio of the family's in the middle if one is given."""
        request = self._start(prompt, NEW_TOKENS, family)
        while not request.finished():
            in_process.step(self.scheduler)
        self.verifies += request.spec_verify_ct
        self.accepted += in_process.accepted_drafts(request)
        return list(request.output_ids)

    def cross(self, family: Family) -> dict[str, Any]:
        """Two long requests, and a burst of four that comes and goes beside them.

        Half of each have an image of the family's. Returns their outputs, the long ones first, and
        what the draft's KV cache then holds of the long ones.
        """
        starts = [prompt[::-1] for prompt in PROMPTS]  # no prefix that has been run before
        long = [self._start(starts[0], LONG), self._start(starts[1], LONG, family)]
        while min(len(request.output_ids) for request in long) < LEAD:
            in_process.step(self.scheduler)
        burst = [
            self._start([first, *start], SHORT, media)
            for start in starts
            for first, media in ((21, None), (22, family))
        ]
        while not all(request.finished() for request in burst):
            in_process.step(self.scheduler)
        assert not any(request.finished() for request in long), "the burst has outlived them"
        # while they hold their slots, and before a verify can accept tokens beyond the end
        while min(len(request.output_ids) for request in long) < LONG - 2 * engine.DRAFT_TOKENS[1]:
            in_process.step(self.scheduler)
        held = [self._draft_kv(request) for request in long]
        while not all(request.finished() for request in long):
            in_process.step(self.scheduler)
        return {"crossed": [list(r.output_ids) for r in long + burst], "draft_kv": held}

    def _draft_kv(self, request: Any) -> list[list[float]]:
        """Its draft K and V by position, up to half of the output; nothing without a draft."""
        if self.scheduler.draft_worker is None:
            return []
        positions = len(request.origin_input_ids) + LONG // 2
        batch = self.scheduler.running_batch
        index = batch.req_pool_indices[batch.reqs.index(request)]
        row = self.scheduler.req_to_token_pool.req_to_token[index, :positions].long()
        pool = in_process.draft_runner(self.scheduler).token_to_kv_pool
        k, v = pool.get_kv_buffer(0)
        return [[*k[slot].flatten().tolist(), *v[slot].flatten().tolist()] for slot in row]

    def _start(self, prompt: list[int], tokens: int, family: Family | None = None) -> Any:
        """A request for so many greedy tokens, which waits for the scheduler's next step."""
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        sampling.normalize(None)
        ids = list(prompt)
        media = None
        if family is not None:
            at = len(ids) // 2
            ids[at:at] = [MEDIA_START, *[PLACEHOLDER] * MEDIA_TOKENS, MEDIA_END]
            media = media_at(at + 1, family)
        rid = f"{prompt} {'with' if media else 'without'} media"
        self.scheduler.handle_generate_request(in_process.request(rid, ids, sampling, media))
        request = self.scheduler.waiting_queue[-1]
        assert request.rid == rid and request.to_finish is None, request.to_finish
        self.placeholders += sorted({i for i in request.origin_input_ids if i >= VOCAB})
        return request


def media_at(at: int, family: Family) -> dict[str, Any]:
    """An image or audio at a place of the prompt, as the tokenizer process sends it."""
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    seed = torch.Generator().manual_seed(3)
    content: dict[str, Any]
    if family.patches:
        side = family.patches
        content = {
            "feature": torch.randn(side * side, 3, 14, 14, generator=seed),
            "model_specific_data": {"grid_thws": torch.tensor([[1, side, side]])},
        }
    else:
        content = {"precomputed_embeddings": torch.randn(MEDIA_TOKENS, HIDDEN, generator=seed)}
    item = MultimodalDataItem(
        modality=Modality[family.modality], offsets=[(at, at + MEDIA_TOKENS - 1)], **content
    )
    item.set_pad_value()
    return {
        "mm_items": [item],
        "im_token_id": PLACEHOLDER,
        "im_start_id": MEDIA_START,
        "im_end_id": MEDIA_END,
        "audio_token_id": PLACEHOLDER,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
