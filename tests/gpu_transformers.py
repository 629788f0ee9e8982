"""The kernel against transformers on one GPU: `python tests/gpu_transformers.py SNAPSHOT DIR`.

transformers runs in fp32 on the snapshot's weights, those of the FFNs quantised and dequantised as
the artifact holds them, and rounds to bf16 what the kernel's cache holds in bf16. So what differs
is the kernel's arithmetic. Prints one JSON object; exits 1 if a position fails.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.gate import gate_positions
from dsv2mk.runner.session import GpuOptions, open_gpu


def through_fp8(weight: Tensor) -> Tensor:
    """[rows, columns] quantised in blocks of 128 x 128 and dequantised; fp32."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.double(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(len(padded) // 128, 128, -1, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    scale = torch.where(amax > 448 * scale, 2 * scale, scale)  # log2 may round
    scale = torch.where(amax <= 224 * scale, scale / 2, scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    values = (blocks / scale).float().to(torch.float8_e4m3fn).double() * scale
    return values.view(padded.shape)[:rows, :columns].float()


def load_model(snapshot: Path, device: torch.device) -> DeepseekV2ForCausalLM:
    config = json.loads((snapshot / "config.json").read_text())
    with torch.device(device):
        model = DeepseekV2ForCausalLM._from_config(
            DeepseekV2Config.from_dict(config),
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
    state = model.state_dict()
    for file in sorted(snapshot.glob("*.safetensors")):
        with safe_open(file, "pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                value = tensors.get_tensor(name).float()
                if ".mlp." in name and "_proj.weight" in name:
                    value = through_fp8(value)
                _place(state, name, value)
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.kv_a_layernorm.register_forward_hook(lambda _, __, out: out.bfloat16().float())
    rotate = modeling_deepseek_v2.apply_rotary_emb

    def rounded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(*args, **kwargs)
        return q, k.bfloat16().float()

    modeling_deepseek_v2.apply_rotary_emb = rounded
    return model


def _place(state: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Copy by the checkpoint's name; transformers keeps a layer's experts in two tensors."""
    if ".experts." not in name:
        state[name].copy_(value)
        return
    prefix, rest = name.split(".experts.")
    expert, kind, _ = rest.split(".")
    if kind == "down_proj":
        state[f"{prefix}.experts.down_proj"][int(expert)].copy_(value)
    else:
        half = state[f"{prefix}.experts.gate_up_proj"][int(expert)]
        start = 0 if kind == "gate_proj" else len(value)
        half[start : start + len(value)].copy_(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--cubin", type=Path)
    parser.add_argument("--positions", type=int, default=64)
    args = parser.parse_args()
    artifact = Artifact.open(args.artifact)
    generator = torch.Generator().manual_seed(0)
    vocabulary = artifact.manifest.geometry.vocab_size
    tokens = torch.randint(vocabulary, (args.positions,), generator=generator).tolist()
    device = torch.device("cuda", 0)
    with torch.no_grad():
        model = load_model(args.snapshot, device)
        wanted = model(torch.tensor([tokens], device=device), use_cache=False).logits[0].cpu()
    del model
    torch.cuda.empty_cache()
    options = GpuOptions(cubin=args.cubin, context=None, ctas=0, timeout=10.0, verify="none")
    decoder = open_gpu(artifact, options, tokens=len(tokens))
    decoder.reset(noise=1)
    verdict = gate_positions(decoder, tokens, list(wanted))
    data = {**verdict.data, "failures": verdict.failures, "digest": artifact.manifest.digest}
    print(json.dumps({**data, "kernel_key": decoder.sidecar.kernel_key}))
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
