"""On any number of ranks, evaluation gives the results of scikit-learn in one process. Padded
samples do not count.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from ddpjob_trainer.commands import evaluate_checkpoint
from ddpjob_trainer.config.sections import EvalConfig, OptimConfig, PrKind
from ddpjob_trainer.data.dataset import Batch, Targets
from ddpjob_trainer.data.sampler import DataShare
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, DataError, TrainingError
from ddpjob_trainer.evaluation import curves
from ddpjob_trainer.evaluation import evaluate as evaluate_module
from ddpjob_trainer.evaluation.accumulate import Accumulator, Evaluation, open_accumulator
from ddpjob_trainer.evaluation.evaluate import evaluate
from ddpjob_trainer.lifecycle.signals import StopRequest
from ddpjob_trainer.optim.loss import Loss

EXACT = EvalConfig(pr=PrKind.EXACT)

# Pickled by value, so the ranks need not import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scores:
    """A test set whose images are already the scores that a model would compute."""

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self._logits, self._labels = logits, labels
        self.classes, self.shape, self.train_size, self.test_size = (
            logits.shape[1],
            (1, 1, logits.shape[1]),
            0,
            len(labels),
        )
        self.class_names = None

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        raise AssertionError("not trained on")

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        for part in parts:
            yield Batch(self._logits[part], self._labels[part])


def scores(size: int, classes: int, *, ties: bool = False, absent: int = 0) -> Scores:
    """Return random scores that often predict the right class.

    `ties` rounds the scores, so that many of them are equal. The last `absent` classes have no
    samples.
    """
    generator = torch.Generator().manual_seed(size * classes)
    labels = torch.randint(0, classes - absent, (size,), generator=generator)
    logits = torch.randn(size, classes, generator=generator) + 2 * torch.nn.functional.one_hot(labels, classes)
    return Scores(logits.round() if ties else logits, labels)


def on_ranks(world: int, act: Callable[[Group], Any]) -> list[Any]:
    """Call `act` on each of `world` real ranks over gloo, and return the results. An exception is
    returned as its text.
    """
    if world == 1:
        return [act(Group())]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port

    def rank(number: int) -> Any:
        joined = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=joined, rank=number, world_size=world)
        return act(Group(number, world))

    return ranks.called(world, rank)


def evaluated(
    group: Group, data: Scores, config: EvalConfig, batch: int = 7, own: DataShare | None = None
) -> Evaluation:
    result = evaluate(
        lambda images: images.flatten(1),
        own or DataShare(group.rank, group.world),
        data,
        batch,
        group,
        StopRequest(group),
        config=config,
    )
    assert result is not None
    return result


def as_scikit_learn(data: Scores) -> dict[str, Any]:
    from sklearn import metrics

    labels, logits = data._labels.numpy(), data._logits
    chances = logits.softmax(1).numpy()
    truth = np.eye(data.classes)[labels]
    first_wins = (
        data.classes - 1 - labels,
        logits.numpy()[:, ::-1],
    )  # scikit-learn's top_k prefers the last of equal scores
    numbers = np.arange(data.classes)
    with np.errstate(all="ignore"):
        return {
            "loss": metrics.log_loss(labels, logits.double().softmax(1).numpy(), labels=numbers),
            "accuracy": metrics.accuracy_score(labels, logits.argmax(1).numpy()),
            "top5": metrics.top_k_accuracy_score(*first_wins, k=5, labels=numbers) if data.classes > 5 else 1.0,
            "mae": metrics.mean_absolute_error(labels, logits.argmax(1).numpy()),
            "macroAP": metrics.average_precision_score(truth, chances, average="macro"),
            "microAP": metrics.average_precision_score(truth, chances, average="micro"),
            "confusion": metrics.confusion_matrix(labels, logits.argmax(1).numpy(), labels=numbers),
            "curves": [metrics.precision_recall_curve(truth[:, each], chances[:, each]) for each in numbers],
            "pooled": metrics.precision_recall_curve(truth.ravel(), chances.ravel()),
        }


SETS = [
    scores(57, 8),
    scores(2, 6),  # fewer samples than ranks
    scores(64, 7, ties=True),
    scores(40, 9, absent=3),  # classes without positives
    scores(1, 3),
    scores(30, 4, ties=True, absent=2),
]


@pytest.mark.filterwarnings("ignore:No positive class found:UserWarning", "ignore:.*'y_true' is smaller:UserWarning")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_metrics_equal_scikit_learns_on_any_number_of_ranks(world: int) -> None:
    of_ranks = on_ranks(world, lambda group: [evaluated(group, each, EXACT) for each in SETS])
    for data, results in zip(SETS, zip(*of_ranks, strict=True), strict=True):
        wanted = as_scikit_learn(data)
        for result in results:
            assert (result.samples, result.nonfinite, result.unreadable) == (data.test_size, 0, 0)
            assert result.loss == pytest.approx(wanted["loss"], abs=1e-6)
            for name in ("accuracy", "top5", "mae", "macroAP", "microAP"):
                assert result.scalars()[name] == pytest.approx(wanted[name], abs=1e-12), name
            assert (result.confusion.numpy() == wanted["confusion"]).all()
        first = results[0].curves
        for own, theirs in zip([*first.of_class, first.pooled], [*wanted["curves"], wanted["pooled"]], strict=True):
            for mine, there in zip((own.precision, own.recall, own.thresholds), theirs, strict=True):
                np.testing.assert_allclose(mine.numpy(), there, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [PrKind.EXACT, PrKind.BINNED])
def test_with_bce_a_probability_depends_only_on_the_score_of_its_class(kind: PrKind) -> None:
    """This loss does not use softmax, with which a sample's other scores would change its rank
    among all samples.
    """
    from sklearn.metrics import average_precision_score

    data, criterion = scores(4000, 6), Loss(OptimConfig(loss="bce"))
    adding = open_accumulator(Targets.CLASSES, 6, criterion.each, EvalConfig(pr=kind), decisions=criterion.of_decisions)
    adding.add(data._logits, data._labels)
    found = adding.reduce(Group(), 4000).curves
    truth = np.eye(6)[data._labels.numpy()]
    expected, others = (
        average_precision_score(truth, chances.numpy(), average=None)
        for chances in (data._logits.sigmoid(), data._logits.softmax(1))
    )
    tolerance = 1e-12 if kind is PrKind.EXACT else 2e-3
    np.testing.assert_allclose(found.average_precision, expected, rtol=0, atol=tolerance)
    assert np.abs(others - expected).max() > 0.01


@pytest.mark.parametrize("world", [1, 3])
def test_binned_curves_are_exact_for_binned_scores_and_close_for_others(world: int) -> None:
    from sklearn.metrics import average_precision_score

    data = scores(400, 6)
    (result, *_) = on_ranks(
        world, lambda group: evaluated(group, data, EvalConfig(pr=PrKind.BINNED, pr_bins=40)).curves
    )
    chances, truth = data._logits.softmax(1), np.eye(6)[data._labels.numpy()]
    bins = curves.bin_of(chances, 40).numpy()
    assert result.average_precision == pytest.approx(
        average_precision_score(truth, bins, average=None).tolist(), abs=1e-12
    )
    assert result.micro == pytest.approx(average_precision_score(truth, bins, average="micro"), abs=1e-12)
    many = scores(5000, 6)
    wanted = average_precision_score(np.eye(6)[many._labels.numpy()], many._logits.softmax(1).numpy(), average=None)
    fine = evaluated(Group(), many, EvalConfig(pr=PrKind.BINNED), batch=500).curves
    assert fine is not None and fine.average_precision == pytest.approx(wanted.tolist(), abs=2e-3)


def test_bins_separate_the_scores_of_a_confident_model() -> None:
    sure = torch.tensor([[0.999, 0.9999, 0.99999, 1e-5, 1e-4, 0.0, 1.0]])
    places = curves.bin_of(sure, 1000)[0].tolist()
    assert len(set(places)) == 7 and max(places) == 999 and min(places) == 0


def test_the_memory_for_binned_curves_does_not_grow() -> None:
    accumulator = Accumulator(6, EvalConfig(pr=PrKind.BINNED, pr_bins=50))
    data = scores(500, 6)
    for start in range(0, 500, 50):
        accumulator.add(data._logits[start : start + 50], data._labels[start : start + 50])
    assert accumulator._curves._counts.shape == (2, 300)  # type: ignore[union-attr]


def test_samples_count_once_although_several_pipeline_stages_see_them() -> None:
    """Ranks 0 and 1 read the first half of the samples, and ranks 2 and 3 the second. Only ranks 1
    and 3 have the scores.
    """
    data = scores(31, 6)

    def stage(group: Group) -> dict[str, float]:
        own = DataShare(group.rank // 2, 2, counts=group.rank % 2 == 1)
        broken = Scores(data._logits * (0 if not own.counts else 1), data._labels)
        return evaluated(group, broken, EXACT, own=own).scalars()

    alone = evaluated(Group(), data, EXACT).scalars()
    for result in on_ranks(4, stage):
        assert result == pytest.approx(alone, abs=1e-6)


def test_every_rank_takes_part_in_every_evaluation_round() -> None:
    """A forward pass may contain a collective. With 3 samples, batches of one and 2 ranks, both
    ranks therefore run two rounds with images.
    """

    def count(group: Group) -> list[int]:
        seen: list[int] = []

        def model(images: torch.Tensor) -> torch.Tensor:
            seen.append(len(group.gather(len(images))))
            assert len(images) == 1
            return images.flatten(1)

        evaluate(model, DataShare(group.rank, group.world), scores(3, 4), 1, group, StopRequest(group))
        return seen

    assert on_ranks(2, count) == [[2, 2], [2, 2]]


# ------------------------------------------------------------ the checks can fail


def test_the_comparison_detects_padded_samples() -> None:
    """DistributedSampler repeats the first samples so that all ranks have the same number of
    samples.
    """

    def padded(items: list[int], part: int, parts: int) -> list[int]:
        return [items[place % len(items)] for place in range(part, -(-len(items) // parts) * parts, parts)]

    def padding(group: Group) -> Evaluation:
        evaluate_module.share = padded
        return evaluated(group, scores(31, 6), EXACT)

    results = on_ranks(2, padding)
    assert all(
        "evaluation counted 32 test samples and 0 unreadable ones, but the test set has 31" in result
        for result in results
    ), results


def test_the_comparison_detects_curves_that_are_averaged_over_ranks() -> None:
    """Average precision is not the mean of the ranks' values. If the scores are not gathered, the
    comparison with scikit-learn must fail.
    """
    data = scores(57, 8)
    wanted = as_scikit_learn(data)["macroAP"]

    def apart(group: Group) -> Any:
        curves._gather = lambda mine, group: mine.flatten()
        return evaluated(group, data, EXACT).curves

    (result, *_) = on_ranks(2, apart)
    assert abs(result.macro - wanted) > 1e-4


# ------------------------------------------------------------ unusual input


@pytest.mark.parametrize("label", [0, 4])
def test_scores_that_are_not_finite_are_counted_and_never_count_as_correct(label: int) -> None:
    """argmax returns class 0 if all scores are NaN."""
    data = scores(20, 5)
    data._logits[3:6] = torch.nan
    data._labels[3:6] = label
    result = evaluated(Group(), data, EXACT)
    finite = data._logits.isfinite().all(1)
    others = evaluated(Group(), Scores(data._logits[finite], data._labels[finite]), EXACT)
    assert result.nonfinite == 3 and np.isnan(result.loss)
    assert result.accuracy * 20 == pytest.approx(others.accuracy * 17)
    assert result.confusion.trace() == others.confusion.trace() and result.confusion[label].sum() >= 3


def test_unreadable_samples_do_not_count_in_any_metric() -> None:
    data = scores(20, 5)
    rest = evaluated(Group(), Scores(data._logits[4:], data._labels[4:]), EXACT)
    data._labels[:4] = -100
    result = evaluated(Group(), data, EXACT)
    assert (result.samples, result.unreadable) == (16, 4) and result.scalars() == pytest.approx(rest.scalars())


def test_invalid_input_of_an_evaluation_is_reported() -> None:
    accumulator = Accumulator(5, EvalConfig())
    with pytest.raises(DataError, match=r"labels from 1 to 5, but they must be from 0 to 4; correct the labels"):
        accumulator.add(torch.zeros(2, 5), torch.tensor([1, 5]))
    with pytest.raises(TrainingError, match=r"shape \(2, 6\) for 2 samples of 5 classes"):
        accumulator.add(torch.zeros(2, 6), torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match=r"eval\.pr_bins=1: must be at least 2"):
        Accumulator(5, EvalConfig(pr=PrKind.BINNED, pr_bins=1))


def test_an_evaluation_of_an_empty_test_set_succeeds_without_numbers() -> None:
    result = evaluated(Group(), Scores(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), EXACT)
    assert result.samples == 0 and result.curves is None


# ------------------------------------------------------------ files on disk


@pytest.mark.parametrize("classes", [3, 60])
def test_an_evaluation_writes_files_and_pictures(classes: int, tmp_path: Path) -> None:
    from ddpjob_trainer.evaluation.result_files import EvaluationFiles
    from PIL import Image
    from sklearn.metrics import precision_recall_fscore_support

    data = scores(400, classes)
    result = evaluated(Group(), data, EXACT)
    files = EvaluationFiles(tmp_path / "eval", EXACT, [f"kind {number}" for number in range(classes)])
    path = files.write("epoch-002", result, epoch=2, step=14)
    files.wait()
    reported = json.loads(path.read_text())
    assert (reported["epoch"], reported["step"], reported["samples"], reported["microAP"]) == (
        2,
        14,
        400,
        result.scalars()["microAP"],
    )
    assert [entry["name"] for entry in reported["classes"][:2]] == ["kind 0", "kind 1"]
    wanted = precision_recall_fscore_support(
        data._labels, data._logits.argmax(1), labels=range(classes), zero_division=0
    )
    for name, values in zip(("precision", "recall", "f1", "support"), wanted, strict=True):
        assert [entry[name] for entry in reported["classes"]] == pytest.approx(values.tolist()), name
    matrix = np.loadtxt(tmp_path / "eval" / "epoch-002-confusion.csv", delimiter=",")
    assert (matrix == result.confusion.numpy()).all()  # type: ignore[union-attr]
    assert len(reported["prCurves"]["micro"]["recall"]) <= 1001
    for name in ("pr", "confusion"):
        picture = Image.open(tmp_path / "eval" / f"epoch-002-{name}.png").convert("L")
        assert picture.width > 700 and np.asarray(picture).std() > 10, "the picture is not empty"


def test_plots_show_class_names_that_are_not_plain_text(tmp_path: Path) -> None:
    from ddpjob_trainer.evaluation import plots
    from ddpjob_trainer.evaluation.result_files import document

    result = evaluated(Group(), scores(90, 3), EXACT)
    names = ["$\\frac{x$", os.fsdecode(b"\xff"), "two\nlines"]  # Folders may have such names.
    path = tmp_path / "epoch-001.json"
    path.write_text(json.dumps(document(result, names)))
    assert plots.draw(path) == [tmp_path / "epoch-001-pr.png"]
    assert plots.plain(names[0]) == r"\$\frac{x\$" and plots.plain("".join(names[1:])) == "?two?lines"


def test_thinning_a_curve_keeps_its_ends_and_the_best_point_of_each_recall() -> None:
    data = scores(3000, 2)
    whole = curves.curve(data._logits[:, 1].contiguous(), data._labels == 1)
    thin = whole.thin(100)
    assert len(thin.thresholds) <= 100 and len(thin.recall) == len(thin.thresholds) + 1
    assert (thin.recall[0], thin.recall[-1], thin.precision[-1]) == (1.0, 0.0, 1.0)
    best_at_full_recall = whole.precision[whole.recall == 1.0].max()
    assert thin.precision[thin.recall == 1.0].max() == best_at_full_recall


# ------------------------------------------------------------ a real training, and the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on digits for two epochs on two ranks, with curves in the evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    ended = ranks.run(2, [*ranks.TINY, f"checkpoint.dir={folder}", "eval.pr=exact", "train.eval_every=2"])
    assert [end.code for end in ended] == [0, 0], ended
    return folder


def test_a_run_writes_the_evaluation_of_each_epoch(trained: Path) -> None:
    reported = json.loads((trained / "run" / "eval" / "epoch-002.json").read_text())
    (row,) = ranks.metrics(trained / "run", "eval")
    assert {key: row[key] for key in ("epoch", "step", "loss", "accuracy", "top5", "mae", "macroAP", "microAP")} == {
        key: reported[key] for key in ("epoch", "step", "loss", "accuracy", "top5", "mae", "macroAP", "microAP")
    }
    assert reported["samples"] == sum(entry["support"] for entry in reported["classes"]) == 359


def test_the_command_matches_scikit_learn_for_the_checkpoint(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """The test covers the file, its configuration, the data, the model and the scores. The
    reference only uses torch.load.
    """
    from ddpjob_trainer import config
    from ddpjob_trainer.data.catalog import open_data
    from ddpjob_trainer.model.models import build_model
    from sklearn.metrics import average_precision_score, f1_score, log_loss

    path = trained / "step-000000016.pt"
    assert evaluate_checkpoint.main([str(path), "-o", str(tmp_path), "eval.pictures=true", "train.eval_batch=100"]) == 0
    shown = capsys.readouterr().out
    reported = json.loads((tmp_path / "step-000000016.json").read_text())
    assert (
        f"{path}: 359 test samples" in shown
        and f"accuracy  {reported['accuracy']:.6f}" in shown
        and "and plots" in shown
    )

    settings = config.load(None, ranks.TINY)
    data = open_data(settings.data)
    model = build_model(settings.model, data.shape, data.classes, 1).eval()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    (batch,) = data.test_batches([list(range(359))])
    with torch.no_grad():
        chances = model(batch.images).double().softmax(1).numpy()
    assert reported["loss"] == pytest.approx(log_loss(batch.labels, chances), abs=1e-5)
    assert reported["accuracy"] == np.mean(chances.argmax(1) == batch.labels.numpy())
    assert reported["macroAP"] == pytest.approx(average_precision_score(np.eye(10)[batch.labels], chances), abs=1e-4)
    scores = f1_score(batch.labels, chances.argmax(1), average=None, zero_division=0)
    assert [entry["f1"] for entry in reported["classes"]] == pytest.approx(scores.tolist(), abs=1e-12)
    assert json.loads((trained / "run" / "eval" / "epoch-002.json").read_text())["accuracy"] == reported["accuracy"]


def test_the_command_gives_the_same_results_on_three_ranks(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(trained), "eval.pr=binned", "eval.pictures=false"]
    assert evaluate_checkpoint.main([*arguments, "-o", str(tmp_path / "alone")]) == 0
    monkeypatch.setattr(
        ranks.train,
        "run",
        lambda settings: evaluate_checkpoint.main([*arguments, "train.threads=1", "-o", str(tmp_path / "three")]),
    )
    assert [end.code for end in ranks.run(3, [])] == [0, 0, 0]
    alone, three = (json.loads((tmp_path / name / "step-000000016.json").read_text()) for name in ("alone", "three"))
    assert three.pop("loss") == pytest.approx(alone.pop("loss"), abs=1e-6)
    assert three == alone


def test_the_command_reports_mistakes_in_its_arguments(trained: Path, tmp_path: Path) -> None:
    path = str(trained / "step-000000016.pt")
    with pytest.raises(CheckpointError, match=r"was made with a different model: .*Set model\.\*"):
        evaluate_checkpoint.main([path, "model.width=8"])
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file or directory\); choose a readable"):
        evaluate_checkpoint.main([str(tmp_path / "none.pt")])
    with pytest.raises(ConfigError, match=r"unknown key 'eval\.prr'; did you mean 'eval\.pr'"):
        evaluate_checkpoint.main([path, "eval.prr=exact"])


def test_a_folder_that_is_not_writable_is_reported_before_the_evaluation(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the only output was a traceback."""
    (tmp_path / "file").touch()
    with (
        monkeypatch.context() as patched,
        pytest.raises(CheckpointError, match=r"or set --output to a different folder"),
    ):
        patched.setattr(evaluate_checkpoint, "_evaluate", None)
        evaluate_checkpoint.main([str(trained), "-o", str(tmp_path / "file" / "eval")])

    def full(*_: Any, **__: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", "eval/x.json")

    monkeypatch.setattr(evaluate_checkpoint.EvaluationFiles, "write", full)
    with pytest.raises(CheckpointError, match=r"eval/x.json cannot be written \(No space left on device\)"):
        evaluate_checkpoint.main([str(trained), "-o", str(tmp_path / "eval")])


def test_a_plain_state_dict_needs_a_configuration(trained: Path, tmp_path: Path) -> None:
    weights = torch.load(trained / "step-000000016.pt", weights_only=True)["model"]
    content = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({"state_dict": content, "config": ["its own"], "step": torch.ones(3)}, tmp_path / "plain.pth")
    assert evaluate_checkpoint.main([str(tmp_path / "plain.pth"), *ranks.TINY, "-o", str(tmp_path / "eval")]) == 0
    reported = json.loads((tmp_path / "eval" / "plain.json").read_text())
    assert reported["accuracy"] == ranks.metrics(trained / "run", "eval")[0]["accuracy"]


def test_the_command_evaluates_the_moving_average_as_training_does(tmp_path: Path) -> None:
    ranks.good(1, [*ranks.TINY, f"checkpoint.dir={tmp_path}", "optim.ema_decay=0.8", "train.eval_every=2"])
    assert evaluate_checkpoint.main([str(tmp_path), "-o", str(tmp_path / "again")]) == 0
    reported = json.loads((tmp_path / "again" / "step-000000016.json").read_text())
    (row,) = ranks.metrics(tmp_path / "run", "eval")
    assert reported["loss"] == pytest.approx(row["loss"], abs=1e-6) and reported["accuracy"] == row["accuracy"]


def test_the_results_name_classes_after_their_folders(tmp_path: Path) -> None:
    from ddpjob_trainer.config.sections import DataConfig, DataName
    from ddpjob_trainer.data.catalog import open_data
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            Image.new("RGB", (40, 40), (number * 200, 0, 0)).save(tmp_path / "data" / part / name / "1.png")
    data: Any = open_data(DataConfig(name=DataName.IMAGEFOLDER, dir=tmp_path / "data", image_size=8, workers=0))
    assert data.class_names == ["cat", "dog"]
    arguments = [
        "data.name=imagefolder",
        f"data.dir={tmp_path}/data",
        "data.image_size=8",
        "data.workers=0",
        "data.batch=2",
    ]
    ranks.good(1, [*ranks.TINY, *arguments, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    reported = json.loads((tmp_path / "run" / "eval" / "epoch-001.json").read_text())
    assert [entry["name"] for entry in reported["classes"]] == ["cat", "dog"]
