"""The benchmarks measure what they say: no times are asserted, but counts, bytes and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench import stages
from paceline.bench.driver import Driver, Run, Step, random_prompts
from paceline.bench.floor import Floor, floor_of, read_floor
from paceline.bench.geometry import geometry_folder, geometry_names, plain, with_geometry
from paceline.bench.latency import Shape, measure_latency, parse_shapes
from paceline.bench.machine import describe_speculation
from paceline.bench.prefix import PrefixCases, measure_prefix, run_prefix
from paceline.bench.report import Column, Output, Plot, Report
from paceline.bench.round import run_round, stage_bytes, stage_rows
from paceline.bench.speculation import run_speculation
from paceline.bench.startup import measure_startup
from paceline.bench.throughput import measure_throughput, parse_rates, percentile
from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import ConfigError, RequestFailedError
from paceline.models.config import Qwen3Config
from paceline.models.drafter_dialects import load_drafter_config
from paceline.proving.drive import runner_of
from paceline.speculation.config import SpeculativeConfig
from support.engines import GOLDEN
from support.stages import LAYERED


def options(drafter: str | None = None, **fields: Any) -> EngineConfig:
    """A golden engine's options."""
    speculation: dict[str, Any] = {}
    if drafter is not None:  # what is drafted must not depend on the clock
        speculation = {
            "model": str(GOLDEN / drafter),
            "synthetic_accept_length": 3.0,
            "verify_planner": "off",
        }
    return EngineConfig.of(
        model=str(GOLDEN / "qwen3_tiny"),
        device="cpu",
        num_blocks=200,
        **{"speculative_config": speculation, **fields},
    )


@pytest.fixture(scope="module")
def drafting() -> Driver:
    return Driver(options("dspark_tiny_b7"))


# ---- geometries


@pytest.mark.parametrize("name", geometry_names())
def test_every_geometry_can_be_read(name: str) -> None:
    target = next(n for n in geometry_names() if name.startswith(n) and "-d" not in n)
    config = Qwen3Config.from_pretrained(geometry_folder(target))
    if name != target:
        load_drafter_config(geometry_folder(name), config)


def test_a_geometry_names_the_models_and_draws_their_weights() -> None:
    engine = with_geometry(
        EngineConfig.of(speculative_config={"synthetic_accept_length": 2.0}), "qwen3-4b", "dspark-b7"
    )
    assert engine.load_format == "dummy" and engine.model == str(geometry_folder("qwen3-4b"))
    assert engine.speculation is not None and engine.speculation.synthetic_accept_length == 2.0
    assert engine.speculation.model == str(geometry_folder("qwen3-4b-dspark-b7"))
    assert plain(engine).speculation is None
    assert with_geometry(EngineConfig(), "qwen3-4b", None).speculation is None


@pytest.mark.parametrize(
    ("engine", "target", "drafter", "message"),
    [
        (EngineConfig(), "qwen3-5b", None, "There are qwen3-0.6b, "),
        (EngineConfig(), "qwen3-4b", "b7", "no geometry 'qwen3-4b-b7'"),
        (EngineConfig(), None, "dspark-b7", "Add --geometry"),
        (EngineConfig(model="a"), "qwen3-4b", None, "Name one"),
        (EngineConfig.of(speculative_config={"model": "a"}), "qwen3-4b", "dspark-b7", "Both a drafter"),
    ],
)
def test_geometries_that_cannot_be_meant_are_refused(
    engine: EngineConfig, target: str | None, drafter: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_geometry(engine, target, drafter)


# ---- the memory floor


def test_the_floor_of_the_4b_pair_is_what_its_tensors_hold() -> None:
    """Worked out by hand from the shapes; 8.04 GB and 2.45 GB in all."""
    target = Qwen3Config.from_pretrained(geometry_folder("qwen3-4b"))
    drafter = load_drafter_config(geometry_folder("qwen3-4b-dspark-b7"), target)
    floor = floor_of(target, drafter, 2, 7, drafter.draft_vocab_size)
    layer = 2 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728)
    assert floor.matmuls == 36 * layer and floor.draft_layers == 5 * layer
    assert floor.head == floor.draft_head == 2 * 151936 * 2560
    assert floor.markov == 7 * 2 * 151936 * 256
    assert floor.draft_context == 2 * (5 * 2560 * 2560 + 5 * 2 * 1024 * 2560)
    assert floor.kv_per_token == 147456 and floor.draft_kv_per_token == 20480
    assert floor.round_bytes(1000) - floor.round_bytes(0) == 1000 * 167936
    assert floor_of(target, None, 2, 0, 0).round_bytes(0) == pytest.approx(8.04e9, rel=1e-3)


def test_the_floor_is_the_size_of_the_loaded_weights(drafting: Driver) -> None:
    """What is counted from the config is what is there: all but norms, and the embedding only as the head."""
    floor = read_floor(drafting.engine, drafting.item_bytes, drafting.num_drafts, drafting.tokens_scored)
    model = runner_of(drafting.core).model
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert floor.matmuls + floor.head == 4 * matrices


# ---- driving


def test_a_warm_prompt_is_decoded_only(drafting: Driver) -> None:
    prompts = random_prompts(3, 33, 300, seed=1)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    drafting.forget()
    drafting.run(prompts, 1)
    run = drafting.run(prompts, 20)
    assert [state.num_cached_tokens for state in run.states] == [32] * 3
    assert run.num_tokens == 60 and run.steps[-1].finished == 3
    assert run.accept_length is not None and 1 < run.accept_length < 8
    assert all(seconds > 0 for seconds in run.full_rounds_s()) and len(run.first_token_s) == 3


def test_the_same_drafts_stand_whatever_ran_before(drafting: Driver) -> None:
    prompts = random_prompts(2, 12, 300, seed=5)
    lengths = []
    for others in (0, 3):
        drafting.run(random_prompts(1, 8, 300, seed=6) * others, 2)
        lengths.append(drafting.run(prompts, 40).accept_length)
    assert lengths[0] == lengths[1]


def test_requests_arrive_at_the_rate_asked_for(drafting: Driver) -> None:
    run = drafting.run(random_prompts(4, 8, 300, seed=2), 2, rate=200.0)
    arrivals = [state.metrics.arrival_s for state in run.states]
    assert arrivals == sorted(arrivals) and arrivals[-1] > arrivals[0]


def test_a_request_that_fails_ends_the_measurement(drafting: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(drafting.core)

    def broken(plan: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(runner, "launch", broken)
    with pytest.raises(RequestFailedError, match="failed: ValueError"):
        drafting.run([[1, 2, 3]], 4)
    monkeypatch.undo()
    drafting.core.abort(list(drafting._open))
    drafting._open.clear()
    drafting.drain()


@pytest.mark.parametrize(
    ("batch_size", "total_len", "message"),
    [(33, 10, "max_num_seqs"), (1, 600, "max_model_len"), (20, 200, "would not run at once")],
)
def test_a_batch_that_would_not_run_as_meant_is_refused(
    drafting: Driver, batch_size: int, total_len: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drafting.check_fits(batch_size, total_len)


# ---- the benchmarks


def test_latency_reports_every_shape(drafting: Driver) -> None:
    result = measure_latency(drafting, Shape(2, 20, 30), repeats=1, bytes_per_s=1e9)
    assert result.tokens_per_s > 0 and result.accept_length is not None
    floor = read_floor(drafting.engine, 4, 7, drafting.tokens_scored)
    assert result.floor_ms == pytest.approx(1e3 * floor.round_bytes(2 * 35) / 1e9)
    assert result.round_ms is not None and result.limit_share == pytest.approx(
        result.floor_ms / result.round_ms
    )


def test_throughput_counts_prompts_and_answers(drafting: Driver) -> None:
    result = measure_throughput(drafting, 5, 16, 4, None, repeats=1)
    assert result.total_tokens_per_s * result.seconds == pytest.approx(5 * 20)
    assert result.output_tokens_per_s * result.seconds == pytest.approx(5 * 4)
    assert result.first_token_p50_ms <= result.first_token_p99_ms <= 1e3 * result.seconds
    assert measure_throughput(drafting, 1, 16, 1, 50.0, repeats=1).per_token_p50_ms is None


def test_prefixes_are_shared_hit_and_grown(drafting: Driver) -> None:
    rows = measure_prefix(drafting, PrefixCases(4, 64, 8, 8, 96, 3), repeats=1)
    shared, warm, *turns = rows
    assert shared["prompt_len"] == 72 and warm["cached_len"] == 96
    assert [turn["prompt_len"] for turn in turns] == [8, 24, 40]
    assert [turn["cached_len"] for turn in turns] == [0, 0, 16]
    assert {row["drafter"] for row in rows} == {"yes"}


@pytest.mark.parametrize("drafter", [None, "dspark_tiny_b7", "dflash_tiny_b16"])
def test_a_round_is_taken_apart_into_stages_that_add_up(
    drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.bench.round.read_bandwidth", lambda device: 1e9)
    report = run_round(options(drafter), batch_size=2, context_len=20, num_rounds=3)
    rows = {row["stage"]: row for row in report.results}
    want = set(LAYERED) if drafter else {s for s in LAYERED if not s.startswith("draft")}
    assert set(rows) == want | {"between stages", "round"}
    assert sum(row["ms"] for name, row in rows.items() if name != "round") == pytest.approx(
        rows["round"]["ms"]
    )
    assert all(rows[stage]["ms"] > 0 for stage in want)
    assert rows[stages.MATMULS]["mb"] > 0 and rows["round"]["mb"] > rows[stages.MATMULS]["mb"]


def test_a_pass_that_is_one_kernel_reads_what_its_stages_would() -> None:
    floor = Floor(
        matmuls=1000,
        head=200,
        kv_per_token=3,
        draft_kv_per_token=1,
        draft_context=40,
        draft_layers=70,
        draft_head=5,
        markov=9,
    )
    layered = stage_bytes(floor, 10, LAYERED)
    assert set(layered) <= set(LAYERED) and sum(layered.values()) == floor.round_bytes(10)
    one = stage_bytes(floor, 10, [stages.ONE_KERNEL, stages.DRAFT_KERNEL, stages.DRAFT_LAYERS, stages.MARKOV])
    assert one == {stages.ONE_KERNEL: 1270, stages.DRAFT_KERNEL: 85, stages.MARKOV: 9}
    captured = stage_bytes(floor, 10, [stages.ONE_KERNEL, stages.DRAFT_CONTEXT])
    assert captured[stages.ONE_KERNEL] == 1230 and captured[stages.DRAFT_CONTEXT] == 40


class Counts(stages.Recorder):
    """How often each stage is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: Counter[str] = Counter()

    @contextmanager
    def range(self, stage: str) -> Iterator[None]:
        self.entered[stage] += 1
        yield


def test_stages_are_entered_from_where_they_belong_only(drafting: Driver) -> None:
    """The drafter's matmuls and attention are not the target's, and the head serves both in turn."""
    drafting.run([[4, 5, 6]], 12)
    counts = Counts()
    with counts.active():
        drafting.run([[4, 5, 6]], 12)
    layers, rounds = 6, counts.num_rounds
    drafted = counts.entered[stages.DRAFT_LAYERS]
    assert rounds - 1 <= drafted <= rounds and drafted > 1, "none is drafted behind a request's last token"
    times = dict.fromkeys(LAYERED, rounds)
    times |= dict.fromkeys((stages.DRAFT_LAYERS, stages.DRAFT_HEAD, stages.MARKOV), drafted)
    per_round = {stage: count / times[stage] for stage, count in counts.entered.items()}
    assert per_round == {
        stages.ROUND: 1,
        stages.TARGET: 1,
        stages.MATMULS: 4 * layers,
        stages.ATTENTION: layers,
        stages.HEAD: 1,
        stages.SAMPLING: 1,
        stages.DRAFT_CONTEXT: 1,
        stages.DRAFT_LAYERS: 1,
        stages.DRAFT_HEAD: 1,
        stages.MARKOV: 1,
    }


def test_rounds_are_timed_while_every_request_decodes() -> None:
    request: Any = object()
    run = Run([request, request])
    run.steps = [Step(1, 1, 0), Step(2, 2, 0), Step(4, 2, 0), Step(7, 2, 0), Step(8, 2, 1), Step(9, 2, 2)]
    assert run.full_rounds_s() == [2, 3]


def test_an_engine_without_rounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="no decode rounds"):
        run_round(options(enforce_eager=True), 1, 8, 2)


def test_a_fresh_process_starts_and_says_when_what_was_done() -> None:
    found = measure_startup(options())
    times = [phase["at_s"] for phase in found["phases"]]
    assert times == sorted(times) and times[-1] == found["first_token_s"] > found["ready_s"] == times[-2]
    assert any("K/V cache" in phase["phase"] for phase in found["phases"])
    assert sum(phase["took_s"] for phase in found["phases"]) == pytest.approx(times[-1])


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"did not start: .*max_model_len is 9999"):
        measure_startup(options(max_model_len=9999))
    with pytest.raises(ConfigError, match=r"did not start: This model's maximum .* Shorten the prompt\.$"):
        measure_startup(options(max_model_len=2))


# ---- stages


def event(cat: str, name: str, ts: float, dur: float = 1.0, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_are_charged_to_the_innermost_range_they_were_launched_from() -> None:
    events = [
        event("user_annotation", stages.ROUND, 0, 100),
        event("user_annotation", stages.TARGET, 10, 50),
        event("user_annotation", stages.MATMULS, 20, 10),
        event("user_annotation", "another profiler's", 21, 3),
        event("cuda_runtime", "launch", 5, correlation=1),
        event("cuda_runtime", "launch", 15, correlation=2),
        event("cuda_driver", "launch", 22, correlation=3),
        event("cuda_runtime", "launch", 29, correlation=4),
        event("cuda_runtime", "launch", 31, correlation=5),
        event("cuda_runtime", "launch", 61, correlation=6),
        event("cuda_runtime", "launch", 101, correlation=7),
        *(event("kernel", "k", 1000 - i, 10.0**i, correlation=i) for i in range(1, 8)),
        event("gpu_memcpy", "copy", 3, 1e9),
    ]
    seconds, kernels = stages.charge_kernels(events)
    assert seconds == pytest.approx({stages.ROUND: 1.00001, stages.TARGET: 0.1001, stages.MATMULS: 0.011})
    assert kernels == {stages.ROUND: 2, stages.TARGET: 2, stages.MATMULS: 2}


def test_persistent_kernels_whose_launch_is_not_seen_are_charged_by_their_order() -> None:
    """Ranges outside of the stages, and launches that were seen, shift nothing."""
    events = [
        event("user_annotation", stages.PHASES, 1, 2),  # of a step that is no round
        event("user_annotation", stages.ROUND, 10, 90),
        event("user_annotation", stages.ONE_KERNEL, 20, 10),
        event("cuda_runtime", "launch", 21, correlation=4),
        event("user_annotation", stages.PHASES, 22, 2),
        event("user_annotation", stages.DRAFT_LAYERS, 40, 40),
        event("user_annotation", stages.DRAFT_KERNEL, 50, 10),
        event("user_annotation", stages.PHASES, 52, 2),
        event("cuda_runtime", "launch", 70, correlation=9),
        event("kernel", "other", 500, 1.0, correlation=9),
        event("kernel", stages.PHASES, 400, 100.0, correlation=8),
        event("kernel", stages.PHASES, 200, 1e4, correlation=3),
        event("kernel", stages.PHASES, 300, 1e3, correlation=6),
        event("kernel", "embedding", 250, 10.0, correlation=4),
    ]
    seconds, kernels = stages.charge_kernels(events)
    assert seconds == pytest.approx(
        {stages.ONE_KERNEL: 1.01e-3, stages.DRAFT_KERNEL: 1e-4, stages.DRAFT_LAYERS: 1e-6}
    )
    assert kernels == {stages.ONE_KERNEL: 2, stages.DRAFT_KERNEL: 1, stages.DRAFT_LAYERS: 1}


def test_gaps_within_rounds_and_from_each_to_the_next() -> None:
    events = [
        event("user_annotation", stages.SERVED, 0, 10),
        event("user_annotation", stages.SERVED, 20, 10),
        event("user_annotation", stages.SERVED, 40, 10),
        event("cuda_runtime", "cudaGraphLaunch", 5, correlation=1),
        event("cuda_runtime", "cudaGraphLaunch", 15, correlation=2),  # of another graph
        event("cuda_runtime", "cudaMemcpyAsync", 24, correlation=3),
        event("cuda_runtime", "cudaGraphLaunch", 25, correlation=4),
        event("cuda_runtime", "cudaGraphLaunch", 45, correlation=5),
        event("kernel", "a", 100, 10, correlation=1),
        event("kernel", "b", 105, 15, correlation=1),  # beside the first
        event("kernel", "c", 123, 7, correlation=1),
        event("kernel", "others", 131, 2, correlation=2),
        event("gpu_memcpy", "in", 134, 1, correlation=3),
        event("kernel", "a", 140, 20, correlation=4),
        event("kernel", "c", 161, 9, correlation=4),
        event("kernel", "a", 174, 20, correlation=5),
        event("kernel", "a", 900, 20, correlation=7),
    ]
    gaps = stages.find_gaps(events)
    assert gaps is not None
    assert gaps.period_s == pytest.approx(37e-6)
    assert gaps.within_s == pytest.approx((3 + 1) / 2 * 1e-6)
    assert gaps.between_s == pytest.approx((10 - 2 - 1 + 4) / 2 * 1e-6)
    assert stages.find_gaps(events[:9]) is None


def test_rows_of_a_round_show_gaps_and_limits() -> None:
    rows = stage_rows(
        {stages.MATMULS: 0.004, stages.HEAD: 0.001}, {stages.MATMULS: 3.0}, 0.006, {stages.MATMULS: 2e9}, 1e12
    )
    matmuls, head, gaps, whole = rows
    assert matmuls["limit_share"] == pytest.approx(0.5) and head["limit_share"] is None
    assert gaps["ms"] == pytest.approx(1.0) and whole["kernels"] == 3.0 and whole["share"] == 1.0
    within, between = stage_rows({}, {}, 0.006, {}, 1e12, stages.Gaps(0.01, 0.001, 0.0002))[-2:]
    assert (within["ms"], within["share"]) == pytest.approx((1.0, 0.1))
    assert (between["ms"], between["share"]) == pytest.approx((0.2, 0.02))


# ---- what is written, what is refused


@pytest.fixture
def report() -> Report:
    return Report(
        bench="latency",
        machine={"cpu": "a processor"},
        settings={"model": "folder/m"},
        columns=(Column("batch", "batch"), Column("rate", "tok/s", ",.0f")),
        plot=Plot("batch", "rate", "lens"),
        results=[{"batch": 1, "rate": 1234.5, "lens": "a"}, {"batch": 2, "rate": None, "lens": "a"}],
    )


def test_results_are_written_as_json_and_drawn(report: Report, tmp_path: Path) -> None:
    out = Output.checked(str(tmp_path / "r.json"), str(tmp_path / "r.svg"))
    out.write(report)
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["results"] == report.results and stored["machine"] == report.machine
    assert "<svg" in (tmp_path / "r.svg").read_text()
    report.plot = Plot("batch", "rate", bars=True)
    report.draw(str(tmp_path / "bars.png"))


def test_a_plot_without_matplotlib_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[bench\]'"):
        Output.checked(None, "r.png")


def test_files_that_cannot_be_written_are_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json nowhere/r\.json: there is no folder nowhere"):
        Output.checked("nowhere/r.json", None)
    with pytest.raises(ConfigError, match=r"--json .*: Is a directory\. Name a file"):
        Output.checked(str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"--json /proc/r\.json: .*\. Name a file"):
        Output.checked("/proc/r.json", None)
    with pytest.raises(ConfigError, match=r"--plot .*r\.xyz: there is no format 'xyz'"):
        Output.checked(None, str(tmp_path / "r.xyz"))


def test_a_check_of_files_leaves_them_as_they_are(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    Output.checked(str(old), str(tmp_path / "new.svg"))
    Output.checked(str(tmp_path / "new.json"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "kept"


def test_rounds_whose_sequences_never_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.round.read_bandwidth", lambda device: 1e9)
    engine = EngineConfig.of(
        model=str(GOLDEN / "qwen3_tiny"),
        device="cpu",
        num_blocks=128,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    with pytest.raises(ConfigError, match="4 sequences never decoded all at once"):
        run_round(engine, batch_size=4, context_len=100, num_rounds=2)


@pytest.mark.parametrize(
    ("sizes", "lens"), [("1,x", "8:8"), ("0", "8:8"), ("1", "8"), ("1", "8:1"), ("1", "a:b")]
)
def test_shapes_that_are_none_are_refused(sizes: str, lens: str) -> None:
    with pytest.raises(ConfigError, match=r"--batch-sizes is|--lens is"):
        parse_shapes(sizes, lens)


def test_shapes_and_rates_are_read() -> None:
    assert parse_shapes("1,2", "8:16,9:4")[1:3] == [Shape(2, 8, 16), Shape(1, 9, 4)]
    assert parse_rates(None) == [None] and parse_rates("1,2.5") == [1.0, 2.5]
    for text in ("x", "0", "-1", "inf"):
        with pytest.raises(ConfigError, match="--request-rates is"):
            parse_rates(text)


def test_percentiles() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([float(i) for i in range(101)], 99) == pytest.approx(99.0)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("latency --batch-sizes 1,2 --lens 8:8", 2),
        ("throughput --num-requests 3 --input-len 8 --output-len 2 --request-rates 100,200", 2),
        ("prefix --shared-requests 2 --shared-len 32 --tail-len 8 --output-len 4 --warm-len 32 --turns 2", 4),
        ("round --context-len 16 --num-rounds 2", 8),
    ],
)
def test_commands_write_their_files(
    words: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("latency", "round"):
        monkeypatch.setattr(f"paceline.bench.{module}.read_bandwidth", lambda device: 1e9)
    path, plot = tmp_path / "results.json", tmp_path / "results.svg"
    engine = ["--model", str(GOLDEN / "qwen3_tiny"), "--device", "cpu", "--num-blocks", "64"]
    repeats = [] if words.startswith("round") else ["--repeats", "1"]
    files = ["--json", str(path), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", *words.split(), *engine, *repeats, *files])
    assert result.exit_code == 0, result.output
    stored = json.loads(path.read_text())
    assert stored["bench"] == words.split()[0] and len(stored["results"]) == rows
    assert stored["settings"]["num_drafts"] == 0 and stored["machine"]["torch"]
    assert plot.stat().st_size > 0


def test_prefixes_are_measured_with_and_without_the_drafter() -> None:
    report = run_prefix(options("dspark_tiny_b7"), PrefixCases(2, 32, 8, 6, 0, 1), repeats=1)
    assert [row["drafter"] for row in report.results] == ["yes", "yes", "no", "no"]
    assert report.results[0]["accept_length"] is not None and report.results[2]["accept_length"] is None


def test_speculation_is_compared_on_real_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a, b):\n\nimport os\n")
    engine = EngineConfig.of(device="cpu", num_blocks=256)
    (row,) = run_speculation(engine, str(prompts), 12, 0.0, "2", repeats=1).results
    assert row["equal"] and row["speedup"] > 0
    with pytest.raises(ConfigError, match="There is no drafter"):
        run_speculation(plain(engine), None, 12, 0.0, "2", repeats=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_speculation(engine, str(tmp_path / "none"), 12, 0.0, "2", repeats=1)
    with pytest.raises(ConfigError, match="A batch of 3 needs as many prompts; there are 2"):
        run_speculation(engine, str(prompts), 12, 0.0, "1,3", repeats=1)
    one_at_once = EngineConfig.of(device="cpu", num_blocks=256, max_num_seqs=1)
    with pytest.raises(ConfigError, match="2 sequences at once, but this engine runs 1"):
        run_speculation(one_at_once, str(prompts), 12, 0.0, "2", repeats=1)
    prompts.write_bytes(b"\xd0\x00")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec"):
        run_speculation(engine, str(prompts), 12, 0.0, "1", repeats=1)


def test_a_report_names_a_bundled_drafter_but_not_where_it_is() -> None:
    bundled = EngineConfig.of(speculative_config={"method": "dflash"}).speculation
    named = describe_speculation(bundled)
    assert named is not None and named["model"] == "mini-dflash" and named["method"] == "dflash"
    own = describe_speculation(SpeculativeConfig(model="some/drafter"))
    assert own is not None and own["model"] == "some/drafter"
    assert describe_speculation(None) is None


def test_a_method_beside_a_drafters_geometry_is_not_ignored() -> None:
    named = EngineConfig.of(speculative_config={"method": "dflash"})
    engine = with_geometry(named, "qwen3-4b", "dspark-b7")
    assert engine.speculation is not None
    assert engine.speculation.method == "dflash", "loading compares it with the drafter's own"
