"""Small real tokenizers of every kind that the detokenizer tells apart."""

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from jaxllm.config import EngineConfig
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineInfo

TEXTS = [
    "the quick brown fox 你好世界 émoji 😀😁",
    "hello world, hello you 你们好 — naïve 😀",
    "a b  c\n",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}(tools){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it, with tokens that cross the borders of characters."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    rust.add_tokens([AddedToken("<think>", special=False), AddedToken(" ö<x> ", special=False)])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=rust,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=CHAT_TEMPLATE,
        )
    )


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"helowrdé", "▁h", "▁he", "ll", "▁hell", "▁hello", "▁w", "▁▁"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "w")]
    merges.append(("▁", "▁"))
    rust = RustTokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=rust, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    )


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """As T5 has it: a decoder that is not a matter of bytes."""
    pieces = ["<unk>", "</s>", "▁", "▁he", "▁she", "llo", *"helos", "▁▁", "你"]
    rust = RustTokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", eos_token="</s>")
    )


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """A decoder that puts spaces between tokens."""
    pieces = ["[UNK]", "[SEP]", "[MASK]", "he", "##llo", "you", ",", "##s"]
    rust = RustTokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=rust, unk_token="[UNK]", sep_token="[SEP]", mask_token="[MASK]"
        )
    )


class _PythonBytes(PreTrainedTokenizer):
    """One token for each byte, written in Python; counts what decoding costs."""

    longest_decode = 0

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {f"b{byte}": byte for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return [f"b{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:])

    def _convert_id_to_token(self, index: int) -> str:
        return f"b{index}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        self.longest_decode = max(self.longest_decode, len(tokens))
        parts = [bytes([int(t[1:])]) if t[0] == "b" else t.encode() for t in tokens]
        return b"".join(parts).decode("utf-8", "replace")


@pytest.fixture(scope="session")
def python_bytes() -> Tokenizer:
    """A slow tokenizer, which only Python code can decode."""
    return Tokenizer(_PythonBytes(eos_token="</s>"))


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig.create("tiny", scheduling_policy="priority", seed=3)


@pytest.fixture
def info(byte_level: Tokenizer) -> EngineInfo:
    return EngineInfo(
        model="tiny",
        model_dir="tiny",
        vocab_size=400,  # more rows than the tokenizer has tokens
        max_model_len=64,
        max_logprobs=5,
        eos_token_ids=[1],
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cache_groups=(),
        block_size=16,
    )
