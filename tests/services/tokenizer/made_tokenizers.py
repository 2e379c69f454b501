"""Small tokenizers of the families that language models use, trained on text in many scripts."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's what they don't say, isn't it?",
    "Zwölf große Boxkämpfer jagen Viktor quer über den Sylter Deich. Füße, Straße, Öl.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "天地玄黃宇宙洪荒日月盈昃辰宿列張。いろはにほへとちりぬるを。",
    "देवनागरी लिपि में लिखा हुआ पाठ। السلام عليكم ورحمة الله",
    "Emoji: 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and combining é ñ ǘ; math ∑∫√; tabs\tand\nnewlines.",
    "def add(a, b):\n    return a + b  # 12345 + 67890\n",
]
CORPUS = TEXTS * 8
FAMILIES = ("byte_level", "byte_fallback", "gemma_like", "unigram", "wordpiece", "wordlevel")
BYTE_FALLBACK_FAMILIES = ("byte_fallback", "gemma_like", "metaspace_fallback", "unigram_fallback")
ODD_FAMILIES = ("metaspace_fallback", "unigram_fallback", "added")
"""Besides FAMILIES: byte fallback in other places, and added tokens with every rule there is."""
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def made(family: str) -> Tokenizer:
    """The tokenizer of a family, the same one every time."""
    return _MAKERS[family]()


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return int(token_id)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<s>", "</s>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    _surround(tokenizer)
    return tokenizer


def _sentencepiece_bpe(normalizer: normalizers.Normalizer, decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<unk>", "<s>", "</s>", *BYTE_TOKENS],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    # Byte tokens are part of the vocabulary, but nothing special.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in BYTE_TOKENS]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoder
    _surround(tokenizer, end=False)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    return _sentencepiece_bpe(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


def _gemma_like() -> Tokenizer:
    return _sentencepiece_bpe(
        normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )


def _metaspace_fallback() -> Tokenizer:
    """As newer conversions have it: only the start of a text gets a space, and loses it again."""
    tokenizer = _sentencepiece_bpe(
        normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
    )
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _unigram_fallback() -> Tokenizer:
    letters = sorted(set("".join(TEXTS[:2])) - {" "})
    pieces = [(piece, -float(len(letters))) for piece in ["▁", *letters, *BYTE_TOKENS]]
    words = [(piece, -5.0) for piece in ["▁the", "▁qu", "ick", "▁fox", "er", "ß", "ö"]]
    spec = [(name, 0.0) for name in ("<unk>", "<s>", "</s>")]
    vocab = dict([*pieces, *words])
    tokenizer = Tokenizer(models.Unigram([*spec, *vocab.items()], unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    _surround(tokenizer)
    return tokenizer


def _added() -> Tokenizer:
    tokenizer = _byte_level()
    rules = ("lstrip", "rstrip", "single_word", "normalized")
    for special in (True, False):
        kind = "special" if special else "plain"
        tokens = [
            AddedToken(f"<{kind}_{rule}>", special=special, **{"normalized": False, rule: True})
            for rule in rules
        ]
        spaced = AddedToken(f" <é {kind}>\n", special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([*tokens, spaced])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=350,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _surround(tokenizer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def _wordlevel() -> Tokenizer:
    """No decoder at all: words are joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _surround(tokenizer: Tokenizer, end: bool = True) -> None:
    """Plain text gets <s> in front, and </s> behind."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if end else "<s> $A",
        special_tokens=[(token, id_of(tokenizer, token)) for token in ("<s>", "</s>")],
    )


_MAKERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "gemma_like": _gemma_like,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "wordlevel": _wordlevel,
    "metaspace_fallback": _metaspace_fallback,
    "unigram_fallback": _unigram_fallback,
    "added": _added,
}
