"""The parameters of the kernel: what the runner hands over at a launch."""

#: Parameters of the kernel in order; the sidecar repeats them for the runner.
PARAMETERS = (
    ("replicated", "u64"),  # address of the data of the shard's part
    ("partitioned", "u64"),
    (
        "gate_up",
        "u64",
    ),  # addresses of the FFN units' tensors: their places differ from rank to rank
    ("gate_up_scale", "u64"),
    ("down", "u64"),
    ("down_scale", "u64"),
    ("cache", "u64"),  # [L, cache_tokens, cache_row] bf16
    ("workspace", "u64"),  # zeroed once; its counters go on over launches
    # [R] u64: each rank's workspace, its own at the address above. With multimem one more: the
    # multicast address of them all. (A parameter of its own would change every p2p kernel.)
    ("peers", "u64"),
    ("tokens", "u64"),  # [positions + 1] int32: fed, and chosen
    ("logits", "u64"),  # [v] fp32 of the last position; 0: not wanted
    ("status", "u64"),  # 16 int32 that the host sees: see hops.py
    ("times", "u64"),  # [steps + 1] int64, ns of the global timer; 0: not wanted
    ("marks", "u64"),  # [L + 1, hops, 2] int64: when CTA 0 arrived and went on; 0: not wanted
    ("cache_tokens", "i64"),  # tokens that a layer of the cache has room for
    ("trace", "i64"),  # bytes from one layer's exchange to the next: 0, or exchange_bytes
    ("timeout", "i64"),  # ns that a wait may take
    ("rank", "i32"),
    ("position", "i32"),  # of the first token
    ("steps", "i32"),  # tokens to decode
    ("known", "i32"),  # tokens [0, known) of `tokens` are given, later ones are chosen
    ("epoch", "i32"),  # tokens decoded since the workspace was zeroed
)
