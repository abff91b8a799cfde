"""The tensors of a SpeechLM checkpoint by their published names."""

from __future__ import annotations

from pipelines.nn.checkpoint import Checkpoint, bad_checkpoint
from pipelines.speechlm.config import SpeechLmConfig

TOWER = "multimodal_io_dict.continuous_audio.model.audio_tower."
ADAPTOR = "adaptor.continuous_audio."
CODEC = "multimodal_io_dict.discrete_audio.codec_model."
STREAMS = "stream_emb.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: What decoding needs of the codec, and what only encoding or training does.
CODEC_DECODER = ("acoustic_decoder.", "fc2.", "quantizer.")
CODEC_UNUSED = ("acoustic_encoder.", "encoder_semantic.", "decoder_semantic.", "semantic_model.", "fc.", "fc1.")


def backbone_names(layers: int) -> set[str]:
    """The tensors of the decoder, with its embedding and head."""
    parts = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + [f"self_attn.{part}_norm.weight" for part in "qk"]
    parts += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts}
    return names | {EMBEDDING, HEAD, "model.norm.weight"}


def check_names(checkpoint: Checkpoint, config: SpeechLmConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when the decoder lacks one or the folder holds one that nobody knows.

    Tower, adaptor and codec take their own tensors strictly. vLLM reads the decoder's in a process of its own, where an error would
    only be a dead engine.
    """
    wanted = backbone_names(config.backbone.layers) | {STREAMS, f"{ADAPTOR}weight", f"{ADAPTOR}bias"}
    held = set(checkpoint.names())
    if missing := sorted(wanted - held):
        raise bad_checkpoint(f"Tensor {missing[0]} is missing from {checkpoint.folder}.")
    known = (TOWER, *(CODEC + part for part in (*CODEC_DECODER, *CODEC_UNUSED)))
    if extra := sorted(name for name in held - wanted if not name.startswith(known)):
        raise bad_checkpoint(f"{checkpoint.folder} holds tensors that the config does not account for: {', '.join(extra[:5])}.")
