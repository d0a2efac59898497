"""The configuration says what the paper's experiments need, and refuses what makes no sense."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reproduction.config import Config, QualityTable, load_config, parse_config
from reproduction.config.__main__ import reference, schema
from reproduction.config.evaluation import DATA_SETS
from reproduction.config.needs import hub_sources
from statecut.arguments import width
from statecut.errors import InputError
from statecut.hub import DEFAULT_PATTERNS, HubItem
from statecut.models.shapes import Shape

FOLDER = Path(__file__).parents[1] / "config"
RUNS = ("demo", "lab", "qwen3_5", "paper")
FIVE = {"l1", "rand", "s_wanda", "grad", "drrqr"}


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    return {run: load_config(FOLDER / f"{run}.yaml") for run in RUNS}


@pytest.fixture(scope="module")
def paper(configs: dict[str, Config]) -> Config:
    return configs["paper"]


@pytest.fixture(scope="module")
def demo_data() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "demo.yaml").read_text())


# --- widths ---


@pytest.mark.parametrize(
    ("d_k", "widths"), [(128, [89, 76, 64, 32, 16]), (256, [179, 153, 128, 64, 32])]
)
def test_widths_of_the_paper(d_k: int, widths: list[int]) -> None:
    assert [width(d_k, ratio) for ratio in (0.3, 0.4, 0.5, 0.75, 0.875)] == widths


@given(d_k=st.integers(1, 512), thousandths=st.integers(0, 999))
def test_width_is_the_exact_floor(d_k: int, thousandths: int) -> None:
    ratio, left = thousandths / 1000, d_k * (1000 - thousandths) // 1000
    if left == 0:
        with pytest.raises(InputError, match="leaves no channel"):
            width(d_k, ratio)
    else:
        assert (
            width(d_k, ratio) == width(d_k, str(ratio)) == width(d_k, Decimal(str(ratio))) == left
        )


# --- the three runs ---


def test_paper_tables_have_the_cells_that_were_published(paper: Config) -> None:
    with open(FOLDER / "published" / "values.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2497
    assert list(paper.tables)[:16] == list(dict.fromkeys(row["table"] for row in rows))

    names = ("table", "model", "conv_sharing", "method", "target", "compression", "rft", "metric")
    for name in list(paper.tables)[:16]:
        if not isinstance(paper.tables[name], QualityTable):
            continue
        published = {tuple(r[n] for n in names) for r in rows if r["table"] == name}
        ours = {
            (
                name,
                paper.models[v.model].published_as or v.model,
                paper.models[v.model].filter_sharing,
                v.method,
                v.target,
                f"{v.ratio:g}",
                v.rft,
                column,
            )
            for v, column in paper.cells(name)
            if v.pruned or v.rft == "none"
        }
        assert ours == published, name


@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsal_has_all_of_a_run_and_little_work(configs: dict[str, Config], name) -> None:
    run, rehearsal = configs[name], load_config(FOLDER / f"{name}.yaml", rehearsal=True)
    assert rehearsal.run == "rehearsal"
    for part in ("methods", "tables", "figures", "benchmarks"):
        assert [*getattr(rehearsal, part)] == [*getattr(run, part)]
    first = [name for name, model in run.models.items() if not model.training]
    assert [*rehearsal.models] == first
    assert rehearsal.trained_shapes() == run.trained_shapes()
    variants = [v for v in run.variants() if v.model in first]
    cuts = {(v.model, v.method, v.target, v.ratio, v.rft, v.eps) for v in variants}
    assert cuts == {
        (v.model, v.method, v.target, v.ratio, v.rft, v.eps) for v in rehearsal.variants()
    }
    assert not hub_sources(rehearsal)  # nothing was downloaded here
    assert all(recipe.steps == 20 for recipe in rehearsal.recipes.values())


def test_paper_trains_two_sizes_of_each_rule_at_five_widths(paper: Config) -> None:
    assert set(paper.trained_shapes()) == {
        *(Shape("delta_net", h, w, h, 128) for h in (8, 16) for w in (128, 89, 76, 64, 32)),
        *(
            Shape("gated_deltanet", h, w, h, values)
            for h, values in ((4, 256), (8, 256))
            for w in (256, 179, 153, 128, 64)
        ),
    }


def test_paper_batches_make_ten_billion_tokens(paper: Config) -> None:
    recipe = paper.recipes["fineweb_10B"]
    assert recipe.sequences * 2048 == 9_995_026_432
    assert paper.recovery is not None
    assert paper.recovery.sequences == 32_000


def test_parameters_are_those_of_the_classes(paper: Config) -> None:
    # Counted in flash-linear-attention 0.6.0, and in our shared-filter class.
    assert paper.models["delta_net_370M"].parameters == 374_362_112
    assert paper.models["delta_net_370M_head"].parameters == 374_069_504
    # The hub's file: so many float32 numbers, a header, and 24 x 8 that are not used.
    assert paper.models["gated_deltanet_1.3B"].parameters == 1_466_343_808


def test_demo_has_every_kind_of_table_and_figure(configs: dict[str, Config]) -> None:
    for part in ("tables", "figures", "benchmarks"):
        kinds = {run: {t.kind for t in getattr(configs[run], part).values()} for run in RUNS}
        assert kinds["demo"] >= kinds["paper"] | kinds["lab"]
    assert configs["demo"].methods.keys() >= FIVE
    cuts = {v.ratio for v in configs["demo"].variants() if v.pruned}
    assert cuts == {0.5, 0.75, "16x64", "32x32", "64x16"}


def test_a_table_with_both_eps_needs_both_and_others_the_runs_own(
    configs: dict[str, Config],
) -> None:
    demo = configs["demo"]
    evaluated = (variant for variant, _ in demo.evaluations("small_eps"))
    pruned = {(v.model, v.method, v.ratio, v.rft, v.eps) for v in evaluated}
    pruned -= {(model, "baseline", 0.0, "none", "kept") for model in demo.models}
    assert len(pruned) == 2 * 2 * 2  # models x stages x eps
    for run, eps in (("demo", "matched"), ("lab", "matched"), ("paper", "kept")):
        others = [name for name in configs[run].tables if not name.endswith("eps")]
        shown = [variant for variant, _ in configs[run].evaluations(*others)]
        shown += configs[run].analyses()
        assert {v.eps for v in shown if v.pruned} == {eps}, run


def test_lab_draws_three_times_where_there_is_chance(configs: dict[str, Config]) -> None:
    variants = configs["lab"].variants()
    seeds = {
        name: {v.seed for v in variants if v.method == name} for name in ("rand", "grad", "l1")
    }
    assert seeds == {"rand": {0, 1, 2}, "grad": {0, 1, 2}, "l1": {0}}
    drawn_again = {(v.method, v.ratio) for v in variants if v.recovered and v.seed}
    assert drawn_again == {(name, 0.5) for name in ("grad", "drrqr", "fisher")}  # table `draws`


def test_lab_trains_three_times_what_its_headlines_rest_on(configs: dict[str, Config]) -> None:
    lab = configs["lab"]
    averaged = {name for name, table in lab.tables.items() if getattr(table, "trainings", 1) == 3}
    assert {model for name in averaged for model in lab.tables[name].models} == {
        name for name in lab.models if f"{name}-training2" in lab.models
    }
    assert not {v.model for v, _ in lab.evaluations(*lab.tables.keys() - averaged)} & {
        name for name, model in lab.models.items() if model.training
    }
    again = [name for name in lab.models if name.startswith("hybrid_40M")]
    assert again == ["hybrid_40M", "hybrid_40M-training1", "hybrid_40M-training2"]
    assert [lab.recipe_of(name).seed for name in again] == [0, 1, 2]
    assert lab.recipe_of(again[2]).steps == lab.recipe_of(again[0]).steps
    assert parse_config(lab.model_dump(mode="json"), "dumped") == lab


def test_a_suite_is_evaluated_with_its_seeds(configs: dict[str, Config]) -> None:
    def draws(config: Config, suite: str) -> dict[str, set[int]]:
        evaluations = config.evaluations("recovered")
        variants = [v for v, name in evaluations if name == suite]
        return {m: {v.seed for v in variants if v.method == m} for m in ("rand", "l1", "baseline")}

    lab = configs["lab"]
    assert draws(lab, "ppl") == {"rand": {0, 1, 2}, "l1": {0}, "baseline": {0}}
    assert draws(lab, "zero_shot") == {"rand": {0}, "l1": {0}, "baseline": {0}}
    raw = lab.model_dump(mode="json")
    raw["evaluation"]["suites"]["zero_shot"]["seeds"] = [2]
    # What is not drawn has seed 0, and is evaluated all the same.
    assert draws(Config(**raw), "zero_shot") == {"rand": {2}, "l1": {0}, "baseline": {0}}


def test_columns_left_out_cost_nothing_and_stay_in_the_table(configs: dict[str, Config]) -> None:
    raw = configs["lab"].model_dump(mode="json")
    tasks = raw["evaluation"]["suites"]["zero_shot"]["tasks"]
    for column in tasks.keys() - {"lambada_acc"}:
        tasks[column]["not_attempted"] = "data"
    lab = Config(**raw)
    suite = lab.evaluation.suites["zero_shot"]
    assert suite.left_out("piqa_acc_norm") == suite.left_out("zero_shot_avg") == "data"
    assert suite.left_out("lambada_acc") is None
    assert "piqa_acc_norm" in {column for _, column in lab.cells("recovered")}
    # Only because of lambada_acc.
    assert "zero_shot" in {name for _, name in lab.evaluations("recovered")}


# --- the hub ---

MODEL = DEFAULT_PATTERNS["model"]
GATED_COMMIT = "930ed6ae4ac629c86cb9855bb3dcb0a0974a29aa"


def test_paper_takes_from_the_hub_what_it_evaluates_and_the_shape_of_what_it_only_times(
    paper: Config,
) -> None:
    assert set(hub_sources(paper)) == {
        HubItem("model", "fla-hub/delta_net-1.3B-100B", "main", MODEL),
        HubItem("model", "m-a-p/1.3B-100B-GatedDeltaNet-pure", GATED_COMMIT, MODEL),
        HubItem("model", "fla-hub/delta_net-2.7B-100B", "main", ("config.json",)),
        HubItem("model", "fla-hub/transformer-1.3B-100B", "main", ("*token*",)),
        HubItem("dataset", "HuggingFaceFW/fineweb-edu", "main", ("sample/10BT/*.parquet",)),
        *(HubItem("dataset", name, "main", ("*",)) for name, _, _ in DATA_SETS.values()),
    }
    assert "delta_net_2.7B" in {m.subject for m in paper.measurements()}


HUB_MODEL = {"kind": "hub", "name": "owner/model", "revision": "v1"}
HUB_TEXT = {"kind": "hub", "name": "owner/text", "length": 128, "seed": 0, "slices": {"all": 9}}


def test_a_repository_that_is_model_and_tokenizer_is_one_item(demo_data: dict[str, Any]) -> None:
    data = edit(demo_data, "models/delta_net/source", HUB_MODEL)
    data = edit(data, "tokenizers/demo", HUB_MODEL)
    patterns = tuple(sorted({*MODEL, "*token*"}))
    assert hub_sources(parse_config(data, "mine")) == (
        HubItem("model", "owner/model", "v1", patterns),
    )
    data = edit(data, "tokenizers/demo/revision", "v2")
    with pytest.raises(InputError, match="owner/model: the run asks for revisions v2 and v1; give"):
        hub_sources(parse_config(data, "mine"))


def test_a_figure_of_filters_needs_the_weights(demo_data: dict[str, Any]) -> None:
    figure = {"kind": "filters", "model": "other", "caption": ""}
    other = {**demo_data["models"]["delta_net"], "source": HUB_MODEL, "label": "other"}
    data = edit(demo_data, "models/other", other)
    assert hub_sources(parse_config(data, "mine")) == ()
    data = edit(data, "figures/other", figure)
    assert [item.name for item in hub_sources(parse_config(data, "mine"))] == ["owner/model"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tokenizers/demo/corpus", "text"),
        ("recipes/spare/data", "text/all"),
        ("calibration", {"data": "text/all", "sequences": 9, "rows": 100}),
        ("recovery/data", "text/all"),
        ("analysis/data", "text/all"),
    ],
)
def test_text_is_fetched_where_something_uses_it(
    demo_data: dict[str, Any], path: str, value: Any
) -> None:
    data = edit(demo_data, "corpora/text", HUB_TEXT)
    data = edit(data, "recipes/spare", demo_data["recipes"]["demo"])
    data = edit(data, "models/delta_net/source/recipe", "spare")
    for training in ("recipes/spare", "recovery"):
        data = edit(data, f"{training}/epochs", 10_000)
    assert hub_sources(parse_config(data, "mine")) == ()
    data = edit(data, path, value)
    assert hub_sources(parse_config(data, "mine")) == (
        HubItem("dataset", "owner/text", "main", ("*",)),
    )


# --- files ---


@pytest.mark.parametrize("run", RUNS)
def test_editors_accept_the_files(run: str) -> None:
    text = (FOLDER / f"{run}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json.loads(schema()))


@pytest.mark.parametrize(("name", "generate"), [("schema.json", schema), ("README.md", reference)])
def test_generated_files_are_current(name: str, generate: Callable[[], str]) -> None:
    assert (FOLDER / name).read_text() == generate(), (
        f"config/{name} is not what the sections say; run `python -m reproduction.config`"
    )


def test_every_key_is_described() -> None:
    for name, section in json.loads(schema())["$defs"].items():
        for key, field in section["properties"].items():
            assert "description" in field, f"{name}.{key}"


# --- mistakes ---


def edit(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the value at a path (keys joined by /) is another."""
    data = copy.deepcopy(data)
    *parents, last = path.split("/")
    here = data
    for key in parents:
        here = here[key]
    here[last] = value
    return data


L1 = {"label": "x", "algorithm": "l1"}
PIQA = {"label": "PIQA", "task": "piqa", "metric": "acc", "version": 1}
SUITE = {"label": "x", "window": 64, "tasks": {"piqa": PIQA}, "mean": "zero_shot_avg"}

WRONG = [
    ("modles", {}, "unknown key 'modles'; did you mean 'models'?"),
    ("models/delta_net/num_head", 2, "models.delta_net: unknown key 'num_head'; did you mean"),
    ("models/delta_net/architecture", "deltanet", "models.delta_net: Input tag 'deltanet' found"),
    ("models/delta_net/source/kind", "hug", "models.delta_net.source: Input tag 'hug' found"),
    ("models/delta_net/hidden_size", "64", "models.delta_net.hidden_size: '64': Input should be"),
    ("models/delta_net/num_heads", 3, "delta_net: hidden_size 64 x expand_k 1.0 / num_heads 3"),
    ("models/gated_deltanet/num_v_heads", 3, "num_v_heads 3 must be a multiple of num_heads 2"),
    ("models/a b", {}, "models.a b: 'a b': String should match pattern"),
    ("models/delta_net/vocab_size", 100, "vocab_size: 100: its tokenizer has 1024"),
    ("models/delta_net/tokenizer", "dem", "tokenizer: there is no 'dem'; did you mean 'demo'?"),
    ("models/delta_net/source/recipe", "dmo", "source.recipe: there is no 'dmo'; did you mean"),
    ("models/delta_net/published_as", "gated_deltanet", "models.gated_deltanet: "
     "('gated_deltanet', 'none', 0) is a name or label of models.delta_net already"),
    ("models/gated_deltanet/label", "DeltaNet", "'DeltaNet' is a name or label of models.del"),
    ("tokenizers/demo/corpus", "document", "tokenizers.demo.corpus: there is no 'document'"),
    ("tokenizers/demo", {"kind": "hub", "name": "x"}, "tokenizers.demo.name: 'x': String should"),
    ("methods/rand", {"label": "x"}, "methods.rand: Unable to extract tag"),
    ("methods/drrqr/f", 0.5, "methods.drrqr.f: 0.5: Input should be greater than or equal to 1"),
    ("methods/l1/label", "Rand", "methods.rand: 'Rand' is a name or label of methods.l1 already"),
    ("methods/l1/label", "Baseline", "'Baseline' is a name or label of the unpruned model"),
    ("methods/baseline", L1, "methods.baseline: the unpruned model has this name already"),
    ("methods/delta_net", L1, "methods.delta_net: models.delta_net has this name already"),
    ("seeds", [], "seeds: Tuple should have at least 1 item"),
    ("seeds", [1, 1], "seeds: 1 stands twice"),
    ("recipes/demo/trainer", "flame", "recipes.demo.trainer: flame needs GPUs, and `device`"),
    ("recipes/demo/activation_checkpoint", "full", "the built-in trainer keeps all activations"),
    ("recipes/demo/warmup", 300, "recipes.demo: warmup 300 must be less than steps 300"),
    ("recipes/demo/steps", 500, "recipes.demo: 500 steps need 4000 sequences"),
    ("recipes/demo/data", "documentation/pretrain", "did you mean 'documentation/pretraining'?"),
    ("recipes/short/trainer", "flame", "models.hybrid.source.recipe: short: flame trains no"),
    ("recovery/seeds", [4], "recovery.seeds: 4 is none of `seeds` [0]"),
    ("tables/refit/trainings", 2, "tables.refit.trainings: 2: delta_net has 1"),
    ("recovery/lora", {"rank": 4}, "recovery.lora.alpha: Field required"),
    ("recovery", None, "tables.refit_recovered: shows recovered models, so it needs a `recovery`"),
    ("calibration/sequences", 65, "calibration.sequences: 65: calibration/sequences has 64"),
    ("calibration/rows", 10**6, "calibration.rows: 1000000: its sequences have 2048 tokens"),
    ("calibration", None, "methods.drrqr: drrqr needs a `calibration`"),
    ("calibration", None, "tables.refit: shows refitted models, so it needs a `calibration`"),
    ("analysis", None, "figures.utilization: shows states, so it needs an `analysis`"),
    ("evaluation/suites/zero_shot/seeds", [4], "evaluation.suites.zero_shot.seeds: 4 is none of"),
    ("evaluation/suites/ppl/tasks/prose_word_ppl/file", "mine.jsonl", "must lie in results/demo/"),
    ("evaluation/suites/ppl/tasks/prose_word_ppl/metric", "acc", "metric 'acc' of demo_prose"),
    ("evaluation/suites/ppl/mean", "ppl_avg", "prose_word_ppl is no accuracy, only these have one"),
    ("evaluation/suites/again", SUITE, "again: 'zero_shot_avg' is a name or label of eva"),
    ("tables/by_ratio/ratios", ["16x24"], "methods.grad: chooses no value channels, which 16x24 "),
    ("tables/by_ratio/recovery_seeds", [4], "tables.by_ratio.recovery_seeds: 4 is none of `seeds`"),
    ("tables/small_values/ratios", ["64x96"], "models.delta_net_3M: 64x96: it has 64 x 64"),
    ("tables/small_values/ratios", ["64-96"], "ratios.0: '64-96': String should match pattern"),
    ("tables/by_model/ratios", [1.2], "tables.by_model.ratios.0: 1.2: Input should be less than 1"),
    ("tables/by_model/ratios", [0.99], "models.delta_net: ratio 0.99 leaves no channel of 32"),
    ("tables/by_model/ratios", [], "tables.by_model: methods and ratios need each other"),
    ("tables/by_model/columns", {"none": ["ppl"]}, "by_model: columns stand under pre, refit"),
    ("tables/by_model/columns/pre", ["pplx"], "tables.by_model.columns.pre: there is no 'pplx'"),
    ("tables/by_model/columns/per", ["ppl"], "columns.per: 'per': Input should be 'none', 'pre'"),
    ("tables/by_model/methods", ["drqr"], "tables.by_model.methods: there is no 'drqr'; did you"),
    ("tables/by_model/models", ["delta_nt"], "tables.by_model.models: there is no 'delta_nt'"),
    ("tables/by_model/eps", ["kept", "matched"], "a table of kind by_model has one of eps, not 2"),
    ("tables/targets/targets", None, "a table of kind targets needs targets, of kq"),
    ("tables/mixer_speed/benchmark", "model", "tables.mixer_speed.benchmark: there is no 'model'"),
    ("tables/mixer_speed/shows", "training", "tables.mixer_speed.shows: its benchmark does not"),
    ("benchmarks/model/ratios", [0.98], "models.delta_net: ratio 0.98 leaves no channel of 32"),
    ("benchmarks/model/models", ["x"], "benchmarks.model.models: there is no 'x'"),
    ("benchmarks/decoding/models", ["hybrid"], "decoding.models: hybrid: decoding is timed of"),
    ("benchmarks", 3, "benchmarks: 3: Input should be a valid dictionary"),
    ("figures/spectrum/tokens", 4096, "tokens: 4096: must lie above analysis.skip (16), up to"),
    ("figures/spectrum/layer", 2, "layer: 2: those with a delta rule are [0, 1]"),
    ("figures/spectrum/head", 2, "figures.spectrum.head: 2: there are 2 from 0 on"),
    ("figures/sweep/benchmark", "model", "figures.sweep.benchmark: there is no 'model'"),
    ("figures/quality/tables", ["zero"], "figures.quality.tables: there is no 'zero'"),
    ("figures/quality/tables", ["sharing"], "sharing: must have methods, and no targets or eps"),
    ("figures/quality/tables", ["targets"], "targets: must have methods, and no targets or eps"),
    ("figures/quality/tables", ["retrieval"], "retrieval has no column prose_word_ppl"),
    ("figures/quality/column", "zero_shot_avg", "figures.quality.column: there is no 'zero_shot_a"),
]  # fmt: skip


def test_seeds_that_would_calibrate_on_the_same_text_are_refused(demo_data: dict[str, Any]) -> None:
    all_of_it = edit(demo_data, "calibration/sequences", 64)
    parse_config(all_of_it, "mine.yaml")
    with pytest.raises(InputError, match="all 64 of calibration/sequences, so that every seed"):
        parse_config(edit(all_of_it, "seeds", [0, 1]), "mine.yaml")


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_a_mistake_is_named(demo_data: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(edit(demo_data, path, value), "mine.yaml")
    assert message in str(caught.value)
    assert all(line.startswith("mine.yaml: ") for line in str(caught.value).splitlines())


def test_a_spectrum_is_of_a_value_head(demo_data: dict[str, Any]) -> None:
    data = edit(demo_data, "models/gated_deltanet/num_v_heads", 4)
    data = edit(edit(data, "figures/spectrum/model", "gated_deltanet"), "figures/spectrum/head", 3)
    parse_config(data, "mine.yaml")
    with pytest.raises(InputError, match=r"figures\.spectrum\.head: 4: there are 4 from 0 on"):
        parse_config(edit(data, "figures/spectrum/head", 4), "mine.yaml")


def test_two_benchmarks_that_tables_show_time_different_things(demo_data: dict[str, Any]) -> None:
    data = edit(demo_data, "benchmarks/again", {**demo_data["benchmarks"]["model"], "batch": 7})
    parse_config(data, "mine.yaml")
    table = {**demo_data["tables"]["model_speed"], "benchmark": "again"}
    with pytest.raises(
        InputError, match=r"benchmarks\.again: times forward of delta_net at d_k 32, "
    ):
        parse_config(edit(data, "tables/again", table), "mine.yaml")


def test_every_mistake_has_its_line(demo_data: dict[str, Any]) -> None:
    data = edit(demo_data, "models/delta_net/num_head", 2)
    data = edit(data, "methods/l1/algorithm", "l2")
    with pytest.raises(InputError) as caught:
        parse_config(data, "mine.yaml")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.yaml: cannot be read: [Errno 2] No such file"),
        ("", "mine.yaml: None: Input should be a valid dictionary"),
        ("models:\n  a: {x: 1}\n  a: {x: 2}\n", "key 'a' stands twice"),
        ("- 1\n", "mine.yaml: Input should be a valid dictionary"),
        ("run: [1\n", "expected ',' or ']'"),
        ("1: 2\n", "mine.yaml: unknown key 1"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    for settings in ({}, {"rehearsal": True}):
        with pytest.raises(InputError) as caught:
            load_config(path, **settings)
        assert message in str(caught.value)


def test_what_only_makes_training_fit_does_not_define_it(paper: Config) -> None:
    assert paper.recovery is not None
    for settings, key, value in (
        (paper.recovery, "gradient_accumulation_steps", 16),
        (paper.recipes["fineweb_10B"], "activation_checkpoint", "full"),
    ):
        other = settings.model_copy(update={key: value})
        assert other != settings
        assert other.defining() == settings.defining()
        longer = settings.model_copy(update={"steps": 3})
        assert longer.defining() != settings.defining()
