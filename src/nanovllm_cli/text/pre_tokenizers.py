"""How a byte-level vocabulary cuts text before merging, by the name that GGUF files carry (`tokenizer.ggml.pre`).

A rule is a list of regular expressions; each cuts every piece that the one before left into matches and gaps. The
expressions are facts of the models' own `tokenizer.json` files (Oniguruma syntax); where llama.cpp had to rewrite one
for `std::regex`, the model's original form stands here. SentencePiece vocabularies need none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm_cli.errors import UnsupportedError


@dataclass(frozen=True)
class PreTokenization:
    """How text is cut before merging.

    `ignore_merges`: a piece that is a whole token is taken as it is. `add_bos`: the default where metadata is silent.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The cuts, then the mapping of bytes to printable characters."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


    def backend(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        """Byte-level BPE over text that is cut so."""
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=self.ignore_merges))
        if self.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = self.build()
        backend.decoder = decoders.ByteLevel()
        return backend


PARTED_TWICE = frozenset({"roberta-bpe", "jina-v1-en", "jina-v2-code"})
"""Names of those between whose texts a separator comes behind the end, where metadata is silent."""


def pre_tokenization(name: str) -> PreTokenization:
    """The rule called `name`. Raises UnsupportedError with the known names."""
    try:
        return _RULES[name]
    except KeyError:
        known = ", ".join(sorted(_RULES))
        raise UnsupportedError(
            f"unknown pre-tokenizer {name!r} in tokenizer.ggml.pre; known: {known}",
            "use the model's original folder with its tokenizer.json instead of the GGUF vocabulary",
        ) from None


def names_cutting_like(cut: pre_tokenizers.PreTokenizer | None) -> list[str]:
    """Names of the rules that cut varied text as `cut` does, byte mapping included; the usual name first."""
    if cut is None:
        return []
    wanted = [cut.pre_tokenize_str(text) for text in _PROBES]
    cuts: dict[PreTokenization, bool] = {}
    for rule in _RULES.values():
        if rule not in cuts:
            built = rule.build()
            cuts[rule] = all(built.pre_tokenize_str(text) == pieces for text, pieces in zip(_PROBES, wanted, strict=True))
    return [name for name, rule in _RULES.items() if cuts[rule]]


# What the rules cut differently: contractions, digits, runs of spaces, line ends, punctuation, scripts, cases, marks.
_PROBES = (
    "I'm sure they'LL've gone; it'd be O'Brien's, I'D say. 'tis 'S 'sſ",
    "1 12 123 1234 12345 123,456,789.00 3.14e-10 ١٢٣ ½ Ⅷ x2y3 v1.2.3",
    "a  b   c\td\n\ne \n f\r\n\r\n  g\u00a0h\u3000i \n\n\n   \t  end   ",
    "camelCase HTTPServer snake_case kebab-case __init__(self, *args): return x[1:-1] != {'k': \"v\"}  # note\n\tpass",
    "Straße Äpfel naïve e\u0301 Ấ İstanbul ǅ აბ ႠႡ слово λόγος",
    "你好世界。こんにちはカタカナ！ 안녕 สว\u0e31สด\u0e35 नमस\u094dत\u0947 مرحبا שלום",
    "😀👨\u200d👩\u200d👧 $100 50% a/b\\c http://x.y/z?q=1&r=2 <tag> ... --- !!! …“q”、。۔، ~^|`",
    "hello world/\n/ path//\r\n ?!\n\n; (paren)[brack]{brace} 'quoted' \"double\" end.\n",
)  # fmt: skip

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_PUNCTUATION}|\s+(?!\S)|\s+"


def _words(digits: str, contraction: str = _CONTRACTION + "|") -> str:
    """The cl100k family: contractions, words with one leading mark, `digits`, punctuation and line ends, spaces."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_PUNCTUATION}[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str = _CONTRACTION + "?", but: str = "", ends: str = r"\r\n/") -> str:
    """The o200k family: a word breaks where lower case turns into upper case. but: letters that are none of a word, as what
    follows && in a set; ends: what punctuation takes along."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
        rf"|{digits}|{_PUNCTUATION}[{ends}]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Cased letters as DeepSeek's list has them; Georgian became cased after that list was written.
_DEEPSEEK_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}]]+"
_DEEPSEEK_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    _DEEPSEEK_LETTERS,
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPARK = (
    *_DEEPSEEK_V3[:2],
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
)  # fmt: skip
# Digits by threes from their end; runs past 510, of which all are but the last, bound what a look ahead costs.
_AFMOE = (
    r"\p{N}{1,510}",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0EFF}"
    r"\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    _DEEPSEEK_V3[-1],
)
_K2_HORIZON = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\x{{200C}}\x{{200D}}]+|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_SPACES}"
)
_KIMI = r"[\p{Han}]+|" + _cased_words(r"\p{N}{1,3}", but=r"&&[^\p{Han}]", ends=r"\r\n")
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
    r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    _cased_words(r"\p{N}"),
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2_SPACES = "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_JAIS2 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|\s*[\r\n]+|{_JAIS2_SPACES}"
)


def _table() -> dict[str, PreTokenization]:
    rules: dict[str, PreTokenization] = {}

    def add(names: str, *patterns: str, ignore_merges: bool = False, add_bos: bool = False, nfc: bool = False) -> None:
        rule = PreTokenization(patterns, ignore_merges, add_bos, nfc)
        rules.update(dict.fromkeys(names.split(), rule))

    add("default", *_DEFAULT)
    of_llama3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    add(of_llama3, _LLAMA3, ignore_merges=True, add_bos=True)
    add("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3)
    add("glm5", _LLAMA3, ignore_merges=True)
    add("qwen2 megrez f2llmv2", _QWEN2, nfc=True)
    add("laguna", r"[^\n]+|[\n]+", _QWEN2)
    add("qwen35", _QWEN35, nfc=True)
    add("deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2 kormo", _QWEN2)
    add("deepseek-llm", *_DEEPSEEK_LLM)
    add("deepseek-coder", *_DEEPSEEK_CODER)
    add("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK_V3)
    add("spark2_5", *_SPARK)
    add("kimi-k2", _KIMI)
    add("k2-horizon", _K2_HORIZON)
    add("youtu", *_YOUTU, ignore_merges=True)
    add("falcon", *_FALCON)
    add("gpt-2 phi-2 mpt jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _GPT2)
    add("jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", _GPT2)
    add("olmo modern-bert", _GPT2, nfc=True)  # GPT-NeoX's tokenizer under them, and ModernBERT's of OLMo's; llama.cpp has no NFC
    add("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", *_DIGITS_GPT2)
    add("tekken", _cased_words(r"\p{N}", contraction=""), ignore_merges=True, add_bos=True)
    add("gpt-4o llama4 kanana2 minimax-m2 talkie", _cased_words(r"\p{N}{1,3}"))
    add("granite-embed-multi-97m", _cased_words(r"\p{N}{1,3}"), ignore_merges=True)
    add("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(r"\p{N}{1,3}"))
    add("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))")
    add("bloom gpt3-finnish poro-chat", _BLOOM)
    add("viking", _BLOOM, r"\p{N}")
    add("bailingmoe bailingmoe2 llada-moe", _BAILING)
    add("seed-coder", _SEED_CODER)
    add("ufakzeka", _words(r"\p{N}", contraction=""))  # an apostrophe begins a Turkish suffix
    add("chameleon", *_CHAMELEON, add_bos=True)
    add("exaone-moe", _EXAONE_MOE)
    add("afmoe", *_AFMOE)
    add("jais-2", _JAIS2)
    add("minicpm5", r"\p{N}{1,3}", _words(r"\p{N}+"), ignore_merges=True)
    return rules


_RULES = _table()
