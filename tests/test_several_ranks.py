"""A rank among several, as seen from one process: its decoder, and what torchrun tells it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ranks as ranks_module
import torch
from helpers import tiny_config
from ranks import Event, Launches, host_decoder

from dsv2mk.manifests.errors import NodeError, PeerError, StuckError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.runner.world import Shared, World

GEOMETRY = Geometry.from_config(tiny_config())  # 4 layers, 8 heads, 500 tokens
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched has ended at once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "kernel", Launches())


# ---- the decoder of a rank ----


class Several(World):
    """A rank of a world whose other ranks are only their memory. Notes what they are told."""

    def __init__(self, rank: int = 0, size: int = 4, failed: str | None = None) -> None:
        super().__init__(rank, size)
        self.told: list[Any] = []
        self.failed = failed

    def order(self, name: str, args: Any = (), given: Any = None) -> None:
        self.told.append([name, list(args), given or {}])

    def failure(self) -> str | None:
        return self.failed

    def share(self, size: int, device: Any, *, multicast: bool = False) -> Shared:
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.size)]
        addresses = [one.data_ptr() for one in self.memory]
        return Shared(
            own=self.memory[self.rank],
            addresses=addresses,
            multicast=4711 if multicast else 0,
            of=self.memory.__getitem__,
        )


def several(rank: int = 0, ranks: int = 4, failed: str | None = None, **given: Any) -> Any:
    world = Several(rank, ranks, failed)
    return host_decoder(Launches(), GEOMETRY, ranks=ranks, world=world, **given), world


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_hands_over_its_own_memory_and_where_that_of_all_is(rank: int) -> None:
    decoder, world = several(rank, 8)
    decoder._launch(1, False)
    ((_, call),) = decoder.kernel.calls
    own = world.memory[rank].data_ptr()
    assert (call["rank"], call["workspace"]) == (rank, own)
    assert call["logits"] == own + 512 + 5 * 1024  # past an exchange of each layer, and one more
    assert len(world.memory[rank]) == 512 + 5 * 1024 + 4 * 63  # an eighth of the rows, rounded up
    assert decoder._peers.tolist() == [one.data_ptr() for one in world.memory]
    assert call["peers"] == decoder._peers.data_ptr()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_loopback_is_its_own_peer(ranks: int) -> None:
    decoder = host_decoder(Launches(), GEOMETRY, ranks=ranks)
    assert decoder._peers.tolist() == [decoder._workspace.data_ptr()] * ranks
    decoder._launch(1, False)
    assert decoder.kernel.calls[0][1]["rank"] == 0
    assert decoder.logits.shape == (-(-500 // ranks),)
    assert decoder.ranks_differ() is None


def test_a_multicast_address_follows_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ranks_module.make_sidecar
    monkeypatch.setattr(
        ranks_module, "make_sidecar", lambda *a, **g: replace(made(*a, **g), collective="multimem")
    )
    decoder, world = several()
    assert decoder._peers.tolist() == [*(one.data_ptr() for one in world.memory), 4711]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_logits_are_those_of_all_ranks_in_order_without_padding(ranks: int) -> None:
    decoder, world = several(ranks=ranks)
    rows = -(-500 // ranks)
    for rank, memory in enumerate(world.memory):
        memory[512 + 5 * 1024 :].view(torch.float32).copy_(torch.arange(rows) + rows * rank)
    assert decoder.logits.tolist() == list(range(500))


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(("name", "place"), [("o", 512), ("o", 591), ("down", 768), ("down", 847)])
def test_a_byte_that_differs_names_rank_layer_and_hop(
    trace: bool, layer: int, name: str, place: int
) -> None:
    """Rows of 5 words of each of 4 ranks; without a trace there is but one exchange."""
    decoder, world = several(trace=trace)
    for memory in world.memory:
        memory.copy_(torch.arange(len(memory)) % 251)
    assert decoder.ranks_differ() is None
    world.memory[2][512 + layer * 1024 * trace + place] ^= 1
    assert decoder.ranks_differ() == f"rank 2 has another {name} of layer {layer * trace}"
    world.memory[1][512 + place] ^= 128
    assert decoder.ranks_differ() == f"rank 1 has another {name} of layer 0"


def test_what_rank_0_does_is_told_to_all_ranks(events: None) -> None:
    decoder, world = several()
    decoder.reset()
    decoder.reset(noise=5)
    decoder.skip(3, seed=2)
    decoder.feed([7, 8])
    decoder.run(2, timed=True)
    decoder.marked_step()
    assert world.told == [
        ["reset", [], {}],
        ["reset", [], {"noise": 5}],
        ["skip", [3], {"seed": 2}],
        ["place", [[7, 8]], {}],
        ["run", [2], {}],
        ["run", [2], {"timed": True}],
        ["run", [1], {"marked": True}],
    ]
    follower, other = several(rank=1)
    other.orders = lambda: iter(world.told)
    assert follower.follow()
    assert follower.position == decoder.position == 8
    assert torch.equal(follower.cache, decoder.cache)
    mine, theirs = (one.kernel.calls for one in (decoder, follower))
    for name in ("position", "steps", "known", "epoch", "trace", "timeout", "cache_tokens"):
        assert [call[name] for _, call in mine] == [call[name] for _, call in theirs]
    assert [bool(call["marks"]) for _, call in theirs] == [False, False, True]


def test_rank_0_dismisses_the_others_once() -> None:
    decoder, world = several()
    assert not decoder.follow()
    with decoder:
        decoder.dismiss()
    assert world.told == [["end", [], {}]]
    decoder, world = several()
    with pytest.raises(ZeroDivisionError), decoder:
        _ = 1 // 0
    assert world.told == []  # they see that it has failed


@pytest.mark.parametrize("failed", [None, "rank 1 (process 12) has ended"])
def test_a_kernel_that_gave_up_is_the_peer_s_fault_if_one_has_failed(
    failed: str | None, events: None
) -> None:
    decoder, _ = several(failed=failed)
    decoder._workspace.fill_(1)
    decoder._status[:9] = torch.tensor([1, 0, 17, 3, 2, 1, 8, 120, 119])
    where = "at position 8: rank 0, CTA 17, warp 3 waited in layer 2 for q: expected 120, found 119"
    with pytest.raises(PeerError if failed else StuckError) as stuck:
        decoder._wait(4)
    before = f"{failed}; " if failed else ""
    assert str(stuck.value) == f"{before}the kernel gave up after 2.5 s {where}"
    assert decoder._workspace.all()  # others may still write to it
    assert not decoder._status.any()


@pytest.mark.parametrize("failed", [None, "rank 1 (process 12) has ended"])
def test_a_device_that_fails_is_the_peer_s_fault_if_one_has_failed(
    failed: str | None, events: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(Event, "query", broken)
    decoder, _ = several(failed=failed)
    with pytest.raises(PeerError if failed else RuntimeError) as told:
        decoder.feed([1])
    line = "CUDA error: an illegal memory access"
    if failed:
        assert str(told.value) == f"{failed}; {line}"


# ---- torchrun's variables ----

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set torchrun's; None leaves one out."""

    def change(**changes: str | None) -> None:
        for name in VARIABLES:
            value = {**GOOD, **changes}.get(name)
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", ["x", "", "-1", "1.0", "0x1"])
def test_variables_that_are_no_numbers_are_refused(
    name: str, value: str, variables: Callable[..., None]
) -> None:
    variables(**{name: value})
    with pytest.raises(UsageError, match=r"WORLD_SIZE and LOCAL_RANK.* as torchrun sets them"):
        World.join()


@pytest.mark.parametrize(
    "changes", [{"WORLD_SIZE": "0"}, {"WORLD_SIZE": "0", "RANK": "0"}, {"RANK": "2"}]
)
def test_a_rank_that_the_world_has_no_place_for_is_refused(
    changes: dict[str, str], variables: Callable[..., None]
) -> None:
    variables(**changes)
    with pytest.raises(UsageError, match="WORLD_SIZE and LOCAL_RANK"):
        World.join()


@pytest.mark.parametrize("local", ["1", "3"])
def test_several_nodes_are_refused(local: str, variables: Callable[..., None]) -> None:
    variables(LOCAL_WORLD_SIZE=local)
    with pytest.raises(NodeError, match="several nodes") as refused:
        World.join()
    assert (refused.value.expected, refused.value.found) == ("2 processes on one node", local)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_a_variable_that_is_not_there_is_named(name: str, variables: Callable[..., None]) -> None:
    others = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    variables(**{**others, name: None})
    with pytest.raises(NodeError, match=f"torchrun's store: .*{name}") as refused:
        World.join()
    assert "torchrun --nproc_per_node=R" in str(refused.value)


def test_one_process_is_a_world_of_its_own(variables: Callable[..., None]) -> None:
    """With a device of its own, also under torchrun."""
    variables(**dict.fromkeys(GOOD))
    worlds = [World.join()]
    variables(**{**dict.fromkeys(GOOD), "LOCAL_RANK": "3"})
    worlds.append(World.join())
    variables(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    worlds.append(World.join())
    assert [(one.rank, one.size, one.index) for one in worlds] == [(0, 1, 0), (0, 1, 3), (0, 1, 0)]
    world = worlds[0]
    world.agree({"own GPU": 1})
    world.order("run", [1])  # nobody to tell, nobody to wait for
    world.look()
    assert (world.leads, world.failure()) == (True, None)
    shared = world.share(24, "cpu")
    assert shared.own.tolist() == [0] * 24
    assert shared.addresses == [shared.own.data_ptr()]
    assert shared.of(0) is shared.own
    assert shared.multicast == 0
    world.close()
