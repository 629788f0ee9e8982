"""Several ranks, each a process: orders, agreement, and what one that fails means to the others."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import start

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("ranks.py")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Seconds that anything may take here. Far less than a rank that hangs does.
BOUND = 40
#: Seconds in which ranks notice that one has ended.
QUICK = 10


@pytest.fixture(scope="module")
def forks() -> Any:
    """Processes that need not import PyTorch: a helper has done that, which forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dsv2mk.runner.reference"])
    return context


class Rank:
    """A process that runs a scenario, and what it has said."""

    def __init__(self, out: Path, err: Path, process: Any = None) -> None:
        self.out, self.err, self.process = out, err, process

    def said(self, name: str) -> list[Any]:
        text = self.out.read_text() if self.out.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [line[name] for line in map(json.loads, lines) if name in line]

    def until(self, name: str, value: object = None) -> None:
        """Wait until it has said something."""
        end = time.monotonic() + BOUND
        while not [one for one in self.said(name) if value is None or one == value]:
            assert time.monotonic() < end, (name, self.out.read_text(), self.err.read_text())
            time.sleep(0.01)

    def end(self, seconds: float = BOUND, bug: bool = False) -> tuple[int, str]:
        """(exit code, what it says of it)."""
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, (self.out.read_text(), self.err.read_text())
        return code, self.message(bug)

    def message(self, bug: bool = False) -> str:
        """The line that it ends with; PyTorch may have written of lost connections before."""
        err = self.err.read_text()
        assert ("Traceback" in err) == bug, err
        lines = [line for line in err.splitlines() if line.startswith("dsv2mk: ")]
        assert len(lines) <= 1, err
        return "".join(lines).removeprefix("dsv2mk: ")


class Launch:
    """Starts ranks as torchrun does."""

    def __init__(self, folder: Path, forks: Any) -> None:
        self.folder, self.forks = folder, forks
        self.ranks: list[Rank] = []
        self.torchrun: subprocess.Popen[bytes] | None = None

    def __call__(
        self,
        scenario: str,
        *args: object,
        size: int = 2,
        only: int | None = None,
        hosted: bool = True,
        **env: str,
    ) -> list[Rank]:
        """All ranks of a world, or those below `only`.

        hosted: the store is here, as it is torchrun's agent's; else rank 0 has it.
        """
        bound = timedelta(seconds=BOUND)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, bound, wait_for_workers=False)
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": str(hosted), "RANKS_FOLDER": str(self.folder)}
        env |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        if not hosted:
            del self.store  # the port is free again
        for rank in range(only or size):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out, err = (self.folder / f"{rank}.{name}" for name in ("out", "err"))
            given = (["--", scenario, *map(str, args)], own, str(out), str(err))
            process = self.forks.Process(target=start, args=given)
            self.ranks.append(Rank(out, err, process))
            process.start()
        return self.ranks

    def by_torchrun(self, scenario: str, *args: object, **env: str) -> list[Rank]:
        """Two ranks of a real one, once they have begun."""
        logs, said = self.folder / "logs", self.folder / "torchrun"
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        line += ["--redirects=3", f"--log-dir={logs}", "--monitor-interval=0.1"]
        with open(said, "wb") as file:
            self.torchrun = subprocess.Popen(
                [*line, str(PROGRAM), scenario, *map(str, args)],
                stdout=file,
                stderr=file,
                env={**os.environ, **env, "RANKS_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + BOUND
        while len(found := sorted(logs.glob("**/stdout.log"))) < 2:
            assert time.monotonic() < end, said.read_text()
            assert self.torchrun.poll() is None, said.read_text()
            time.sleep(0.05)
        assert [path.parent.name for path in found] == ["0", "1"]
        return [Rank(path, path.with_name("stderr.log")) for path in found]

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join(BOUND)
        if self.torchrun is not None:
            if self.torchrun.poll() is None:
                self.torchrun.terminate()  # it ends its ranks, within 30 s
            self.torchrun.wait(BOUND)


@pytest.fixture
def launch(tmp_path: Path, forks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    launch = Launch(tmp_path, forks)
    yield launch
    launch.close()


def kill(rank: Rank) -> int:
    """Its process id."""
    pid: int = rank.process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


# ---- orders and agreement ----


def test_orders_are_carried_out_by_all_ranks_in_order(launch: Launch) -> None:
    ranks = launch("give-orders", size=3)
    assert [rank.end() for rank in ranks] == [(0, "")] * 3
    wanted: list[Any] = [["count", [number], {}] for number in range(20)]
    wanted.append(["place", [[5, 0, 499]], {}])
    given = {"timed": True, "marked": False, "noise": None, "name": "x y"}
    wanted.append(["run", [3], given])
    assert [rank.said("order") for rank in ranks] == [[], wanted, wanted]
    assert ranks[0].said("ended") == [True]
    assert [rank.said("rank") for rank in ranks] == [[0], [1], [2]]
    last = max(rank.said("came")[0] for rank in ranks)
    assert all(rank.said("met")[0] >= last for rank in ranks)


def test_without_torchrun_s_agent_rank_0_has_the_store(launch: Launch) -> None:
    ranks = launch("decode", hosted=False)
    assert [rank.end() for rank in ranks] == [(0, "")] * 2


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("context", ["5", "6", "5"], "rank 1 differs from rank 0: context: expected 5, found 6"),
        ("seed", ["null", "null", "0"], "rank 2 differs from rank 0: seed: found 0"),
        ("digest", ['"a"', '"b"', '"c"'], "rank 1 differs from rank 0: digest: expected a, found "),
        ("own GPU", ['"x"', '"y"', '"x"'], "ranks 0 and 2 have one GPU: found x. torchrun "),
    ],
)
def test_a_rank_that_differs_is_named_by_every_rank(
    name: str, values: list[str], said: str, launch: Launch
) -> None:
    for rank in launch("agree", name, *values, size=3):
        code, found = rank.end()
        assert (code, found[: len(said)]) == (12, said)
        assert rank.said("agreed") == []


# ---- a rank that fails or ends ----


@pytest.mark.parametrize("early", [{}, {"RANKS_ENDED": "1"}], ids=["", "before-it-is-watched"])
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("artifact", 11, "rank-01.ffn.safetensors ends early. dsv2mk verify DIR"),
        ("bug", 70, "division by zero"),
    ],
)
def test_a_rank_that_fails_is_told_of_by_the_others(
    kind: str, code: int, said: str, early: dict[str, str], launch: Launch
) -> None:
    ranks = launch("fail", kind, size=3, **early)
    for rank in (ranks[0], ranks[2]):
        assert rank.end() == (70, f"rank 1 failed while loading: {said}")
    assert ranks[1].end(bug=kind == "bug")[0] == code


def test_a_rank_that_was_done_before_it_was_watched_is_no_error(launch: Launch) -> None:
    ranks = launch("join", size=3, RANKS_ENDED="1")
    assert [rank.end() for rank in ranks] == [(0, "")] * 3


def test_a_rank_that_is_killed_before_decode_is_named(launch: Launch) -> None:
    ranks = launch("hang-before", size=3)
    for rank, name in zip(ranks, ("waits", "hangs", "waits"), strict=True):
        rank.until(name)
    pid = kill(ranks[1])
    for rank in (ranks[0], ranks[2]):
        assert rank.end(QUICK) == (70, f"rank 1 (process {pid}) has ended")


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_is_killed_amid_orders_is_named(who: int, launch: Launch) -> None:
    """Also rank 0, which all others wait for."""
    ranks = launch("hang-amid", who, size=3)
    ranks[who].until("hangs")
    others = [rank for rank in ranks if rank is not ranks[who]]
    for rank in others:
        rank.until("gave" if rank is ranks[0] else "took", 2)
    pid = kill(ranks[who])
    for rank in others:
        assert rank.end(QUICK) == (70, f"rank {who} (process {pid}) has ended")
        assert rank.said("gave") in ([], [0, 1, 2], [0, 1, 2, 3])
        assert rank.said("took") in ([], [0, 1, 2], [0, 1, 2, 3])


def test_a_rank_that_does_not_answer_is_named(launch: Launch) -> None:
    """It lives, and yet no longer takes orders."""
    leader, hanging = launch("hang-amid", 1, RANKS_ANSWER="5")
    code, said = leader.end()
    assert (code, said.startswith("rank 1 has not answered in time")) == (70, True)
    assert leader.said("gave") == hanging.said("took") == [0, 1, 2]
    assert hanging.process.exitcode is None


def test_followers_end_with_a_rank_0_that_had_the_store(launch: Launch) -> None:
    ranks = launch("hang-amid", 0, size=3, hosted=False)
    for rank in ranks[1:]:
        rank.until("took", 2)
    ranks[0].until("hangs")
    pid = kill(ranks[0])
    for rank in ranks[1:]:
        code, said = rank.end(QUICK)
        gone = f"rank 0 \\(process {pid}\\) has ended|torchrun has ended: .+"
        assert (code, bool(re.fullmatch(gone, said))) == (70, True), said


def test_a_rank_that_does_not_come_is_named(launch: Launch) -> None:
    """By whoever has waited so long first; the other may have seen that one end."""
    ranks = launch("join", size=3, only=2, RANKS_JOIN="5")
    ended = [rank.end() for rank in ranks]
    assert [code for code, _ in ended] == [70, 70]
    gone = "|".join(f"rank {n} \\(process {ranks[n].process.pid}\\) has ended" for n in (0, 1))
    assert all(re.fullmatch(f"rank 2 has not .*|{gone}", said) for _, said in ended), ended
    assert any(said.startswith("rank 2 has not ") for _, said in ended)


def test_all_that_are_told_to_end_are_interrupted(launch: Launch) -> None:
    """As Ctrl-C does by torchrun, which hands it on: nobody has failed."""
    ranks = launch("idle", size=3)
    for rank in ranks:
        rank.until("waits")
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGTERM)
    assert [rank.end(QUICK) for rank in ranks] == [(130, "interrupted")] * 3


# ---- under torchrun itself ----


@pytest.mark.parametrize("slow", ["none", "0", "1"])
def test_torchrun_ends_all_and_they_still_say_which_rank_failed(slow: str, launch: Launch) -> None:
    """Also one that has left and not yet told why, when torchrun ends it."""
    ranks = launch.by_torchrun("fail", "artifact", RANKS_LINGER=slow)
    assert launch.torchrun.wait(BOUND) != 0
    assert [rank.said("code") for rank in ranks] == [[70], [11]]
    said = "rank-01.ffn.safetensors ends early. dsv2mk verify DIR"
    assert [rank.message() for rank in ranks] == [
        f"rank 1 failed while loading: {said}",
        said,
    ]


def test_ctrl_c_of_torchrun_interrupts_all(launch: Launch) -> None:
    ranks = launch.by_torchrun("idle")
    for rank in ranks:
        rank.until("waits")
    launch.torchrun.send_signal(signal.SIGINT)
    launch.torchrun.wait(BOUND)
    assert [rank.said("code") for rank in ranks] == [[130], [130]]
    assert [rank.message() for rank in ranks] == ["interrupted"] * 2


def test_ranks_decode_under_torchrun(launch: Launch) -> None:
    ranks = launch.by_torchrun("decode")
    assert launch.torchrun.wait(BOUND) == 0
    assert [rank.said("code") for rank in ranks] == [[0], [0]]
    assert len(ranks[0].said("new")[1]) == 20


# ---- decoding ----


def rows(token: int, position: int) -> list[float]:
    """Logits as the stand-in for the kernel has them, of both ranks; 501 of 502 rows."""
    return [(31 * token + 17 * position + 101 * row) % 509 for row in range(501)]


def test_ranks_decode_together(launch: Launch) -> None:
    leader, follower = launch("decode")
    assert [leader.end(), follower.end()] == [(0, ""), (0, "")]
    tokens = [7, 500, 0, 9, 4]
    assert leader.said("logits") == [rows(0, 2)]
    assert leader.said("step") == [rows(9, 3)]
    noted = []
    for position in range(4, 27):
        if position == 7:
            tokens[position] = 250  # placed, instead of the last that was chosen
        noted.append(rows(tokens[position], position))
        tokens.append(noted[-1].index(max(noted[-1])))
        if position == 6:
            first = tokens[5:8]
    assert leader.said("noted") == [noted[:3]]
    assert leader.said("new") == [first, tokens[8:28]]
    (told,) = follower.said("position")
    assert (leader.said("position"), told) == ([28], 28)
    assert leader.said("epoch") == follower.said("epoch") == [28]

    launches = [rank.said("launch") for rank in (leader, follower)]
    same = {"cache_tokens": 40, "timeout": 20 * 10**9, "ctas": 9}
    same |= {"replicated": 1000, "partitioned": 2000, "gate_up": 3000}
    same |= {"gate_up_scale": 4000, "down": 5000, "down_scale": 6000}
    steps = [3, 1, 1, 1, 1, 8, 8, 4, 1]
    known = [3, 4, 5, 5, 5, 8, 8, 8, 8]
    for rank, calls in enumerate(launches):
        assert calls == [
            same
            | {"rank": rank, "position": sum(steps[:index]), "epoch": sum(steps[:index])}
            | {"steps": count, "known": known[index], "marks": index == 8}
            | {"trace": 1024 if count == 1 else 0}
            for index, count in enumerate(steps)
        ]


def test_ranks_that_hold_other_sums_are_named(launch: Launch) -> None:
    ranks = launch("decode")
    assert [rank.end() for rank in ranks] == [(0, "")] * 2
    found = ["o of layer 0", "o of layer 0", None, "down of layer 0", "down of layer 0"]
    found += ["o of layer 3", "down of layer 3", None]
    wanted = [None if one is None else f"rank 1 has another {one}" for one in found]
    assert ranks[0].said("differ") == [[None, *wanted, None]]


#: What the stand-in leaves, as the kernel's watchdog does.
STUCK = (
    "the kernel gave up after 2 s at position 11: rank 0, CTA 5, warp 6 waited in layer 3 for "
    "route: expected 120, found 119"
)


def test_a_rank_that_is_killed_amid_a_launch_is_named(launch: Launch) -> None:
    ranks = launch("decode", 11)
    ranks[1].until("hangs", 11)
    pid = kill(ranks[1])
    assert ranks[0].end(QUICK) == (70, f"rank 1 (process {pid}) has ended; {STUCK}")


def test_a_launch_that_nobody_s_end_explains_is_stuck(launch: Launch) -> None:
    ranks = launch("decode", 11)
    assert ranks[0].end() == (70, STUCK)
    code, said = ranks[1].end()
    assert code == 70
    assert said.startswith(f"rank 0 failed while decoding from position 7: {STUCK}; ")
