"""Compiled kernels: what is in them, the same bytes wherever they are made, and `cubin`."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers import Call, make_artifact, make_snapshot, names, slow, tiny_config

from dsv2mk.kernel.cache import get_compiled
from dsv2mk.kernel.compile import Compiled
from dsv2mk.kernel.parameters import PARAMETERS
from dsv2mk.kernel.plan import THREADS, Plan
from dsv2mk.manifests.geometry import Geometry, preset_config
from dsv2mk.manifests.sidecar import CUBIN_FILE, parse_sidecar
from dsv2mk.manifests.topology import Topology

pytest.register_assert_rewrite("fake_compiler", "reference_plan")

from fake_compiler import FakeCompiler, clean_environment  # noqa: E402
from reference_plan import instructions, through_peers  # noqa: E402

Get = Callable[..., Compiled]
Kernel = tuple[str, int, str, str]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clean_environment(monkeypatch)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """A kernel by preset, ranks, arch and collective; each is compiled once for the module."""

    @cache
    def get(preset: str, ranks: int, arch: str, collective: str = "p2p") -> Compiled:
        geometry = Geometry.from_config(preset_config(preset))
        with pytest.MonkeyPatch.context() as patch:
            clean_environment(patch)
            patch.setenv("DSV2MK_CUBIN_CACHE", str(tmp_path_factory.mktemp("cache")))
            return get_compiled(geometry, Topology(ranks=ranks), arch, collective=collective)[0]

    return get


KERNELS = [
    ("tiny", 1, "sm_100a", "p2p"),
    slow(("tiny", 1, "sm_90a", "p2p")),
    slow(("tiny", 1, "sm_103a", "p2p")),
    *(
        slow((preset, ranks, arch, collective))
        for preset, ranks, collective in (
            ("deepseek-v2-lite", 1, "p2p"),
            ("deepseek-v2", 1, "p2p"),
            ("deepseek-v2", 8, "p2p"),
            ("deepseek-v2", 2, "multimem"),
            ("deepseek-v2", 8, "multimem"),
            ("deepseek-v2.5", 1, "p2p"),
        )
        for arch in ("sm_90a", "sm_100a")
    ),
]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)


# ---- what is in a kernel ----


@each_kernel
def test_a_kernel_fits_a_multiprocessor(compiled: Get, kernel: Kernel) -> None:
    side = compiled(*kernel).sidecar
    preset, ranks, arch, collective = kernel
    geometry = Geometry.from_config(preset_config(preset))
    plan = Plan(geometry=geometry, topology=Topology(ranks=ranks), collective=collective)
    assert (side.arch, side.topology, side.geometry) == (arch, plan.topology, plan.geometry)
    assert side.collective == collective
    assert (side.block, side.cluster, side.cooperative) == (640, 1, True)
    assert side.local_memory == 0
    # A warp's registers come in groups of 256: eight a lane.
    assert -(-side.registers // 8) * 8 * THREADS <= 65536
    assert side.registers == 96  # what the warps trade among them adds up to it
    assert side.shared_memory == plan.smem_bytes
    assert side.shared_memory + side.static_shared_memory <= 227 * 1024
    assert (side.min_ctas, side.max_ctas, side.cache_row) == (plan.min_ctas, 256, plan.cache_row)
    assert [list(one) for one in PARAMETERS] == side.parameters


@each_kernel
def test_a_kernel_uses_what_it_should_and_nothing_else(compiled: Get, kernel: Kernel) -> None:
    ptx = compiled(*kernel).ptx.decode()
    assert re.findall(r"^\.target (\S+)$", ptx, re.MULTILINE) == [kernel[2]]
    used = {text.split()[0] for text in instructions(ptx)}
    for start in (
        "cp.async.bulk.shared",
        "mbarrier.try_wait.parity",
        "mbarrier.arrive.expect_tx",
        "ldmatrix.sync.aligned",
        "mma.sync.aligned.m16n8k16",
        "red.release",
        "setmaxnreg.inc",
    ):
        assert any(name.startswith(start) for name in used), start
    assert not re.search(r"\.local\b", ptx)  # neither arrays nor spills
    heads = {name.split(".")[0] for name in used}
    assert not heads & {"trap", "brkpt", "call", "vprintf"}
    assert ("multimem" in ptx) == ("multimem" in heads) == (kernel[3] == "multimem")
    # Sums have one order: atomics only count.
    for name in used:
        if name.startswith(("atom.", "red.", "multimem.red.", "multimem.ld")):
            assert re.search(r"\.[ub](32|64)$", name), name


@each_kernel
def test_a_cubin_holds_the_entry_with_its_parameters(compiled: Get, kernel: Kernel) -> None:
    made = compiled(*kernel)
    ptx, entry = made.ptx.decode(), made.sidecar.entry
    ((name, listed),) = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    assert name == entry
    assert "cutlass" not in entry  # with it in the name the assembler spills
    types = re.findall(r"\.param\s+\.[usb](\d+)\s+\w+", listed)
    sizes = {"u64": "64", "i64": "64", "i32": "32"}
    assert types == [sizes[kind] for _, kind in PARAMETERS]
    assert listed.count(".param") == len(PARAMETERS)
    assert made.cubin[:5] == b"\x7fELF\x02"
    assert b"\0.text." + entry.encode() + b"\0" in made.cubin
    assert b"\0" + entry.encode() + b"\0" in made.cubin


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("ranks", "collective"), [(8, "p2p"), (2, "multimem"), (8, "multimem")])
def test_shares_go_to_each_peer_or_through_the_multicast_address(
    compiled: Get, ranks: int, collective: str, arch: str
) -> None:
    ptx = compiled("deepseek-v2", ranks, arch, collective).ptx.decode()
    offsets, users = through_peers(ptx, [name for name, _ in PARAMETERS].index("peers"))
    names = [text.split()[0] for text in instructions(ptx)]
    assert names.count("ld.acquire.sys.global.b32") > 0  # who waits takes its own rank's counter
    if collective == "p2p":
        assert offsets == {8 * rank for rank in range(ranks)}
        arrival, stores = "red.relaxed.sys.global.add.u32", {"st.global.f32", "st.global.v2.f32"}
        assert users.count(arrival) == 3 * ranks  # o, down and best
        fence = "fence.acq_rel.sys"  # before the arrivals of each
        order = [name for name in names if name in (arrival, fence)]
        assert [fence, *[arrival] * ranks] * 3 == order[: 3 * (ranks + 1)]
    else:
        assert offsets == {8 * ranks}
        arrival = "multimem.red.release.sys.global.add.u32"
        stores = {"multimem.st.weak.global.f32", "multimem.st.weak.global.v2.f32"}
        fence = "fence.proxy.alias"  # between accesses through two addresses: see hops.py
        assert [name for name in names if name in (arrival, fence)] == [fence, arrival, fence] * 3
    assert set(users) == {arrival, *stores}
    for name in set(names):
        if "multimem" in name or "red.relaxed.sys" in name:
            assert users.count(name) == names.count(name)


# ---- the same bytes ----

SHADOW = {"numpy.py": "raise ImportError", "dsv2mk/kernel/plan.py": "", "json.py": "1 / 0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "environment"),
    [
        pytest.param({}, {"PYTHONHASHSEED": "7", "LANG": "C"}, id="elsewhere"),
        pytest.param(
            SHADOW,
            {},
            id="among modules of the same names",
        ),
        pytest.param(
            {},
            {"CUTE_DSL_LINEINFO": "1"},
            id="with the compiler's switches set",
        ),
    ],
)
def test_a_kernel_compiled_elsewhere_has_the_same_bytes(
    files: dict[str, str],
    environment: dict[str, str],
    compiled: Get,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = compiled("tiny", 1, "sm_100a")
    for name, text in files.items():
        path = tmp_path / "elsewhere" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = sorted(Path().rglob("*"))
    second, cached = get_compiled(first.sidecar.geometry, first.sidecar.topology, "sm_100a")
    assert not cached
    assert second.cubin == first.cubin
    assert second.ptx == first.ptx
    assert second.sidecar.encoded == first.sidecar.encoded
    assert sorted(Path().rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("dump", ["new/dump", None])
def test_files_that_the_user_asked_for_are_left(
    dump: str | None, compiled: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx,cubin")
    if dump is not None:
        monkeypatch.setenv("CUTE_DSL_DUMP_DIR", dump)
    first = compiled("tiny", 1, "sm_100a")
    get_compiled(first.sidecar.geometry, first.sidecar.topology, "sm_100a")
    left = {path.suffix: path for path in Path().rglob("*") if path.is_file()}
    assert set(left) == {".ptx", ".cubin"}
    assert left[".cubin"].read_bytes() == first.cubin
    assert left[".ptx"].read_bytes().strip(b"\0") == first.ptx.strip(b"\0")
    assert {path.parent for path in left.values()} == {Path(dump or "")}


# ---- the command ----


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(monkeypatch)


@pytest.fixture(scope="module")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For 2 ranks; `snapshot` beside it is its input."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        snapshot = make_snapshot(folder / "snapshot", tiny_config(num_hidden_layers=1))
        return make_artifact(snapshot, 2, folder / "artifact").path


def test_the_command_leaves_cubin_ptx_and_sidecar(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call
) -> None:
    out = tmp_path / "new" / "out"
    args = ("cubin", "--geometry", "tiny", "--tp", 2, "--arch", "sm_90a,sm_103a,sm_90a")
    first, second = (dsv2mk(*args, "--out", out, "--json") for _ in range(2))
    assert (first.code, second.code, first.err) == (0, 0, "")
    assert compiler.asked == [("sm_90a", 2), ("sm_103a", 2)]
    files = set()
    for made, again in zip(first.json["cubins"], second.json["cubins"], strict=True):
        stem = f"dsv2mk.{made['arch']}.tp2.{made['kernel_key'][:16]}"
        assert made["cubin"] == str(out / f"{stem}.cubin")
        assert made["cubin_bytes"] == (out / f"{stem}.cubin").stat().st_size
        assert (made["registers"], made["local_memory"], made["threads"]) == (96, 0, 640)
        assert 200_000 < made["shared_memory"] <= 227 * 1024
        assert (made["cached"], again["cached"]) == (False, True)
        assert made["seconds"] >= 0
        assert made.keys() == again.keys()
        files |= {f"{stem}.{suffix}" for suffix in ("cubin", "ptx", "json")}
    assert [made["arch"] for made in first.json["cubins"]] == ["sm_90a", "sm_103a"]
    assert names(out) == files
    shown = dsv2mk(*args, "--out", out)
    assert shown.out.count("cached") == 2
    assert all(made["cubin"] in shown.out for made in first.json["cubins"])


def test_each_collective_is_a_kernel_of_its_own(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call
) -> None:
    args = ("cubin", "--geometry", "tiny", "--tp", 2, "--out", tmp_path, "--json")
    keys = []
    for collective, infix in (("multimem", ".multimem"), ("p2p", ""), ("multimem", ".multimem")):
        (made,) = dsv2mk(*args, "--collective", collective).json["cubins"]
        path = Path(made["cubin"])
        assert path.name == f"dsv2mk.sm_100a.tp2{infix}.{made['kernel_key'][:16]}.cubin"
        assert CUBIN_FILE.fullmatch(path.name)
        sidecar = parse_sidecar(path.with_suffix(".json").read_bytes(), path)
        assert sidecar.collective == made["collective"] == collective
        keys.append(made["kernel_key"])
    assert keys[0] == keys[2] != keys[1]
    assert dsv2mk(*args).json["cubins"][0]["kernel_key"] == keys[1]  # the default
    assert [request["collective"] for request in compiler.requests] == ["multimem", "p2p"]


def test_without_out_files_go_to_build(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (made,) = dsv2mk("cubin", "--geometry", "tiny", "--json").json["cubins"]
    assert made["arch"] == "sm_100a"
    assert Path(made["cubin"]).parent == Path("build/cubin")
    assert len(names(tmp_path / "build" / "cubin")) == 3


def test_cubins_of_an_artifact_go_into_it(
    compiler: FakeCompiler, tiny_artifact: Path, dsv2mk: Call
) -> None:
    for options in ([], ["--tp", 2]):
        (made,) = dsv2mk("cubin", "--artifact", tiny_artifact, *options, "--json").json["cubins"]
        assert Path(made["cubin"]).parent == tiny_artifact / "cubin"
        assert compiler.asked == [("sm_100a", 2)]
    assert len(names(tiny_artifact / "cubin")) == 3
    assert compiler.requests[0]["geometry"]["num_hidden_layers"] == 1
    assert dsv2mk("verify", tiny_artifact).code == 0


def test_an_artifact_with_cubins_is_still_up_to_date(
    compiler: FakeCompiler, tiny_artifact: Path, dsv2mk: Call
) -> None:
    assert dsv2mk("cubin", "--artifact", tiny_artifact).code == 0
    snapshot = tiny_artifact.parent / "snapshot"
    assert dsv2mk("build", snapshot, "--tp", 2, "--out", tiny_artifact).code == 0


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "either --artifact or --geometry"),
        (["--artifact", "ARTIFACT", "--geometry", "tiny"], 2, "either --artifact or --geometry"),
        (["--artifact", "ARTIFACT", "--tp", "1"], 2, "--tp: expected 2"),
        (["--artifact", "ARTIFACT", "--layers", "1"], 2, "--layers"),
        (["--artifact", "nowhere"], 11, "nowhere"),
        (["--geometry", "tiny", "--arch", "sm_80"], 2, "'sm_80' is not one of sm_90a"),
        (["--geometry", "tiny", "--arch", "sm_100a,"], 2, "'' is not one of sm_90a"),
        (["--geometry", "tiny", "--arch", ""], 2, "'' is not one of sm_90a"),
        (["--geometry", "small"], 2, "unknown geometry preset"),
        (["--geometry", ""], 2, "unknown geometry preset"),
        (["--geometry", "tiny", "--tp", "3"], 10, "divisor of the 8 heads"),
        (["--geometry", "tiny", "--tp", "16"], 10, "divisor of the 8 heads"),
        (["--geometry", "tiny", "--tp", "0"], 2, "--tp"),
        (["--geometry", "tiny", "--collective", "multimem"], 2, "expected several ranks, found 1"),
        (["--geometry", "tiny", "--tp", "2", "--collective", "nvls"], 2, "'nvls' is not one of"),
        (["--geometry", "wide.json"], 10, "the kernel: hidden_size: expected a multiple of 256"),
        (["--geometry", "broken.json"], 10, "broken.json"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    args: list[str],
    code: int,
    said: str,
    compiler: FakeCompiler,
    tiny_artifact: Path,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wide.json").write_text(json.dumps(tiny_config(hidden_size=192)))
    Path("broken.json").write_text("{")
    args = [str(tiny_artifact) if arg == "ARTIFACT" else arg for arg in args]
    plain, shown = dsv2mk("cubin", *args), dsv2mk("cubin", *args, "--json")
    assert (plain.code, plain.out, shown.code, shown.err) == (code, "", code, "")
    assert said in plain.err
    assert said in shown.json["error"]["message"]
    assert compiler.asked == []
    assert names(tmp_path) == {"wide.json", "broken.json"}


def test_a_kernel_that_spills_is_refused_unless_it_is_allowed(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call
) -> None:
    compiler.uses = replace(compiler.uses, local_memory=264)
    args = ("cubin", "--geometry", "tiny", "--out", tmp_path / "out")
    for _ in range(2):
        refused = dsv2mk(*args)
        assert (refused.code, refused.out) == (10, "")
        assert "sm_100a uses local memory (spilled registers): expected 0 bytes" in refused.err
        assert "264" in refused.err
        assert "--allow-local-memory" in refused.err
    assert len(compiler.asked) == 2  # and nothing is kept
    assert names(tmp_path) == set()
    (made,) = dsv2mk(*args, "--allow-local-memory", "--json").json["cubins"]
    assert (made["local_memory"], made["cached"]) == (264, False)
    assert len(names(tmp_path / "out")) == 3
    assert dsv2mk(*args).code == 10  # from the cache as well
    assert dsv2mk(*args, "--allow-local-memory").code == 0
    assert len(compiler.asked) == 3


def test_another_number_of_layers_is_another_kernel(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call
) -> None:
    keys = []
    for layers in ([], ["--layers", 2], ["--layers", 4]):
        done = dsv2mk("cubin", "--geometry", "tiny", *layers, "--out", tmp_path / "out", "--json")
        keys.append(done.json["cubins"][0]["kernel_key"])
    assert keys[0] == keys[2] != keys[1]  # the preset has four
    assert [request["geometry"]["num_hidden_layers"] for request in compiler.requests] == [4, 2]
