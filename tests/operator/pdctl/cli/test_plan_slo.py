"""`pdctl plan --slo`: its plans, and a sentence with the nearest thing that works for bad input."""

import json

import pytest
from typer.testing import CliRunner

from pdcluster_schema.autoscale import LatencyObjectiveSpec
from pdcluster_schema.load import load_applied
from pdctl.cli.main import app
from pdctl.cli.progress import Progress
from pdctl.sizing import tables
from tests.operator.pdctl.planned_models import LLAMA

GOAL = ["--input", "2000", "--output", "200", "--ttft", "1", "--itl", "0.03"]


def plan(*options):
    return CliRunner().invoke(app, ["plan", "--slo", *map(str, options)])


@pytest.fixture
def folder(tmp_path):
    """A model by its config.json alone."""
    made = tmp_path / "llama-8b"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    return made


@pytest.fixture
def _without_tables(monkeypatch):
    monkeypatch.setattr(tables, "is_installed", lambda: False)


@pytest.mark.usefixtures("_without_tables")
def test_a_folder_is_planned_by_the_roofline_into_a_cluster_that_renders(folder, tmp_path):
    out, picture = tmp_path / "plan.yaml", tmp_path / "front.png"
    prices = ["--price", "B200=4", "--price", "B300=6"]
    given = ["--model", folder, "--gpu", "B200=8", "--gpu", "B300=8", *prices, *GOAL]
    done = plan(*given, "--percentile", 90, "--out", out, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert "an estimate, not a measurement: our roofline" in done.output
    assert "pip install 'pdcluster[plan]'" in done.output
    assert "COST/1M" in done.output
    assert "plit" in done.output
    assert picture.stat().st_size > 0
    spec = load_applied(out).spec
    assert spec.autoscale.objective.ttft == LatencyObjectiveSpec(seconds=1.0, percentile=90)
    assert spec.autoscale.objective.itl == LatencyObjectiveSpec(seconds=0.03, percentile=90)
    pools = [pool for role in spec.roles.present().values() for pool in role.pools]
    assert sum(pool.replicas for pool in pools) <= 16
    assert spec.autoscale.budget.per_gpu
    prices = {"B200": 4, "B300": 6}
    assert all(spec.price_per_hour(pool.gpu) == prices[pool.gpu] for pool in pools)
    assert out.read_text().startswith("# pdctl plan --slo: ")
    rendered = CliRunner().invoke(app, ["render", str(out)])
    assert rendered.exit_code == 0
    assert "kind: StatefulSet" in rendered.output


@pytest.mark.usefixtures("_without_tables")
def test_ranks_that_do_not_divide_the_heads_are_left_out(folder):
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"num_attention_heads": 28, "num_key_value_heads": 4})
    )
    found = json.loads(plan("--model", folder, "--gpu", "H100=8", "--json", *GOAL).stdout)
    assert "Left out: TP8: 28 heads, 4 of KV, cannot be divided so." in found["notes"]
    assert "TP8" not in json.dumps(found["placements"])


@pytest.mark.usefixtures("_without_tables")
def test_json_has_both_figures_the_front_and_the_manifest(folder):
    done = plan("--model", folder, "--gpu", "H100=8", "--json", *GOAL)
    found = json.loads(done.stdout)
    assert found["is_estimate"]
    assert found["placements"][0]["tokens_per_second_per_gpu"] > 0
    assert set(found["front"]) == {"aggregated", "split"}
    assert found["manifest"]["kind"] == "PDCluster"
    assert "tokens/s per GPU" in found["advice"]


@pytest.mark.usefixtures("_without_tables")
def test_a_long_search_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(Progress, "shown_every_seconds", 0.0)
    done = plan("--model", folder, "--gpu", "B200=1", "--gpu", "B300=1", "--json", *GOAL)
    assert "layouts: 1 of 2 in " in done.stderr
    json.loads(done.stdout)


@pytest.mark.usefixtures("_without_tables")
def test_links_are_those_of_the_types_and_an_unknown_one_is_named(folder):
    gpus = ["--gpu", "B200=1", "--gpu", "B300=1", "--gpu", "H20=1"]
    found = json.loads(plan("--model", folder, *gpus, "--json", *GOAL).stdout)
    assert found["links_bytes_per_second"] == {"B200": 50e9, "B300": 100e9, "H20": 50e9}
    assert "H20: the network is not known; taken as 50 GB/s for each GPU." in found["notes"]
    assert found["warnings"] == []


@pytest.mark.usefixtures("_without_tables")
def test_the_transfer_has_no_more_of_a_windowed_layer_than_its_window(folder):
    def transfers(**changed):
        (folder / "config.json").write_text(json.dumps(LLAMA | changed))
        done = plan("--model", folder, "--gpu", "H100=2", "--json", *GOAL)
        return {one["transfer_seconds"] for one in json.loads(done.stdout)["placements"]} - {0}

    [whole] = transfers()
    [windowed] = transfers(sliding_window=500, layer_types=["sliding_attention"] * 32)
    assert whole == pytest.approx(2 * 2 * 32 * 8 * 128 * 2000 / 50e9)
    assert windowed == pytest.approx(whole / 4)


@pytest.mark.usefixtures("_without_tables")
def test_a_cache_of_an_unknown_kind_is_not_planned_by_the_roofline(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"compress_ratios": [4]}))
    done = plan("--model", folder, "--gpu", "H100=2", *GOAL)
    assert done.exit_code == 2
    assert "does not know the cache of this model; leave the type out" in done.stderr


@pytest.mark.usefixtures("_without_tables")
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("pdctl.cli.plan_slo.placements", None)
    given = ["--model", folder, "--gpu", "B200=8", *GOAL]
    for out in (tmp_path, tmp_path / "none" / "plan.yaml"):
        done = plan(*given, "--out", out)
        assert done.exit_code == 1
        assert f"error: {out}: cannot be written:" in done.stderr.replace("\n", " ")

    kept = tmp_path / "plan.yaml"
    kept.write_text("mine")
    refused = [*given, "--ttft", "0", "--out"]
    assert (plan(*refused, kept).exit_code, kept.read_text()) == (2, "mine")
    assert (plan(*refused, tmp_path / "new.yaml").exit_code, len([*tmp_path.iterdir()])) == (2, 2)


@pytest.mark.usefixtures("_without_tables")
def test_sglang_is_planned_aggregated_for_its_workers_move_no_kv(folder):
    done = plan("--model", folder, "--gpu", "H200=4", "--engine", "sglang", "--json", *GOAL)
    found = json.loads(done.stdout)
    assert {one["kind"] for one in found["placements"]} == {"aggregated"}
    assert found["advice"].startswith("Not split: PDCluster splits with vllm alone")


@pytest.mark.usefixtures("_without_tables")
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["--gpu", "B20O=8"], "--gpu B20O: is not known; the nearest type with numbers is B200"),
        (["--gpu", "cpu=8"], "--gpu cpu: has no known memory, bandwidth, BF16 rate; give"),
        (["--gpu", "RUBIN-CPX=8"], "--gpu RUBIN-CPX: has no known BF16 rate; give one of "),
        (["--ttft", "1e9"], "--ttft: is 1e+09; give at most 604800 seconds"),
        (["--itl", "604801"], "--itl: is 604801; give at most 604800 seconds"),
        (["--gpu", "B200=0"], "--gpu B200=0: give a whole number of 1 to 1024"),
        (["--gpu", "B200=nan"], "--gpu B200=nan: give a whole number of 1 to 1024"),
        (["--gpu", "B200=inf"], "--gpu B200=inf: give a whole number of 1 to 1024"),
        (
            ["--gpu", "B200=16"],
            "--gpu B200: is given twice, 8 and 16; give it once, with their sum",
        ),
        (
            ["--price", "B200=1", "--price", "B200=2"],
            "--price B200: is given twice, 1 and 2; give one of them",
        ),
        (
            ["--input", "131000"],
            "--input and --output: together have 131200 tokens, and the model takes 131072 "
            "(max_position_embeddings); give fewer, or plan a model with a longer context",
        ),
        (["--gpu", "B200"], "--gpu B200: write TYPE=NUMBER, as in B200=8"),
        (["--price", "B200=0"], "--price B200=0: give a price above 0, or leave it out"),
        (["--price", "B200=-1"], "--price B200=-1: give a price above 0"),
        (["--price", "H100=1"], "--price H100: is not at hand; give one of B200"),
        (["--gpu", "B300=8", "--price", "B300=1"], "--price: B200 has none; give all types a"),
        (["--input", "0"], "--input: is 0; give tokens of a request, 1 or more"),
        (["--output", "-3"], "--output: is -3; give tokens of a request, 1 or more"),
        (["--ttft", "0"], "--ttft: is 0; give seconds above 0"),
        (["--itl", "nan"], "--itl: is nan; give seconds above 0"),
        (["--percentile", "10"], "--percentile: is 10; give 50 to 99.9, or leave it out"),
        (["--ttft", "0.0001"], "--ttft 0.0001: no GPU here is so fast: one request alone takes"),
        (["--itl", "0.00001"], "--itl 1e-05: no GPU here is so fast: one request alone takes"),
        (["--model", "acme/7b"], "which is not installed: pip install 'pdcluster[plan]'"),
        (["--file", "a.yaml"], "--slo: plans without a file; leave out -f and --against"),
    ],
)
def test_bad_input_is_answered_with_what_works(folder, changed, sentence):
    done = plan("--model", folder, "--gpu", "B200=8", *GOAL, *changed)
    assert done.exit_code == 2
    assert sentence in done.stderr


@pytest.mark.usefixtures("_without_tables")
def test_a_request_whose_kv_fits_no_worker_is_refused(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 10**9}))
    done = plan("--model", folder, "--gpu", "B200=8", *GOAL, "--input", "100000000")
    assert done.exit_code == 2
    assert "--input: no worker holds the weights, 16 GB, and the KV of" in done.stderr


@pytest.mark.usefixtures("_without_tables")
def test_objectives_that_exclude_each_other_are_answered_with_the_least(folder):
    near = ["--itl", "0.0061", "--percentile", "99.9", "--input", "60000", "--ttft", "30"]
    done = plan("--model", folder, "--gpu", "B200=1", *GOAL, *near)
    assert done.exit_code == 2
    assert "no placement holds 60000 tokens in" in done.stderr
    assert "within this TTFT the least ITL is" in done.stderr


@pytest.mark.usefixtures("_without_tables")
def test_a_model_that_fits_no_worker_is_answered_with_a_worker_that_would(folder):
    large = LLAMA | {"num_hidden_layers": 400, "hidden_size": 32768, "intermediate_size": 65536}
    (folder / "config.json").write_text(json.dumps(large))
    done = plan("--model", folder, "--gpu", "H100=8", *GOAL)
    assert done.exit_code == 2
    assert "no worker holds the model" in done.stderr
    assert "a worker of 128 H100 would hold them" in done.stderr


@pytest.mark.usefixtures("_without_tables")
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"hidden_size": 8}',
        '{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 0}',
        json.dumps(LLAMA | {"intermediate_size": "many"}),
        json.dumps(LLAMA | {"quantization_config": "fp8"}),
    ],
)
def test_a_config_that_is_no_transformer_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    done = plan("--model", folder, "--gpu", "B200=8", *GOAL)
    assert done.exit_code == 2
    assert str(folder / "config.json") in done.stderr


@pytest.mark.usefixtures("_without_tables")
def test_the_transfer_goes_over_the_network_of_the_slowest_type(folder):
    def transfer(gpu):
        found = json.loads(plan("--model", folder, "--gpu", f"{gpu}=8", "--json", *GOAL).stdout)
        return {one["transfer_seconds"] for one in found["placements"] if one["kind"] == "split"}

    kv_bytes = 2000 * 2 * 2 * 8 * 128 * 32
    assert kv_bytes / 50e9 in transfer("H100")
    assert kv_bytes / 100e9 in transfer("B300")


@pytest.mark.usefixtures("_without_tables")
def test_the_folder_may_be_the_present_one_and_choose_all_experts(folder, monkeypatch):
    moe = LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(moe))
    monkeypatch.chdir(folder)
    done = plan("--model", ".", "--gpu", "B200=2", "--json", *GOAL)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["manifest"]["spec"]["model"]["name"] == "llama-8b"


def test_options_of_an_objective_want_slo_and_slo_wants_them():
    alone = CliRunner().invoke(app, ["plan", "--model", "gpt-oss-120b"])
    assert alone.exit_code == 2
    assert "--model: is of --slo" in alone.stderr
    for option in (
        *(["--out", "x.yaml"], ["--plot", "x.png"], ["--json"], ["--engine", "sglang"]),
        *(["--trace-block-tokens", "16"], ["--percentile", "0"], ["--input", "0"]),
    ):
        done = CliRunner().invoke(app, ["plan", "-f", "chat.yaml", *option])
        assert done.exit_code == 2
        assert f"{option[0]}: is of --slo; give --slo, or leave it out" in done.stderr
    assert "--slo: needs --gpu, --input" in plan("--model", "gpt-oss-120b").stderr
    nothing = CliRunner().invoke(app, ["plan"])
    assert "give a PDCluster with -f, or an objective with --slo" in nothing.stderr


class TestWithTables:
    """Skipped where the extra `plan` is not installed."""

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("aiconfigurator_core", reason="pip install 'pdcluster[plan]'")

    def test_measured_kernels_are_named_with_version_system_and_engine(self):
        done = plan("--model", "Qwen3-8B", "--gpu", "H200=4", "--json", *GOAL)
        found = json.loads(done.stdout)
        [source] = found["sources"]
        assert source.startswith("aiconfigurator-core 0.")
        assert "h200_sxm, vllm 0." in source
        assert {one["kind"] for one in found["placements"]} == {"aggregated", "split"}
        assert any("kernels measured" in note for note in found["notes"])

    def test_blocks_of_fp8_on_blackwell_are_warned_of_wherever_they_are_used(self):
        given = ["--model", "Qwen3-30B-A3B-FP8", "--gpu", "B200=2", "--gpu", "H200=2", *GOAL]
        found = json.loads(plan(*given, "--json").stdout)
        assert len(found["warnings"]) == 1
        for one in found["placements"]:
            has_b200 = "B200" in {role["gpu"] for role in one["roles"]}
            assert one["warnings"] == (found["warnings"] if has_b200 else [])
        assert any(point["warnings"] for each in found["front"].values() for point in each)
        text = plan(*given).output
        rows = [line for line in text.splitlines() if " x B200 TP" in line]
        assert rows
        assert all(line.endswith("!") for line in rows)
        assert "!: FP8 in blocks on Blackwell is too slow in these tables" in text

    def test_advice_and_manifest_on_blocks_of_fp8_have_the_warning(self):
        text = plan("--model", "Qwen3-30B-A3B-FP8", "--gpu", "B200=2", *GOAL).output
        words = " ".join(text.split())
        assert "within the error of these estimates: measure both. WARNING" in words
        assert "WARNING: FP8 in blocks on Blackwell is too slow" in words
        assert "# WARNING: FP8 in blocks on Blackwell" in text

    @pytest.mark.parametrize(
        "limit", [["--itl", "0.0001"], ["--itl", "0.013", "--ttft", "0.15", "--percentile", "99.9"]]
    )
    def test_a_refusal_by_blocks_of_fp8_has_the_warning(self, limit):
        done = plan("--model", "Qwen3-32B-FP8", "--gpu", "B200=1", *GOAL, *limit)
        assert done.exit_code == 2
        assert "WARNING: FP8 in blocks on Blackwell is too slow" in done.stderr

    def test_an_unknown_name_is_answered_with_the_nearest_and_the_roofline(self):
        done = plan("--model", "Qwen3-9B", "--gpu", "H200=4", *GOAL)
        assert done.exit_code == 2
        assert "the nearest is qwen3-8b (Qwen/Qwen3-8B)" in done.stderr
        assert "config.json, which our roofline serves" in done.stderr

    def test_a_type_without_tables_is_planned_by_the_roofline_and_says_so(self):
        done = plan("--model", "Qwen3-8B", "--gpu", "MI300X=2", *GOAL)
        assert done.exit_code == 0, done.output
        assert (
            "MI300X: the tables have no step of this model; taken from our roofline" in done.output
        )

    def test_a_model_of_equal_shape_is_named(self):
        name, known = "Llama-3.3-70B-Instruct", tables.known_models()
        assert known[tables.short_name(name)] == "meta-llama/Meta-Llama-3.1-70B"

    def test_a_hole_is_named_and_left(self, folder):
        (folder / "config.json").write_text(
            json.dumps(LLAMA | {"architectures": ["NewForCausalLM"]})
        )
        done = plan("--model", folder, "--gpu", "H200=2", *GOAL)
        assert done.exit_code == 0, done.output
        assert "Hole in the tables: H200" in done.output
        assert "taken from our roofline" in done.output
