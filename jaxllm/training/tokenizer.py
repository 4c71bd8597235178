"""Trains a byte-level BPE tokenizer with special tokens and a template for chat."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxllm.errors import refused
from jaxllm.files import check_is_regular

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [EOS, START, END]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Words with the space before them, numbers of up to three digits, runs of other characters, and
# indentation together with the line break before it, so that a line of code begins with one token.
_PIECES = r"\n[ \t]*| ?\p{L}+| ?_*\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges. Any text survives encoding and decoding."""
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise refused("vocab_size", vocab_size, f"bytes and special tokens alone are {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise refused("tokenizer", str(folder), "there is no tokenizer.json")
    check_is_regular(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exceptions
        raise refused("tokenizer", str(path), f"it describes no tokenizer: {error}") from error
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise refused("tokenizer", str(folder), f"it lacks {', '.join(missing)}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and the config that transformers needs for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
