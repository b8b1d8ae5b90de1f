"""Every number that the README claims is in a committed CSV file, in the line that this file names."""

import csv
import re
import runpy
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def value(path: str, column: str, **where: str) -> float:
    """The number in a column of a CSV file: the mean, if several lines have these entries."""
    with (ROOT / path).open(encoding="utf-8", newline="") as stream:
        found = [row[column] for row in csv.DictReader(stream) if all(row[name] == where[name] for name in where)]
    assert found, (path, where)
    return statistics.fmean(map(float, found)) * (100 if path == OWN else 1)  # its accuracies are shares


OWN = "results/own_data.csv"
ENCODER = "benchmarks/results/encoder_fit.csv"
FEATURES = "results/features_full.csv"
CLAIMS = {  # words of the README, with the number in their place: its CSV file, column and line
    "mean test accuracy of is {:.1f} %.": (OWN, "accuracy", {"method": "fit"}),
    "CleanLearning is {:.1f} % with logistic regression": (OWN, "accuracy", {"method": "CleanLearning(logistic)"}),
    "and {:.1f} % with a forest": (OWN, "accuracy", {"method": "CleanLearning(forest)"}),
    "on the same features has {:.1f} %": (ENCODER, "accuracy", {"set": "cifar worst", "method": "logistic"}),
    "without an encoder {:.1f} %": (ENCODER, "accuracy", {"set": "cifar worst", "method": "fit"}),
    "test accuracy of is {:.1f} %,": (ENCODER, "accuracy", {"set": "cifar worst", "method": "fit, encoder"}),
    "without the clip, has {:.1f} %": (OWN, "accuracy", {"method": "fit without clip"}),
    "chosen on noisy labels has {:.1f} %": (
        *("results/features_logistic.csv", "test_accuracy"),
        {"chosen": "yes", "noise": "real:set=worst"},
    ),
    "it has {:.1f} % on average": (
        *("results/features_logistic.csv", "test_accuracy"),
        {"chosen": "yes", "data": "cifar10"},
    ),
    "a linear head with CE and the clip {:.1f} %": (FEATURES, "with_clip", {"model": "mlp:depth=0", "loss": "ce"}),
    "LabelMe's best epoch has {:.1f} %": (
        *("results/real_noise_full.csv", "best_epoch_without"),
        {"data": "LabelMe", "clip": "norm:temp=auto"},
    ),
    "the MLP with CE and the clip {:.1f} %": (FEATURES, "with_clip", {"model": "mlp:depth=1", "loss": "ce"}),
    "one with the loss MAE {:.1f} %": (FEATURES, "without", {"model": "mlp:depth=0", "loss": "mae"}),
}
# Rows of the table: the file of their effect with its line, and their line in early_stopping.csv.
RANDOM = {"model": "mlp:depth=1", "loss": "ce", "noise": "symmetric:rate=0.5"}
SIMILAR = {**RANDOM, "noise": "asymmetric:rate=0.4"}
REAL = "results/real_noise_full.csv"
PEOPLE = "results/features_worst.csv"
ROWS = {
    "at random, 50 % (CIFAR-10, MLP)": (FEATURES, RANDOM, {"recipe": "features", "scale": "full", **RANDOM}),
    "people, 40 % (CIFAR-10N, MLP)": (PEOPLE, {"model": "mlp:depth=1"}, {"model": "mlp:depth=1", "scale": "worst"}),
    "people, 40 % (CIFAR-10N, linear)": (PEOPLE, {"model": "mlp:depth=0"}, {"model": "mlp:depth=0", "scale": "worst"}),
    "similar classes, 20 % (CIFAR-10, MLP)": (FEATURES, SIMILAR, {"recipe": "features", "scale": "full", **SIMILAR}),
    "a crowd, 25 % (LabelMe)": (REAL, {"data": "LabelMe", "clip": "norm:temp=auto"}, {"data": "LabelMe"}),
    "keyword rules, 46 % (TREC)": (REAL, {"data": "TREC", "clip": "norm:temp=auto"}, {"data": "TREC"}),
    "word lists, 50 % (Hausa)": (REAL, {"data": "Hausa", "clip": "norm:temp=auto"}, {"data": "Hausa"}),
}
# Numbers that are no results: names, settings, sizes of data and seeds, which code, recipes and data define.
OTHERS = (
    *(
        "ICML 2023",
        "All 50,000 images of CIFAR-10 with the labels of CIFAR-10N",
        "so that 40 % are wrong",
        "is wrong in 17 or 18 % of the cases",
        "With the true kinds of 50 wines",
        "Start at 1.5",
        "56,000 hours of a core for Table 1",  # docs/reproduce.md, generated
        "people had labelled 40 % of 5,000 training photos",
        "on 19 data sets that were held out from nearly every choice",
        "beside Table 1",
        "EfficientNet-Lite0",
        "is 0.1 to 2.3 points [above logistic regression]",  # counted below
    ),
    "178 wines, 36 of them (20 %) labelled as the next class",  # counted below, as the next two
    *("Its guess of 29 % is too high", "nearly all of the first 30", "CIFAR-10N", "CIFAR-10", "Apache-2.0"),
)


def words(text: str) -> str:
    return " ".join(text.split())


def prose() -> str:
    """The README without code, tables, links' targets and generated parts; the last are compared elsewhere."""
    text = re.sub(r"<!-- generated.*?<!-- end -->|```.*?```|`[^`\n]*`|<[^>]*>", "", README, flags=re.DOTALL)
    return words(re.sub(r"\]\([^)]*\)", "]", text))


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_in_its_line(claim):
    path, column, where = CLAIMS[claim]
    assert claim.format(value(path, column, **where)) in prose()


def test_no_number_is_without_a_line():
    text = prose()
    for claim, (path, column, where) in CLAIMS.items():
        text = text.replace(claim.format(value(path, column, **where)), "")
    for sentence in (verdicts(), temps(), losses(), one_annotator()):
        text = text.replace(sentence, "")
    for other in OTHERS:
        assert other in prose(), f"{other!r} is not in the README any more"
        text = text.replace(other, "")
    assert not re.findall(r"\S*\d\S*", text), "a number of the README that no CSV file holds"


@pytest.mark.parametrize("name", ROWS)
def test_the_table_has_the_numbers_of_its_lines(name):
    """Beside docs/evidence_tables.py, which writes the table: it is checked here without its code."""
    file, effect, early = ROWS[name]
    other = "results/early_stopping.csv"
    numbers = [
        *(value(file, "without", **effect), value(other, "early", **early), value(other, "oracle", **early)),
        *(value(file, "with_clip", **effect), value(other, "true_labels", **early)),
    ]
    shares = [value(file, column, **effect) for column in ("memorised_without", "memorised_with")]
    (line,) = (words(line) for line in README.splitlines() if words(line).startswith(f"| {name} |"))
    texts = [*(f"{number:.1f}" for number in numbers), "{:.0f} → {:.0f} %".format(*shares)]
    assert line.replace("**", "").strip("| ").split(" | ")[1:] == texts
    assert ("**" in line) == (value(file, "difference", **effect) > 2 * value(file, "standard_error", **effect))


VERDICTS = (
    "of {} cells that compare training with and without the clip, {} agree with the paper, {} disagree and {} are "
    "undecided; of {} other comparisons, such as with LogitNorm or of temps, {} agree, {} disagree and {} are undecided"
)


def verdicts() -> str:
    """The sentence on the cells of the paper's tables and figures on real images, counted in their files."""
    tables = runpy.run_path(str(ROOT / "docs" / "evidence_tables.py"))
    kinds: tuple[list[str], list[str]] = [], []  # with and without the clip, with something else
    for path in [*ROOT.glob("results/table?_mini.csv"), *ROOT.glob("results/figure?_mini.csv")]:
        rows = tables["read"](path)
        rows = tables["peaks"](rows) if path.name.startswith("figure2") else rows  # its cells are noises
        kinds[path.name.startswith(("figure", "table5"))].extend(row["verdict"] for row in rows)
    numbers = []
    for found in kinds:
        counts = Counter(verdict for verdict in found if verdict != "not in the paper")
        numbers += [counts.total(), counts["agrees"], counts["disagrees"], counts["undecided"]]
    return VERDICTS.format(*numbers)


def test_the_verdicts_are_counted():
    assert verdicts() in prose()


def temps() -> str:
    """The sentence on the temps that searches chose for CE, from the files of these searches."""

    def chosen(name: str, column: str, **where: str) -> list[float]:
        with (ROOT / "results" / name).open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if all(row[key] == entry for key, entry in where.items())]
        return [float(word.rpartition("=")[2]) for row in rows for word in row[column].split()]

    found = [
        *chosen("tuning.csv", "temps_of_auto", setting="digits"),
        *chosen("table1_mini.csv", "chosen", loss="ce"),
        *chosen("table3_mini.csv", "chosen", model="mlp"),
        *chosen("real_noise_full.csv", "chosen", clip="norm:temp=auto"),
        *(t for name in ("full", "cifar100") for t in chosen(f"features_{name}.csv", "chosen", loss="ce")),
    ]
    norm = chosen("tuning.csv", "temps_of_auto", setting="digits_bn")
    return (
        f"For CE our automatic searches chose {min(found):g} to {max(found):g}, and up to {max(norm):g} with batch norm"
    )


def one_annotator() -> str:
    """What the clip gains for CE with the labels of one annotator of CIFAR-10N, by both heads."""
    gains = [
        value(FEATURES, "difference", model=model, loss="ce", noise=f"real:set=random{one}")
        for model in ("mlp:depth=0", "mlp:depth=1")
        for one in (1, 2, 3)
    ]
    return f"the clip gains [{min(gains):.0f} to {max(gains):.0f} points]"


def test_the_texts_are_counted():
    assert one_annotator() in prose()
    gains = []
    for name in ("hausa", "sentiment", "trec", "agnews"):
        ours, rival = (value(ENCODER, "accuracy", set=name, method=method) for method in ("fit, encoder", "logistic"))
        gains.append(ours - rival)
    assert f"is {min(gains):.1f} to {max(gains):.1f} points [above logistic regression]" in prose()


def losses() -> str:
    import logitclip as lc

    return f"takes any of {len(list(lc.losses.LOSSES))} [losses"


def test_the_temps_and_the_losses_are_counted():
    assert temps() in prose()
    assert losses() in prose()


def test_the_numbers_of_the_wines_are_counted():
    """The output is compared with that of fit in test_docs.py, which also counts the first 30 rows."""
    text = prose()
    rows, wrong, share = re.findall(r"([\d]+) wines, (\d+) of them \((\d+) %\)", text)[0]
    assert (rows, f"{int(wrong) / int(rows):.0%}") == ("178", f"{share}%")
    low, high, guess = re.findall(r"Between (\d+)% and (\d+)% of the labels are wrong, probably about (\d+)%", README)[
        0
    ]
    assert int(low) < int(share) < int(high)
    assert f"Its guess of {guess} % is too high" in text


COMMENTS = {  # numbers in the comments of code: what defines them
    "with Python 3.11.4 or newer": ("pyproject.toml", 'requires-python = ">=3.11.4"'),
    "fetches 90 MB": ("docs/photos_and_texts.md", "88 MB"),
    "0.5 GB": ("docs/photos_and_texts.md", "471 MB"),
    "50 answers measure the rate": ("README.md", "--audit 50 "),
    "1.32, where nn.CrossEntropyLoss() has 8.0": ("README.md", "sure of 0, labelled 1"),  # computed below
    "Table 1 on digits, an hour": ("docs/reproduce.md", "440 + 484: 5"),  # 5x minutes
}


def test_no_number_of_a_comment_is_without_a_source():
    code = "\n".join(re.findall(r"```(?:bash|console|python)\n(.*?)```", README, flags=re.DOTALL))
    comments = "\n".join(re.findall(r"#.*", code))
    for comment, (path, source) in COMMENTS.items():
        assert comment in comments
        assert source in (ROOT / path).read_text(encoding="utf-8")
        comments = comments.replace(comment, "")
    assert not re.findall(r"\d+", comments.replace("sure of 0, labelled 1", "")), "a number without a source"


def test_the_table_has_no_other_rows():
    table = README.partition("<!-- generated: evidence helps -->")[2].partition("<!-- end -->")[0]
    assert [words(line).split(" | ")[0].strip("| ") for line in table.strip().splitlines()[2:]] == list(ROWS)


def test_the_line_of_code_gives_what_its_comment_says(capsys):
    from torch import nn

    (code,) = (code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "print" in code)
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    (clipped, plain) = re.findall(r"# ([\d.]+), where nn.CrossEntropyLoss\(\) has ([\d.]+)", code)[0]
    assert capsys.readouterr().out.strip() == clipped
    assert f"{nn.CrossEntropyLoss()(found['logits'], found['label']).item():.1f}" == plain


def ranks_of_own_data() -> tuple[dict[str, float], float]:
    """The mean rank of each method by accuracy over the sets, and the critical difference (Nemenyi, 5 %)."""
    with (ROOT / OWN).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    names, methods = ({row[key] for row in rows} for key in ("data", "method"))
    means = {(name, method): value(OWN, "accuracy", data=name, method=method) for name in names for method in methods}
    ranks = {m: statistics.fmean(sum(means[n, o] >= means[n, m] for o in methods) for n in names) for m in methods}
    assert len(methods) == 8
    return ranks, 3.031 * (8 * 9 / (6 * len(names))) ** 0.5  # the quantile for eight methods


def does_not_win_on_every_set() -> bool:
    with (ROOT / OWN).open(encoding="utf-8", newline="") as stream:
        names = {row["data"] for row in csv.DictReader(stream)}
    ours, rivals = "fit", ("CleanLearning(logistic)", "CleanLearning(forest)")
    return any(
        value(OWN, "accuracy", data=name, method=rival) > value(OWN, "accuracy", data=name, method=ours)
        for name in names
        for rival in rivals
    )


def lead_is_not_significant() -> bool:
    ranks, critical = ranks_of_own_data()
    return min(ranks, key=ranks.__getitem__) == "fit" and ranks["CleanLearning(logistic)"] - ranks["fit"] < critical


def few_wrong_labels_make_no_difference() -> bool:
    gains = [
        value(ENCODER, "accuracy", set=name, method="fit, encoder")
        - value(ENCODER, "accuracy", set=name, method="logistic")
        for name in ("cifar aggre", "cifar random1")
    ]
    return max(map(abs, gains)) < 0.5


def texts_are_as_good_as_clean_learning() -> bool:
    gains = [
        value(ENCODER, "accuracy", set=name, method="fit, encoder")
        - value(ENCODER, "accuracy", set=name, method="cleanlab")
        for name in ("hausa", "sentiment", "trec", "agnews")
    ]
    return max(map(abs, gains)) < 1.5


def costs_on_clean_digits() -> bool:
    cost = {
        temp: value("results/table8_cpu.csv", "difference", clip=f"norm:temp={temp}") for temp in ("0.05", 0.5, 2, 4)
    }
    return min(cost[0.5], cost[2]) > 0 > cost[4] and cost["0.05"] < -50


def early_stopping_gains_less() -> bool:
    file = "results/early_stopping.csv"
    return all(value(file, "early", **early) < value(path, "with_clip", **row) for path, row, early in ROWS.values())


def early_stopping_gains_as_much_on_random_digits() -> bool:
    where = {"noise": "symmetric:rate=0.5"}
    early = value("results/early_stopping.csv", "early", recipe="table5", scale="cpu", **where)
    return abs(early - value("results/table5_cpu.csv", "with_clip", clip="norm:temp=grid", **where)) < 1


def most_temps_do_nothing_with_batch_norm() -> bool:
    with (ROOT / "results" / "readings_cpu.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["model"] == "batch_norm" and row["noise"] != "none"]
    shares = [float(row["memorised_with"]) for row in rows if row["clip"].startswith("norm:temp")]
    return sum(share > 99.5 for share in shares) > len(shares) / 2


CLAIMS_WITHOUT_NUMBERS = {
    "does not win [on every set]": does_not_win_on_every_set,
    "in mean rank its lead over the first is not significant": lead_is_not_significant,
    "With few wrong labels they are about equal": few_wrong_labels_make_no_difference,
    "and about as good as CleanLearning": texts_are_as_good_as_clean_learning,
    "on digits a moderate clip costs nothing, a tight one costs accuracy, and with a very loose one training can break "
    "down": costs_on_clean_digits,
    "needs no tuning and gains less here": early_stopping_gains_less,
    "on digits with random labels it gains [as much]": early_stopping_gains_as_much_on_random_digits,
    "on digits most temps [did nothing]": most_temps_do_nothing_with_batch_norm,
}


@pytest.mark.parametrize("claim", CLAIMS_WITHOUT_NUMBERS)
def test_a_claim_without_a_number_holds_in_its_file(claim):
    assert claim in prose()
    assert CLAIMS_WITHOUT_NUMBERS[claim]()
