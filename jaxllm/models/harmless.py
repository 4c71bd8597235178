"""Fields of a config.json that do not change what a decoder computes, and why.

Every other field must be read, or the config is refused: a field that nobody reads may mean a
computation that is not ours.
"""

_HISTORY = "says where the file comes from, and which software wrote it"
_TRAINING = "acts in training only: how weights begin, or what is dropped or added to the loss"
_OUTPUTS = "selects what a call of transformers returns"
_CACHE = "how transformers computes, not what"
_TOKENS = "ids of tokens; prompts contain them already, and eos_token_id is read"
_GENERATION = "a default for generate(); generation_config.json has those that are used"
_LABELS = "names classes of a classifier, which a decoder does not have"

HARMLESS = {
    "model_type": "architectures says which family reads the config",
    "architectures": "has been read to choose the family",
    "auto_map": "code in the repository, which is not run",
    "tokenizer_class": "the tokenizer has a config of its own",
    **dict.fromkeys(
        (
            "_name_or_path",
            "name_or_path",
            "transformers_version",
            "use_bfloat16",
            "unsloth_version",
            "unsloth_fixed",
            "model_name",
            "_commit_hash",
            "is_llama_config",
        ),
        _HISTORY,
    ),
    **dict.fromkeys(
        ("transformers.js_config", "custom_pipelines"),
        "settings of other software, which is not run",
    ),
    **dict.fromkeys(
        (
            "initializer_range",
            "initializer_factor",
            "attention_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "embd_dropout",
            "residual_dropout",
            "embedding_dropout",
            "classifier_dropout",
            "pruned_heads",
            "problem_type",
            "gradient_checkpointing",
            "neftune_noise_alpha",
            "ignored_index",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "return_dict",
            "output_hidden_states",
            "output_attentions",
            "return_dict_in_generate",
            "output_scores",
        ),
        _OUTPUTS,
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "cache_implementation",
            "pretraining_tp",
            "torchscript",
            "chunk_size_feed_forward",
            "_attn_implementation",
            "attn_implementation",
            "_attn_implementation_autoset",
            "tie_encoder_decoder",
            "tf_legacy_loss",
            "output_past",
        ),
        _CACHE,
    ),
    **dict.fromkeys(
        (
            "bos_token_id",
            "pad_token_id",
            "sep_token_id",
            "unk_token_id",
            "decoder_start_token_id",
            "forced_bos_token_id",
            "forced_eos_token_id",
        ),
        _TOKENS,
    ),
    **dict.fromkeys(
        (
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "num_return_sequences",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "remove_invalid_values",
            "prefix",
            "task_specific_params",
        ),
        _GENERATION,
    ),
    "is_decoder": "every model here is one",
    **dict.fromkeys(
        ("dtype", "torch_dtype"), "that of the whole model is read, and a tower has the same"
    ),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "finetuning_task"), _LABELS),
}

# What `jaxllm.plan.pooling` reads, in an engine that pools.
OF_POOLING = (
    "classifier_from_token",
    "is_matryoshka",
    "is_original_qwen3_reranker",
    "matryoshka_dimensions",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)

# Of a model whose decoder is run without its towers.
AROUND_DECODER: dict[str, str] = dict.fromkeys(
    (
        "vision_config",
        "audio_config",
        "image_token_id",
        "image_token_index",
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "video_token_id",
        "audio_token_id",
        "boa_token_id",
        "eoa_token_id",
        "eoa_token_index",
        "mm_tokens_per_image",
        "vision_soft_tokens_per_image",
        "spatial_merge_size",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "projector_hidden_act",
    ),
    "describes what comes before the decoder; a tower that is loaded reads what it needs",
)

# Likewise, of Qwen's, whose decoders may lie beside their towers.
AROUND_VISUAL: dict[str, str] = AROUND_DECODER | {
    "vision_start_token_id": "stands before an image in the text; chat templates write it",
    "vision_end_token_id": "stands behind an image in the text; chat templates write it",
    "vision_token_id": "is in no prompt",
    "tokens_per_second": "is of videos; the tower reads it in vision_config",
}
