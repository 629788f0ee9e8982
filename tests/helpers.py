"""Geometries, snapshots and artifacts for the tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.geometry import preset_config
from dsv2mk.pipeline.build import build
from dsv2mk.pipeline.snapshot import Snapshot
from dsv2mk.pipeline.synth import synth

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The preset `tiny` with some fields changed; a change of heads sets the kv heads too."""
    config = {**preset_config("tiny"), **changes}
    config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def small_config(**changes: Any) -> dict[str, Any]:
    """A small geometry with 24 heads, which 1, 2, 3, 4, 6 and 8 divide; every width has an edge."""
    small = {
        "hidden_size": 192,
        "intermediate_size": 200,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 136,
        "n_group": 4,
        "n_routed_experts": 8,
        "num_attention_heads": 24,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_scaling": YARN,
        "topk_group": 2,
        "vocab_size": 301,
    }
    return tiny_config(**{**small, **changes})


def make_snapshot(path: Path, config: dict[str, Any], **options: Any) -> Path:
    """A synthetic checkpoint."""
    synth(path, config, **options)
    return path


def make_artifact(snapshot: Path, ranks: int, out: Path, **options: Any) -> Artifact:
    """Build and open an artifact."""
    build(Snapshot.open(snapshot), ranks, out, **{"workers": 2, **options})
    return Artifact.open(out)


def read_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    data = json.loads(path.read_text())
    for name, value in changes.items():
        data.pop(name, None)
        if value is not None:
            data[name] = value
    path.write_text(json.dumps(data))


def bf16_bits(values: torch.Tensor) -> np.ndarray:
    """A tensor's bf16 bits as uint16."""
    return values.to(torch.bfloat16).view(torch.uint16).numpy()
