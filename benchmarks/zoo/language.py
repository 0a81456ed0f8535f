"""Models of transformers from small configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.entry import Batch, Entry

VOCABULARY = 128
TOKENS = 16
BATCH = 2


class Contrastive(nn.Module):
    """CLIP, which returns its loss only when asked for it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Return everything that the model returns, with the loss."""
        return self.body(**inputs, return_loss=True)


def _transformers() -> Any:
    from tutorials.common.torchvision_compat import import_torchvision

    import_torchvision()  # which transformers imports in its turn
    import transformers

    return transformers


def _tokens(*names: str, length: int = TOKENS) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        # From 3: smaller numbers are those of padding and other special tokens.
        shape = (BATCH, length)
        return {n: torch.randint(3, VOCABULARY, shape, generator=generator) for n in names}

    return make


def _masked(*names: str) -> Callable[[torch.Generator], Batch]:
    """Return tokens of which the last ones of a sample are padding."""

    def make(generator: torch.Generator) -> Batch:
        batch = dict(_tokens(*names)(generator))
        mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
        mask[0, -4:] = 0
        if "labels" in batch:
            batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
        return {**batch, "attention_mask": mask}

    return make


def _entry(
    name: str,
    kind: str,
    config: str,
    make_batch: Callable[[torch.Generator], Batch],
    data: str,
    wrap: Callable[[nn.Module], nn.Module] = lambda body: body,
    **arguments: Any,
) -> Entry:
    def make() -> nn.Module:
        package = _transformers()
        body = getattr(package, kind)(getattr(package, config)(**arguments))
        return wrap(body)

    return Entry(name, "transformers", make, make_batch, data, needs=("transformers",))


TEXT = f"{BATCH} of {TOKENS} tokens"

_NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "other": {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}

_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    **_NO_DROPOUT["bert"],
)
_LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
)


def _images(name: str = "pixel_values") -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return {
            name: torch.randn(BATCH, 3, 32, 32, generator=generator),
            "labels": torch.randint(10, (BATCH,), generator=generator),
        }

    return make


def _pairs(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {**_masked("input_ids")(generator), "pixel_values": pixels}


def _speech(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 16, 64, generator=generator)
    return {"input_features": features, **_tokens("labels", length=8)(generator)}


def _classes(generator: torch.Generator) -> Batch:
    labels = torch.randint(2, (BATCH,), generator=generator)
    return {**_masked("input_ids")(generator), "labels": labels}


_CLIP = dict(
    text_config=dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        projection_dim=32,
        eos_token_id=2,
    ),
    vision_config=dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        projection_dim=32,
    ),
    projection_dim=32,
)

ENTRIES = (
    _entry("BERT", "BertForMaskedLM", "BertConfig", _masked("input_ids", "labels"), TEXT, **_BERT),
    _entry(
        "BERT classifier",
        "BertForSequenceClassification",
        "BertConfig",
        _classes,
        TEXT,
        **_BERT,
    ),
    _entry(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        _masked("input_ids", "labels"),
        TEXT,
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        **_NO_DROPOUT["gpt2"],
    ),
    _entry(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        _masked("input_ids", "labels"),
        TEXT,
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    _entry(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        _images(),
        f"{BATCH} of 32x32",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=10,
        **_NO_DROPOUT["bert"],
    ),
    _entry(
        "Llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        _masked("input_ids", "labels"),
        TEXT,
        **_LLAMA,
    ),
    _entry(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        _masked("input_ids", "labels"),
        TEXT,
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=64,
        **_NO_DROPOUT["other"],
    ),
    _entry(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        _masked("input_ids", "labels"),
        TEXT,
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        **_NO_DROPOUT["other"],
    ),
    _entry(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _speech,
        f"{BATCH} of 64 frames, 8 tokens",
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_NO_DROPOUT["other"],
    ),
    _entry(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        _pairs,
        f"{BATCH} of 32x32, {TOKENS} tokens",
        wrap=Contrastive,
        **_CLIP,
    ),
)
