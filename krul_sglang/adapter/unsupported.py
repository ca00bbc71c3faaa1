"""The server settings that krul refuses at start.

Refusals, their tests and their rows in ``docs/support.md`` are all made from the tables below. A setting is
refused if krul would store or restore wrong KV with it, answer otherwise than the engine alone, or hang. A
setting that was never tried is not refused for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from krul_backend.errors import KrulError
from krul_backend.strategy import SUBSPACE
from krul_sglang.config import ATTENTION_STRATEGIES, KrulConfig

FP8_DTYPES = ("fp8_e4m3", "fp8_e5m2")
_PLAIN_DTYPES = ("auto", "bf16", "bfloat16")


class UnsupportedSetupError(KrulError):
    """The server was asked to run together with something that krul does not support."""


@dataclass(frozen=True)
class Refusal:
    """Says that krul does not run with ``setting``: a flag, or something that follows from flags."""

    setting: str
    reason: str

    def error(self, found: str) -> UnsupportedSetupError:
        """The one line that stops the server. ``found`` says what exactly was met."""
        return UnsupportedSetupError(
            f"--radix-cache-backend krul does not run with {self.setting} ({found}): {self.reason}"
        )


@dataclass(frozen=True)
class Rule(Refusal):
    """Refuses a setting when ``applies`` is true of the values of ``fields``. ``example``: such values."""

    fields: tuple[str, ...]
    applies: Callable[..., bool]
    example: tuple[Any, ...]


def _is_several(value: Any) -> bool:
    return value is not None and value > 1


def _is_named(value: Any) -> bool:
    return value not in (None, "null", "none")


def _flag(flag: str, reason: str, *, example: Any = True, applies: Callable[[Any], bool] = bool) -> Rule:
    """A rule about one flag; its field in the server arguments is called like it."""
    return Rule(flag, reason, (flag.removeprefix("--").replace("-", "_"),), applies, (example,))


def _model(kind: str, reason: str, fact: str) -> Rule:
    """A rule about a kind of model, for which ``model_facts`` has ``fact``."""
    return Rule(f"--model-path of {kind}", reason, (fact,), bool, (True,))


_OTHER_TIER = "another KV tier cannot run beside krul"
_FOREIGN_POOL = "krul does not know this KV pool"
_OTHER_SERVER = "images and sounds pass from one server to another, and krul does not know by which names"
_BITWISE = "recomputed KV is not rounded like KV that was prefilled"
_SCATTERED = "ranks hold different tokens between layers, where heads are cut by token"
_DRAFTS = "what it keeps of a conversation beside the target's KV is not restored"
_SPECULATION = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
_OF_PAIRS = ("EAGLE", "EAGLE3", "NEXTN")
"""With these a page is named by its tokens and the one after it: draft KV depends on that."""
_BY_SLOT = "what it returns of a prompt is kept by KV slot, and is not restored with the KV"
_FULL_ATTENTION = "heads are recomputed with attention over all tokens"

LAUNCH_RULES = (
    _flag("--enable-hierarchical-cache", _OTHER_TIER),
    _flag("--hicache-storage-backend", _OTHER_TIER, example="file"),
    _flag(
        "--disaggregation-decode-retraction-backup",
        _OTHER_TIER,
        example="host_pool",
        applies=lambda value: value == "host_pool",
    ),
    _flag("--enable-lmcache", _OTHER_TIER),
    _flag("--enable-flexkv", _OTHER_TIER),
    _flag("--enable-unified-cache-external-linker", "krul brings its own linker"),
    _flag("--disable-radix-cache", "krul extends the radix cache"),
    _flag("--enable-mis", "it switches the radix cache off, which krul extends"),
    _flag("--is-embedding", "embedding models have no turns to restore"),
    Rule(
        "--enable-lora or --lora-paths, and a strategy that looks at attention",
        'budgets and bases know the model without its adapters: leave strategy = "none"',
        ("enable_lora", "lora_paths", "krul.strategy"),
        lambda is_on, paths, strategy: bool(is_on or paths) and strategy in ATTENTION_STRATEGIES,
        (True, None, "subspace"),
    ),
    _flag("--encoder-only", _OTHER_SERVER),
    _flag("--language-only", _OTHER_SERVER),
    _flag("--dllm-algorithm", "a block's KV is written several times", example="LowConfidence"),
    _flag("--enable-pdmux", "its prefills do not pass the hook that restores prefixes"),
    _flag(
        "--disaggregation-mode",
        "it computes no prompts, which krul restores: serve with krul on the servers that prefill",
        example="decode",
        applies=lambda mode: mode == "decode",
    ),
    _flag("--pp-size", "heads need all layers on one rank", example=2, applies=_is_several),
    Rule(
        '--enable-dp-attention or --attn-dp-size, and strategy = "krul"',
        'layers were never paired with them: take strategy = "subspace"',
        ("enable_dp_attention", "attn_dp_size", "krul.strategy"),
        lambda is_on, size, strategy: bool(is_on or _is_several(size)) and strategy == "krul",
        (True, 1, "krul"),
    ),
    _flag("--attn-cp-size", _SCATTERED, example=2, applies=_is_several),
    _flag("--enable-prefill-cp", _SCATTERED),
    _flag("--enable-layernorm-sp", _SCATTERED),
    _flag("--enable-attn-tp-input-scattered", _SCATTERED),
    _flag("--dcp-size", "it splits a conversation's KV over ranks", example=2, applies=_is_several),
    _flag(
        "--elastic-ep-backend", "ranks may leave, and krul waits for all", example="nixl", applies=_is_named
    ),
    Rule(
        "--dp-size without endpoint",
        'each replica would start a daemon of its own; run krul-backend, and set endpoint = "..."',
        ("dp_size", "enable_dp_attention", "attn_dp_size", "krul.endpoint"),
        # With the older of SGLang's two ways to ask for DP attention, its ranks are no replicas.
        lambda dp_size, is_older_way, attn_dp_size, endpoint: (
            _is_several(dp_size) and not (is_older_way and attn_dp_size == 1) and not endpoint
        ),
        (2, False, 1, ""),
    ),
    Rule(
        f"--speculative-algorithm other than {', '.join(_SPECULATION)}",
        _DRAFTS,
        ("speculative_algorithm",),
        lambda name: _is_named(name) and name.upper() not in _SPECULATION,
        ("DFLASH",),
    ),
    Rule(
        "--speculative-algorithm and --enable-streaming-session",
        "a session counts the last token of a turn as computed, which speculation leaves to the next forward",
        ("speculative_algorithm", "enable_streaming_session"),
        lambda name, has_sessions: _is_named(name) and bool(has_sessions),
        ("NGRAM", True),
    ),
    _flag("--enable-multi-layer-eagle", "each of its layers has a pool of its own, and krul reads one"),
    Rule(
        f"--speculative-algorithm {', '.join(_OF_PAIRS)} and truncation_reuse",
        "pages of moved runs are named by their own tokens alone",
        ("speculative_algorithm", "krul.truncation_reuse"),
        lambda name, is_on: _is_named(name) and name.upper() in _OF_PAIRS and bool(is_on),
        ("EAGLE", True),
    ),
    _flag("--decoupled-spec-role", _DRAFTS, example="verifier", applies=_is_named),
    _flag(
        "--kv-cache-dtype",
        "krul knows no such elements, only those of the model, bf16, fp8_e4m3 and fp8_e5m2",
        example="nvfp4",
        applies=lambda dtype: dtype is not None and dtype not in (*_PLAIN_DTYPES, *FP8_DTYPES),
    ),
    Rule(
        '--kv-cache-dtype fp8_*, and strategy = "krul" or a precision that compresses',
        'fp8 KV is stored as it is or in bases: take strategy = "none" or "subspace", and leave precision',
        ("kv_cache_dtype", "krul.strategy", "krul.precision"),
        lambda kv, kind, bits: kv in FP8_DTYPES and (kind not in ("none", SUBSPACE) or bits != "native"),
        ("fp8_e4m3", "krul", "int4"),
    ),
    Rule(
        "--enable-two-batch-overlap and a strategy that looks at attention",
        'it runs each forward in two halves, and rows are counted in whole ones: leave strategy = "none"',
        ("enable_two_batch_overlap", "krul.strategy"),
        lambda is_split, strategy: bool(is_split) and strategy in ATTENTION_STRATEGIES,
        (True, "krul"),
    ),
    _flag(
        "--quantization-param-path",
        "the engine writes KV with these scales and does not read it with them",
        example="scales.json",
    ),
    _flag("--enable-kv-cache-sharding", _FOREIGN_POOL),
    _flag("--enable-page-major-kv-layout", _FOREIGN_POOL),
    _flag("--enable-unified-memory", _FOREIGN_POOL),
    _flag("--enable-hisparse", _FOREIGN_POOL),
    Rule(
        "--attention-backend minicpm_*",
        "it keeps a summary of keys beside the pool, and reads few of them",
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
        lambda *names: any(str(name).startswith("minicpm_") for name in names),
        (None, "minicpm_flashattn", None),
    ),
    _flag("--enable-deterministic-inference", _BITWISE),
    _flag("--rl-on-policy-target", _BITWISE, example="fsdp"),
    _flag("--enable-memory-saver", "it takes the KV pool away while krul's threads copy"),
    _flag(
        "--offload-group-size",
        "heads end before the last layer, and the weights prefetched next would be those of a wrong one",
        example=2,
        applies=lambda value: value is not None and value > 0,
    ),
    _flag(
        "--checkpoint-engine-wait-weights-before-ready",
        "krul names the weights, and proves heads with them, before these have come",
    ),
    _flag("--delete-ckpt-after-loading", "krul names the weights by their files"),
    Rule(
        "--load-format dummy with endpoint, ssd_dir, mooncake or bucket",
        "servers of the real weights would find KV of random ones",
        ("load_format", "krul.endpoint", "krul.ssd_dir", "krul.mooncake", "krul.bucket"),
        lambda load_format, *shared: load_format == "dummy" and any(shared),
        ("dummy", "", "/kv", "", ""),
    ),
    _flag("--enable-return-routed-experts", _BY_SLOT),
    _flag("--enable-return-indexer-topk", _BY_SLOT),
    _flag("--kv-canary", "its marks are not restored with the KV", example="log", applies=_is_named),
)
"""About server arguments, as given or resolved, and krul's own options, ``krul.*``."""

MODEL_RULES = (
    _model("an encoder-decoder model", "cross attention has KV of its own", "is_encoder_decoder"),
    _model("an embedding model", "embedding models have no turns to restore", "is_embedding"),
    _model("a model with chunked or sparse attention", _FULL_ATTENTION, "has_partial_attention"),
    _model("a model with n-gram embeddings", "a head's first tokens lack theirs", "has_ngram_embedding"),
)
"""About the model: see ``model_facts``. What else is refused, below, is known only in the scheduler, when the
pool is built."""

FOREIGN_POOL = Refusal(
    "a KV pool that is not MHATokenToKVPool, MLATokenToKVPool or DSATokenToKVPool",
    "other sparse and scaled KV is unknown to krul",
)
UNSEEN_INDEX = Refusal(
    "attention that chooses tokens by an index (DSA: DeepSeek-V3.2, GLM-5)",
    "krul can copy its pool, but was never tried on a server: the kernels need a GPU",
)
LATENT_STRATEGY = Refusal(
    "latent KV (MLA) and a strategy that looks at attention, but "
    '"subspace" with DeepSeek-V2, V3, Kimi-K2 and GLM-4.7-Flash',
    'its attention is not recorded, and bases are learned of these models alone: leave strategy = "none"',
)
MEDIA_STRATEGY = Refusal(
    'a vision or audio model and a strategy that looks at attention, but "subspace" with one that only sees',
    'its text is read again without images and sounds: leave strategy = "none"',
)
STATE_STRATEGY = Refusal(
    "a Mamba or hybrid model and a strategy that looks at attention, other than "
    '"subspace" with LFM2, Qwen3-Next, Nemotron-H, Mellum and gpt-oss (without --disable-hybrid-swa-memory)',
    "layers without attention, or with windows in a pool of their own, are not seen by it, and bases are "
    'learned of these models alone: leave strategy = "none"',
)
STATE_SESSIONS = Refusal(
    "a Mamba or hybrid model and --enable-streaming-session",
    "states and windows are stored at the ends of turns, as the radix tree has them",
)
WINDOW_DRAFTS = Refusal("a draft model with a pool of windows", "of drafts no windows are stored")
TREES_AS_CHAINS = Refusal(
    "recurrent layers and --speculative-algorithm NGRAM with --speculative-ngram-max-bfs-breadth 1, or "
    "convolutions alone and drafts in trees",
    "SGLang computes these layers as if each draft followed the one before it, also where drafts part (those "
    "of NGRAM do with any breadth): its states, and answers, are wrong",
)
FOREIGN_STATE = Refusal(
    "a Mamba or hybrid model whose layers keep more than one convolution and one recurrent state",
    "krul stores these two",
)
FOREIGN_LAYOUT = Refusal("a KV pool that is not laid out by token", "krul copies whole tokens")
FOREIGN_ELEMENTS = Refusal("--kv-cache-dtype resolved from the checkpoint", "krul knows no such elements")
FOREIGN_SCALES = Refusal(
    "--kv-cache-dtype fp8_* with scales in the checkpoint",
    "only --attention-backend flashinfer, triton and fa3 are known to write and read by them",
)
SCALED_BASES = Refusal(
    'strategy = "subspace" and --kv-cache-dtype fp8_* with scales in the checkpoint',
    "bases know KV without scales",
)
FOREIGN_ROTARY = Refusal(
    'strategy = "subspace" and a rotary embedding that cannot be taken off keys',
    "bases are learned from keys without it",
)
NOT_MOVABLE = Refusal(
    "truncation_reuse = true, and heads or keys that it needs",
    "what is before a moved run is recomputed as heads, and its keys are turned to other positions",
)

SMALL_PAGES = (
    "krul: --page-size 1 makes a key of every token, and lookups and manifests that much larger; "
    "set --page-size 16 or more"
)
"""A warning, not a refusal."""


def flags_of(server_args: Any, config: KrulConfig) -> dict[str, Any]:
    """The values that ``check_flags`` looks at.

    Raises AttributeError if SGLang dropped one of these arguments: a rule that looks at nothing is no rule.
    """
    names = {name for rule in LAUNCH_RULES for name in rule.fields if not name.startswith("krul.")}
    return {name: getattr(server_args, name) for name in names} | options_of(config)


def options_of(config: KrulConfig) -> dict[str, Any]:
    """Krul's options under the names by which rules know them."""
    return {f"krul.{name}": value for name, value in config.as_dict().items()}


def check_flags(values: Mapping[str, Any]) -> None:
    """``values``: server arguments by field name, as given (``flags_of``) or resolved, and ``options_of``.

    Raises:
        UnsupportedSetupError: one line that names the flag and why.
    """
    for rule in LAUNCH_RULES:
        met = [values[name] for name in rule.fields]
        if rule.applies(*met):
            raise rule.error("set to " + ", ".join(repr(value) for value in met))


def model_facts(model: Any) -> dict[str, bool]:
    """What ``MODEL_RULES`` ask, read from SGLang's ``ModelConfig``."""
    hf_config = model.hf_config
    return {
        "is_encoder_decoder": model.is_encoder_decoder,
        "is_embedding": not model.is_generation,
        "has_partial_attention": model.is_local_attention_model
        or any(getattr(hf_config, name, None) for name in ("dual_chunk_attention_config", "sparse_config")),
        "has_ngram_embedding": model.use_ngram_embedding,
    }


def takes_media(model: Any) -> bool:
    """Whether a model (SGLang's ``ModelConfig``) takes images or sounds beside text."""
    return bool(
        model.is_multimodal
        or model.is_audio_model
        or model.is_image_understandable_model
        or model.is_audio_understandable_model
    )


def check_model(facts: Mapping[str, bool], name: str) -> None:
    """``name``: what the message calls the model.

    Raises:
        UnsupportedSetupError: for models whose KV is not one full-attention pool of the tokens' ids.
    """
    for rule in MODEL_RULES:
        if rule.applies(*(facts[fact] for fact in rule.fields)):
            raise rule.error(name)
