"""The model's shape, read from a Hugging Face `config.json`. Nothing else knows model numbers.

Field names are the hub's own, so that one name serves config.json, the manifest and the code. A
field that changes the result is either supported or refused by name; it is never ignored.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from dsv2mk.manifests.errors import InputError, UsageError
from dsv2mk.manifests.scheme import BLOCK

#: The RMSNorms of the two latents (q_a, kv_a) take their default epsilon in the published model
#: code, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6

#: All that a supported checkpoint may state in fields that would change the computation.
_FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("deepseek_v2",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "norm_topk_prob": (False, None),
    "moe_layer_freq": (1, None),
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", "group_limited_greedy"),
}

#: Far above any model, and low enough that a damaged number cannot keep a machine busy.
_MOST = {"num_hidden_layers": 1000, "num_attention_heads": 4096, "n_routed_experts": 4096}

_ROPE_KEYS = frozenset(
    (
        *("rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Yarn:
    """YaRN context extension, from `rope_scaling` or `rope_parameters`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def __post_init__(self) -> None:
        _require(self, "factor", self.factor >= 1, "at least 1")
        original = self.original_max_position_embeddings
        _require(self, "original_max_position_embeddings", original >= 1, "at least 1")
        _require(self, "beta_slow", self.beta_slow > 0, "more than 0")
        _require(self, "beta_fast", self.beta_fast >= self.beta_slow, "at least beta_slow")
        _require(self, "mscale", self.mscale > 0, "more than 0")
        _require(self, "mscale_all_dim", self.mscale_all_dim >= 0, "at least 0")

    def magnitude(self, mscale: float) -> float:
        """m(mscale) = 0.1 * mscale * ln(factor) + 1, and 1 where the factor is at most 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Geometry:
    """Shape of a DeepSeek-V2 model; field names as in the hub's config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: one q_proj straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int  # of the dense FFN in the first layers
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int  # 1 for greedy routing
    topk_group: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    yarn: Yarn | None
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least = 0 if field.name == "first_k_dense_replace" else 1
            most = _MOST.get(field.name, 1 << 40)
            if field.type is float:
                _require(self, field.name, value > 0, "more than 0")
            else:
                _require(self, field.name, least <= value <= most, f"{least} to {most}")
        _require(self, "rope_theta", self.rope_theta > 1, "more than 1")
        layers, experts = self.num_hidden_layers, self.n_routed_experts
        dense = self.first_k_dense_replace
        _require(self, "first_k_dense_replace", dense <= layers, f"at most the {layers} layers")
        _require(self, "qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "an even number")
        divides = experts % self.n_group == 0
        _require(self, "n_group", divides, f"a divisor of n_routed_experts ({experts})")
        groups = self.n_group
        _require(self, "topk_group", self.topk_group <= groups, f"at most n_group ({groups})")
        usable = self.topk_group * self.experts_per_group
        _require(
            self,
            "num_experts_per_tok",
            self.num_experts_per_tok <= usable,
            f"at most the {usable} experts of the groups that a token may use",
        )

    # ---- derived quantities ----

    @property
    def experts_per_group(self) -> int:
        """Routed experts of one group."""
        return self.n_routed_experts // self.n_group

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_in(self) -> int:
        """Columns of q_b: the query latent, or the hidden state where q_lora_rank is null."""
        return self.hidden_size if self.q_lora_rank is None else self.q_lora_rank

    @property
    def qkv_a_rows(self) -> int:
        """Rows of the fused q_a/kv_a projection: q_lora (if any) + kv_lora + rope."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values that a token leaves in a layer's cache: kv_lora + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_width(self) -> int:
        """Intermediate width of the shared experts together."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def num_moe_layers(self) -> int:
        """Layers with a router."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one dense FFN instead of experts."""
        return layer < self.first_k_dense_replace

    @property
    def expert_units(self) -> int:
        """Units of one routed expert."""
        return units_of(self.moe_intermediate_size)

    @property
    def routed_units(self) -> int:
        """Units of all routed experts of a layer: the always-on ones come after them."""
        return self.n_routed_experts * self.expert_units

    @property
    def shared_units(self) -> int:
        """Units of the shared experts of a layer."""
        return units_of(self.shared_width)

    def layer_units(self, layer: int) -> int:
        """Units of a layer's whole FFN, over all ranks."""
        if self.is_dense(layer):
            return units_of(self.intermediate_size)
        return self.routed_units + self.shared_units

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2 * m(mscale_all_dim)^2: `mscale_all_dim`, never `mscale`."""
        m = 1.0 if self.yarn is None else self.yarn.magnitude(self.yarn.mscale_all_dim)
        return float(self.qk_head_dim**-0.5 * m * m)

    @property
    def rope_magnitude(self) -> float:
        """Factor on cos and sin: m(mscale) / m(mscale_all_dim)."""
        if self.yarn is None:
            return 1.0
        return self.yarn.magnitude(self.yarn.mscale) / self.yarn.magnitude(self.yarn.mscale_all_dim)

    def inverse_frequencies(self) -> list[float]:
        """Angle per position of each of the rope/2 pairs, in radians (YaRN, arXiv 2309.00071).

        A pair that turns more than beta_fast times within the original context keeps its
        frequency, one that turns less than beta_slow times is slowed down by `factor`, and a
        linear ramp over the pair's index joins them.
        """
        dim = self.qk_rope_head_dim
        plain = [self.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
        if self.yarn is None:
            return plain
        yarn = self.yarn

        def pair_turning(times: float) -> float:
            length = yarn.original_max_position_embeddings
            return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
        width = high - low or 0.001
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
        return [f * (1 - r) + f / yarn.factor * r for f, r in zip(plain, ramp, strict=True)]

    # ---- config.json ----

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """Read a parsed config.json.

        Raises InputError, naming the field, for one that is missing, of the wrong type, or of a
        value that is not supported.
        """
        for name, allowed in _FIXED.items():
            value = config.get(name, "greedy" if name == "topk_method" else allowed[-1])
            if value not in allowed:
                raise InputError(
                    f"config.json: {name} is not supported",
                    expected=" or ".join(json.dumps(v) for v in allowed if v is not None),
                    found=_shown(value),
                )
        heads = _number(config, "num_attention_heads", int)
        if config.get("num_key_value_heads") not in (None, heads):
            raise InputError(
                "config.json: num_key_value_heads is not supported",
                expected=f"num_attention_heads ({heads})",
                found=_shown(config["num_key_value_heads"]),
            )
        grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
        q_lora = None if config.get("q_lora_rank") is None else _number(config, "q_lora_rank", int)
        theta, yarn = _read_rope(config)
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise InputError(
                "config.json: tie_word_embeddings", expected="a boolean", found=_shown(tied)
            )
        read = {
            field.name: _number(config, field.name, int if field.type is int else float)
            for field in fields(cls)
            if field.type in (int, float)
            and field.name not in ("n_group", "topk_group", "rope_theta")
        }
        return cls(
            **read,
            q_lora_rank=q_lora,
            n_group=_number(config, "n_group", int) if grouped else 1,
            topk_group=_number(config, "topk_group", int) if grouped else 1,
            rope_theta=theta,
            yarn=yarn,
            tie_word_embeddings=tied,
        )

    # ---- manifest ----

    def to_json(self) -> dict[str, Any]:
        """Canonical form: no floats; a real number is the shortest string that reads back to it."""
        return _to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Geometry":
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on another form."""
        values = dict(data)
        yarn = values.pop("yarn")
        return cls(
            **_from_json(cls, values),
            yarn=None if yarn is None else Yarn(**_from_json(Yarn, yarn)),
        )


def units_of(width: int) -> int:
    """Number of 128-wide units in an intermediate width; the last may be padded."""
    return -(-width // BLOCK)


def preset_config(name: str) -> dict[str, Any]:
    """The config.json of a preset: tiny, deepseek-v2, deepseek-v2.5 or deepseek-v2-lite."""
    folder = files("dsv2mk.manifests") / "presets"
    try:
        text = (folder / f"{name}.json").read_text(encoding="utf-8")
    except OSError:
        raise UsageError(
            "unknown geometry preset", expected=", ".join(preset_names()), found=name
        ) from None
    config: dict[str, Any] = json.loads(text)
    return config


def preset_names() -> list[str]:
    """Names that `preset_config` knows, sorted."""
    folder = files("dsv2mk.manifests") / "presets"
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def _number(config: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    """A finite number of config.json; an int where `kind` is int, else int or float as float."""
    value = config.get(name)
    if value is None:
        raise InputError(f"config.json: {name} is missing")
    if type(value) is int or (kind is float and type(value) is float):
        try:
            number = kind(value)
            if math.isfinite(number):
                return number
        except OverflowError:
            pass
    expected = "an integer" if kind is int else "a finite number"
    raise InputError(f"config.json: {name}", expected=expected, found=_shown(value))


def _read_rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """(theta, YaRN or None), from either spelling: `rope_scaling` or `rope_parameters`."""
    theta = {"rope_theta": config.get("rope_theta", 10000.0)}
    given = [config[k] for k in ("rope_parameters", "rope_scaling") if config.get(k) is not None]
    if bad := [value for value in given if not isinstance(value, Mapping)]:
        raise InputError("config.json: rope_scaling", expected="an object", found=_shown(bad[0]))
    spelled = [
        {"rope_type" if key == "type" else key: value for key, value in {**theta, **one}.items()}
        for one in given
    ]
    scaling = spelled[0] if spelled else theta
    if any(other != scaling for other in spelled):
        raise InputError(
            "config.json has rope_parameters and rope_scaling, and they differ",
            fix="Remove one of them",
        )
    base = _number(scaling, "rope_theta", float)
    for key, value in scaling.items():
        if key not in _ROPE_KEYS and value is not None:
            raise InputError(f"config.json: rope_scaling: {key} is not supported")
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return base, None
    if kind != "yarn":
        raise InputError(
            "config.json: rope type is not supported",
            expected='"default" or "yarn"',
            found=_shown(kind),
        )
    values = {"beta_fast": 32.0, "beta_slow": 1.0, **scaling}
    if "mscale" not in scaling and "mscale_all_dim" not in scaling:
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    elif 0 in (scaling.get("mscale"), scaling.get("mscale_all_dim")):
        raise InputError(
            "config.json: mscale and mscale_all_dim",  # one alone means different things to readers
            expected="both more than 0, or neither given",
            found=f"{_shown(scaling.get('mscale'))} and {_shown(scaling.get('mscale_all_dim'))}",
        )
    return base, Yarn(
        factor=_number(values, "factor", float),
        original_max_position_embeddings=_number(values, "original_max_position_embeddings", int),
        beta_fast=_number(values, "beta_fast", float),
        beta_slow=_number(values, "beta_slow", float),
        mscale=_number(values, "mscale", float),
        mscale_all_dim=_number(values, "mscale_all_dim", float),
    )


def _require(record: object, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"config.json: {name}", expected=expected, found=getattr(record, name))


def _shown(value: object) -> str:
    """A JSON value for a message: short, and not deeper than its type."""
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _to_json(record: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):
            value = repr(value)
        elif isinstance(value, Yarn):
            value = _to_json(value)
        out[field.name] = value
    return out


def _from_json(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Values for `cls(...)`: exactly its plain fields, each of its type."""
    plain = {field.name: field.type for field in fields(cls) if field.name != "yarn"}
    if set(data) != set(plain):
        raise ValueError(f"fields {sorted(set(data) ^ set(plain))}")
    out: dict[str, Any] = {}
    for name, value in data.items():
        kind = plain[name]
        if kind is float:
            number = float(value) if isinstance(value, str) else math.nan
            if not math.isfinite(number) or repr(number) != value:
                raise ValueError(f"{name}: {value!r}")
            out[name] = number
        elif kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name}: {value!r}")
            out[name] = value
        elif (value is None and kind is not int) or type(value) is int:
            out[name] = value
        else:
            raise ValueError(f"{name}: {value!r}")
    return out
