"""Pre-tokenization patterns of byte-level tokenizers, and their names in GGUF files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A GGUF file names its patterns (`tokenizer.ggml.pre`) by a table in llama.cpp (`llama-vocab.cpp`); here each pattern
# is written as in the tokenizer.json of its models.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
_SUFFIX = _CONTRACTIONS + "?"

LLAMA3 = _HEAD + r"|\p{N}{1,3}" + _TAIL  # and cl100k
QWEN2 = _HEAD + r"|\p{N}" + _TAIL
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEKKEN = f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}" + _CASED_TAIL
O200K = f"{_UPPER}*{_LOWER}+{_SUFFIX}|{_UPPER}+{_LOWER}*{_SUFFIX}" + r"|\p{N}{1,3}" + _CASED_TAIL
SEED = _HEAD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS
# Runs of blanks in powers of two.
_POWERS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
JAIS2 = _HEAD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _POWERS
_LINES = r"[^\n]+|[\n]+"
# Digits in threes from the right. The published form looks ahead at every match, which takes quadratic time; this one
# first cuts out runs of digits, then looks ahead once a run.
_ALIGNED_PUBLISHED = r"\d{1,3}(?=(?:\d{3})*\b)"
_ALIGNED = (r"(?<!\d)\d++\b", r"\A\d{1,3}(?=(?:\d{3})*\z)|\G(?!\A)\d{3}")
_ALIGNED_NUMBERS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}"
_ASIAN = "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
# Words of K-EXAONE may contain single spaces.
_PHRASES = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_THREE_DIGITS = r"\p{N}{1,3}"
_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"
)
_LINE_END, _CODER_ASIAN = "[\r\n]", "[一-龥ࠀ-一가-\ud7ff]+"
_CODER = (_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _CODER_ASIAN)
# Letters with case, but not those of every Unicode version.
_CASED_LETTERS = (
    r"\s?["
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-"
    r"ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
    r"]+"
)
_DEEPSEEK_LLM_PUBLISHED = (_LINE_END, _CASED_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CODER_ASIAN)
# The published `\s+$` looks for the end from every blank of a run; this one only from the first.
_DEEPSEEK_LLM = (*_DEEPSEEK_LLM_PUBLISHED[:3], r"(?<!\s)\s++$", _CODER_ASIAN)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|{_UPPER[:-1]}{_NO_HAN}*{_LOWER[:-1]}{_NO_HAN}+{_SUFFIX}"
    rf"|{_UPPER[:-1]}{_NO_HAN}+{_LOWER[:-1]}{_NO_HAN}*{_SUFFIX}" + r"|\p{N}{1,3}" + _TAIL
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    f"{_UPPER}*{_LOWER}+{_SUFFIX}|{_UPPER}+{_LOWER}*{_SUFFIX}" + r"|\p{N}" + _CASED_TAIL,
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_MINICPM5 = (_THREE_DIGITS, _HEAD + r"|\p{N}+" + _TAIL)

_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # of llama.cpp, for files without a rule
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")

# Patterns that are safe to run in this process: backtracking is bounded by a run of letters, digits, marks or blanks.
KNOWN_PATTERNS = frozenset(
    (
        *(LLAMA3, QWEN2, QWEN35, GPT2, TEKKEN, O200K, SEED, JAIS2, _THREE_DIGITS, _KANA, _DEEPSEEK, *_CODER),
        *(_LINES, _ASIAN, _PHRASES, _ALIGNED_NUMBERS, *_ALIGNED),
        *(_DEFAULT[0], _DEFAULT[2], _FALCON[0]),
        *(*_DEEPSEEK_LLM, _KIMI, *_YOUTU, _BAILING, *_MINICPM5),
        r"\p{N}",
        r"[0-9]",
        "[0-9][0-9][0-9]",
    )
)


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenization of a model: `patterns` in turn, then with `gpt2` GPT-2's pattern."""

    patterns: tuple[str, ...] = ()
    published: tuple[str, ...] = ()  # those of the models' tokenizer.json, where `patterns` split alike
    individual_digits: bool = False  # split before GPT-2's pattern
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is not merged
    add_bos: bool = False  # the default of `tokenizer.ggml.add_bos_token`
    ends: tuple[str, str] | None = None  # the tokens around each text of an encoder

    def sections(self, published: bool = False) -> dict[str, Any]:
        """Return the sections `normalizer` and `pre_tokenizer` of a tokenizer.json, ours or the models' own."""
        patterns = (published and self.published) or self.patterns
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ]
        if self.individual_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.gpt2})
        return {
            "normalizer": {"type": "NFC"} if self.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        }


_LLAMA_BPE = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((LLAMA3,))
_QWEN = PreTokenizer((QWEN2,))
_SMOLLM = PreTokenizer(individual_digits=True, gpt2=True)
_GPT2 = PreTokenizer(gpt2=True)
_O200K = PreTokenizer((O200K,))
_DEEPSEEK_V3 = PreTokenizer((_THREE_DIGITS, _KANA, _DEEPSEEK))

# By `tokenizer.ggml.pre`. `export` writes the first of several names with one meaning.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _LLAMA_BPE,
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA_BPE),
    "jina-v5-nano": _LLAMA_BPE,
    "falcon": PreTokenizer(_FALCON),
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "stablelm2": PreTokenizer((QWEN2,), nfc=True),
    "deepseek-r1-qwen": _QWEN,
    **dict.fromkeys(("hunyuan", "kormo", "f2llmv2", "megrez", "grok-2", "solar-open"), _QWEN),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "gpt-2": _GPT2,
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling", "mellum"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0"), _GPT2),
    "modern-bert": PreTokenizer(gpt2=True, nfc=True),
    "roberta-bpe": PreTokenizer(gpt2=True, ends=("<s>", "</s>")),
    "smollm": _SMOLLM,
    **dict.fromkeys(("starcoder", "refact", "codeshell", "exaone", "mellum2", "minerva-7b"), _SMOLLM),
    "command-r": PreTokenizer(individual_digits=True, gpt2=True, nfc=True),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _O200K,
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), _O200K),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "deepseek-coder": PreTokenizer(_CODER, individual_digits=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, _DEEPSEEK_LLM_PUBLISHED, individual_digits=True),
    "kimi-k2": PreTokenizer((_KIMI,), ignore_merges=True),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "bailingmoe2": PreTokenizer((_BAILING,)),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "minicpm5": PreTokenizer(_MINICPM5, ignore_merges=True),
    "seed-coder": PreTokenizer((SEED,)),
    "jais-2": PreTokenizer((JAIS2,)),
    "laguna": PreTokenizer((_LINES, QWEN2)),
    "exaone-moe": PreTokenizer((_PHRASES,)),
    "afmoe": PreTokenizer((_ALIGNED_NUMBERS, _ASIAN, _DEEPSEEK)),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), PreTokenizer((*_ALIGNED, O200K), published=(_ALIGNED_PUBLISHED, O200K))
    ),
}
