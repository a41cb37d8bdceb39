"""The model's configuration, read once from config.json and validated whole.

Knows DeepSeek-V4 (flat file) and V4.1 (nested text_config / vision_config). Every number the weights
were trained with comes from the file; nothing is filled in from a published model, because a tiny
checkpoint with other constants (for instance fewer Sinkhorn iterations) must run with its own.
All problems of a file are reported together. Knows nothing of tensors: no torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from engine.api import EngineError
from engine.config_checks import CSA_RATIO, problems, wanted

Version = Literal["v4", "v4.1"]
Config = TypeVar("Config")


class ConfigError(EngineError):
    """A config.json that cannot be served.

    Args:
        source: the file, for the message.
        problems: one sentence per problem: field, value accepted, value seen.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Yarn:
    """YaRN on the rotary frequencies of compressed layers; no attention factor (model.md 2.3)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Engram:
    """Hashed n-gram tables of V4.1 (model.md 2.10).

    Args:
        layer_ids: layers whose streams receive the lookup before the attention site.
        num_embeddings: rows of each layer's table, the sum of its primes.
        max_ngram_size: longest n-gram, >= 2; orders 2..max are hashed.
        n_heads: hashes per order.
        head_dim: width of a row.
        vocab_size: the primes are the smallest unused ones from here upward.
        compressed_vocab_size: most folded token ids; bounds the multipliers.
        pad_token_id: token (before folding) that stands for what precedes the sequence.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int

    @property
    def history_len(self) -> int:
        """Earlier tokens a position looks at."""
        return self.max_ngram_size - 1

    @property
    def rows_per_token(self) -> int:
        """Table rows one token reads in one layer: orders times heads."""
        return self.history_len * self.n_heads

    @cached_property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """Moduli per layer, in (order, head) order; no prime is used twice in the model."""
        candidates = primes_from(self.vocab_size)
        return tuple(
            tuple(next(candidates) for _ in range(self.rows_per_token)) for _ in self.layer_ids
        )


@dataclass(frozen=True)
class Dspark:
    """Draft stages of V4.1 and of the later V4 releases (model.md 2.11)."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True)
class Layer:
    """What one backbone layer is, derived from the whole configuration.

    Args:
        index: number of the layer.
        ratio: tokens per compressed entry; 0 for a layer that has only its window.
        overlap: V4's CSA, whose entries also pool the group before.
        kv_source: layer whose compressed entries are attended, None without any.
        index_source: layer whose top-k choice applies; None when every visible entry is attended.
        owns_index_keys: whether this layer writes index keys.
        builds_candidates: whether it publishes the candidate groups.
        reads_candidates: whether its own choice is limited to them.
        hash_routed: whether experts are looked up by token id.
        engram: position in Engram.layer_ids, None without.
    """

    index: int
    ratio: int
    overlap: bool
    kv_source: int | None
    index_source: int | None
    owns_index_keys: bool
    builds_candidates: bool
    reads_candidates: bool
    hash_routed: bool
    engram: int | None

    @property
    def owns_entries(self) -> bool:
        """Whether this layer compresses tokens into entries of its own."""
        return self.kv_source == self.index

    @property
    def owns_index(self) -> bool:
        """Whether this layer chooses entries itself."""
        return self.index_source == self.index


@dataclass(frozen=True)
class ModelConfig:
    """A V4 or V4.1 text model. Field names are those of config.json.

    Sizes are in elements, positions in tokens. `compress_ratios` has one entry per backbone layer
    (the file's trailing zeros for draft stages are checked and cut). `image_token_id` is None where
    the model has no image token; `has_vision_config` says whether the file describes a tower.
    `weight_block_size` is the FP8 block of a quantised checkpoint, None for an unquantised one.

    Raises:
        ConfigError: listing every field that cannot be served.
    """

    version: Version
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    engram: Engram | None
    num_nextn_predict_layers: int
    dspark: Dspark | None
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None
    has_vision_config: bool
    weight_block_size: int | None

    def __post_init__(self) -> None:
        """Refuse a configuration the engine cannot run."""
        found = list(problems(self))
        if found:
            raise ConfigError("model configuration", found)

    @property
    def is_v41(self) -> bool:
        """Whether the V4.1 form applies: delayed pre, latents, no q head norm, no hc_head."""
        return self.version == "v4.1"

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint was made for FP8/FP4 arithmetic."""
        return self.weight_block_size is not None

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The backbone, layer by layer (ownership: model.md 2.9)."""
        return tuple(self._layer(index) for index in range(self.num_hidden_layers))

    def _layer(self, index: int) -> Layer:
        ratio = self.compress_ratios[index]
        engram = self.engram.layer_ids if self.engram else ()
        kv_source = index_source = None
        owns_index_keys = builds = reads = False
        if ratio and self.is_v41:
            kv_source = max(i for i in self.kv_source_layer_ids if i <= index)
            index_source = max((i for i in self.index_source_layer_ids if i <= index), default=None)
            owns_index_keys = kv_source == index and bool(self.index_source_layer_ids)
            candidates = self.candidate_source_layer_id
            builds = candidates == index
            reads = candidates is not None and index_source == index > candidates
        elif ratio:
            kv_source = index
            if ratio == CSA_RATIO:
                index_source, owns_index_keys = index, True
        return Layer(
            index=index,
            ratio=ratio,
            overlap=bool(ratio) and not self.is_v41 and ratio == CSA_RATIO,
            kv_source=kv_source,
            index_source=index_source,
            owns_index_keys=owns_index_keys,
            builds_candidates=builds,
            reads_candidates=reads,
            hash_routed=index < self.num_hash_layers,
            engram=engram.index(index) if index in engram else None,
        )

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read config.json, or the config.json of a folder.

        Raises:
            ConfigError: the file is absent, is no JSON object, or cannot be served.
        """
        return read_config_file(path, cls.from_dict)

    @classmethod
    def from_dict(cls, data: Any) -> ModelConfig:
        """Build from the parsed file.

        Raises:
            ConfigError: listing every missing, mistyped or unsupported field.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("config", [f"expected a JSON object, got {type(data).__name__}"])
        model_type = data.get("model_type")
        versions: dict[Any, Version] = {
            "deepseek_v4": "v4",
            "deepseek_v41": "v4.1",
            "deepseek_v41_text": "v4.1",
        }
        if model_type not in versions:
            raise ConfigError("config", [f"model_type: {wanted(list(versions), model_type)}"])
        version = versions[model_type]
        text = data.get("text_config", data)
        if not isinstance(text, Mapping):
            raise ConfigError("config", [f"text_config: {wanted('an object', text)}"])
        fields = _Fields(text, "text_config." if text is not data else "")
        values = _read(fields, version, data)
        if fields.problems:
            raise ConfigError("config", fields.problems)
        return cls(**values)


def read_config_file(path: Path | str, build: Callable[[Any], Config]) -> Config:
    """Build a configuration from config.json, or the config.json of a folder.

    Args:
        path: file or folder.
        build: makes it of the parsed file.

    Raises:
        ConfigError: the file is absent, is no JSON object, or cannot be served; names the file.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        found = "file not found" if path.suffix == ".json" else "there is no such folder"
        raise ConfigError(str(path), [found]) from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(str(path), [f"not JSON: {error}"]) from None
    except OSError as error:
        raise ConfigError(str(path), [str(error.strerror)]) from None
    try:
        return build(data)
    except ConfigError as error:
        raise ConfigError(str(path), error.problems) from None


def primes_from(start: int) -> Iterator[int]:
    """Primes >= start, ascending, by trial division (table sizes stay below 2**31)."""
    number = max(start, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


class _Fields:
    """Typed access to a JSON object that writes down what is wrong instead of stopping."""

    def __init__(self, data: Mapping[str, Any], prefix: str) -> None:
        self.data = data
        self.prefix = prefix
        self.problems: list[str] = []

    def note(self, name: str, expected: object, got: object) -> None:
        self.problems.append(f"{self.prefix}{name}: {wanted(expected, got)}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.note(name, "an integer", value)
            return 1
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.data.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.note(name, "a number", value)
            return 1.0
        return float(value)

    def integers(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        value = self.data.get(name, default)
        if not isinstance(value, Sequence) or not all(type(item) is int for item in value):
            self.note(name, "a list of integers", value)
            return ()
        return tuple(value)

    def must_be(self, name: str, *accepted: object) -> None:
        """Accept a switch only in the positions we know; absent means the first."""
        value = self.data.get(name, accepted[0])
        if value not in accepted:
            self.note(name, " or ".join(map(repr, accepted)), value)


def _read(fields: _Fields, version: Version, top: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ModelConfig; problems are left in `fields`."""
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    fields.must_be("tie_word_embeddings", False)
    fields.must_be("num_key_value_heads", 1)
    fields.must_be("n_shared_experts", 1)
    fields.must_be("scoring_func", "sqrtsoftplus")
    fields.must_be("topk_method", "noaux_tc", "noaux_tc_for_vl")
    fields.must_be("norm_topk_prob", True)
    fields.must_be("gate_temp", 1, 1.0)
    plain = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
        "q_lora_rank o_lora_rank o_groups sliding_window n_routed_experts num_experts_per_tok "
        "moe_intermediate_size max_position_embeddings hc_mult hc_sinkhorn_iters bos_token_id"
    )
    values: dict[str, Any] = {name: fields.integer(name) for name in plain.split()}
    for name in ("routed_scaling_factor", "swiglu_limit", "rope_theta", "compress_rope_theta"):
        values[name] = fields.number(name)
    for name in ("rms_norm_eps", "hc_eps"):
        values[name] = fields.number(name)
    values["version"] = version
    values["num_hash_layers"] = fields.integer("num_hash_layers", 0)
    values["num_nextn_predict_layers"] = fields.integer("num_nextn_predict_layers", 0)
    values["pad_token_id"] = fields.optional_integer("pad_token_id")
    eos = fields.data.get("eos_token_id")
    values["eos_token_ids"] = (
        fields.integers("eos_token_id")
        if isinstance(eos, list)
        else (fields.integer("eos_token_id"),)
    )
    image = _Fields({**top, **fields.data}, "")
    values["image_token_id"] = image.optional_integer("image_token_id")
    fields.problems += image.problems
    values["has_vision_config"] = top.get("vision_config") is not None
    values["compress_ratios"] = _ratios(fields, values)
    values["yarn"] = _yarn(fields)
    values["weight_block_size"] = _quantisation(fields, top)
    values["dspark"] = _dspark(fields, values)
    v41 = version == "v4.1"
    indexed = (
        bool(fields.data.get("index_source_layer_ids"))
        if v41
        else (CSA_RATIO in values["compress_ratios"])
    )
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        values[name] = fields.integer(name, None if indexed else 1)
    values["kv_source_layer_ids"] = fields.integers("kv_source_layer_ids") if v41 else ()
    values["index_source_layer_ids"] = fields.integers("index_source_layer_ids", ()) if v41 else ()
    source = fields.optional_integer("candidate_source_layer_id") if v41 else None
    values["candidate_source_layer_id"] = source
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        values[name] = fields.integer(name, 1 if source is None else None)
    values["engram"] = _engram(fields) if v41 and fields.data.get("engram_layer_ids") else None
    return values


def _ratios(fields: _Fields, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Backbone ratios; the trailing zeros of the draft stages are checked and dropped."""
    ratios = fields.integers("compress_ratios")
    layers: int = values["num_hidden_layers"]
    drafts: int = values["num_nextn_predict_layers"]
    if len(ratios) != layers + drafts or any(ratios[layers:]):
        fields.note(
            "compress_ratios",
            f"{layers} entries for the layers and {drafts} zeros for the draft stages",
            list(ratios),
        )
        return (0,) * layers
    return ratios[:layers]


def _yarn(fields: _Fields) -> Yarn | None:
    scaling = fields.data.get("rope_scaling")
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        fields.note("rope_scaling", "an object or null", scaling)
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        fields.note("rope_scaling.rope_type", "'yarn'", kind)
        return None
    inner = _Fields(scaling, f"{fields.prefix}rope_scaling.")
    yarn = Yarn(
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast", 32),
        beta_slow=inner.number("beta_slow", 1),
    )
    fields.problems += inner.problems
    return yarn


def _quantisation(fields: _Fields, top: Mapping[str, Any]) -> int | None:
    quantisation = fields.data.get("quantization_config", top.get("quantization_config"))
    if quantisation is None:
        return None
    if not isinstance(quantisation, Mapping):
        fields.note("quantization_config", "an object or null", quantisation)
        return None
    inner = _Fields(quantisation, "quantization_config.")
    inner.must_be("quant_method", "fp8")
    inner.must_be("fmt", "e4m3")
    inner.must_be("scale_fmt", "ue8m0")
    inner.must_be("activation_scheme", "dynamic")
    block = inner.integers("weight_block_size")
    if not inner.problems and (len(block) != 2 or block[0] != block[1] or block[0] < 1):
        inner.note("weight_block_size", "two equal positive integers", list(block))
    fields.problems += inner.problems
    return block[0] if block else 1


def _engram(fields: _Fields) -> Engram:
    return Engram(
        layer_ids=fields.integers("engram_layer_ids"),
        num_embeddings=fields.integers("engram_num_embeddings"),
        max_ngram_size=fields.integer("engram_max_ngram_size"),
        n_heads=fields.integer("engram_n_heads"),
        head_dim=fields.integer("engram_head_dim"),
        vocab_size=fields.integer("engram_vocab_size"),
        compressed_vocab_size=fields.integer("engram_compressed_vocab_size"),
        pad_token_id=fields.integer("engram_pad_token_id"),
    )


def _dspark(fields: _Fields, values: Mapping[str, Any]) -> Dspark | None:
    """DSpark stages where the file names a block size; else the draft stage is V4's MTP."""
    if fields.data.get("dspark_block_size") is None:
        return None
    return Dspark(
        block_size=fields.integer("dspark_block_size"),
        noise_token_id=fields.integer("dspark_noise_token_id"),
        target_layer_ids=fields.integers("dspark_target_layer_ids"),
        markov_rank=fields.integer("dspark_markov_rank"),
        n_routed_experts=fields.integer("dspark_n_routed_experts", values["n_routed_experts"]),
        num_experts_per_tok=fields.integer(
            "dspark_num_experts_per_tok", values["num_experts_per_tok"]
        ),
    )
