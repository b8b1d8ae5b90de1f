"""Every number that the README claims is in a committed CSV file, in the line that this file names."""

import csv
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def value(path: str, column: str, **where: str) -> float:
    """The number in a column of a CSV file: the mean, if several lines have these entries."""
    with (ROOT / path).open(encoding="utf-8", newline="") as stream:
        found = [row[column] for row in csv.DictReader(stream) if all(row[name] == where[name] for name in where)]
    assert found, (path, where)
    return statistics.fmean(map(float, found)) * (100 if path == OWN else 1)  # its accuracies are shares


REAL = "results/real_noise_full.csv"
RANDOM = ("results/table1_mini.csv", {"loss": "ce", "noise": "symmetric:rate=0.2"})
EARLY = ("results/early_stopping.csv", {"recipe": "table1", "loss": "ce", "noise": "symmetric:rate=0.2"})
OWN = "results/own_data.csv"
CLAIMS = {  # words of the README, with the number in their place: its CSV file, column and line
    "ends up with {:.0f} % of the wrong labels memorised": (RANDOM[0], "memorised_with", RANDOM[1]),
    "instead of {:.0f} %.": (RANDOM[0], "memorised_without", RANDOM[1]),
    "Its accuracy is {:.1f} %": (RANDOM[0], "with_clip", RANDOM[1]),
    "instead of {:.1f} %;": (RANDOM[0], "without", RANDOM[1]),
    "stopped early it is {:.1f} %": (EARLY[0], "early", EARLY[1]),
    "with true labels {:.1f} %": (EARLY[0], "true_labels", EARLY[1]),
    "is right for {:.1f} % of the test rows": (OWN, "accuracy", {"method": "fit"}),
    "with a forest for {:.1f} %": (OWN, "accuracy", {"method": "CleanLearning(forest)"}),
    "without the clip, has {:.1f} %": (OWN, "accuracy", {"method": "fit without clip"}),
    "on noisy labels, has {:.1f} %": ("results/features_logistic.csv", "test_accuracy", {"chosen": "yes"}),
    "the tuned clip gains {:.1f} points": (REAL, "difference", {"data": "LabelMe", "clip": "norm:temp=auto"}),
    "still memorises {:.0f} % of the wrong labels": (
        *(REAL, "memorised_with"),
        {"data": "LabelMe", "clip": "norm:temp=auto"},
    ),
    "{:.0f} % of TREC's wrong labels": (REAL, "memorised_with", {"data": "TREC", "clip": "norm:temp=auto"}),
    "{:.0f} % of Hausa's": (REAL, "memorised_with", {"data": "Hausa", "clip": "norm:temp=auto"}),
}
# Numbers that are no results: names, settings, sizes of data and seeds, which code, recipes and data define.
OTHERS = (
    *(
        "ICML 2023",
        "All 50,000 images",
        "of which 20 % have a random label",
        "all 50,000 images",
        "40 % of them wrong",
        "40 % of their labels wrong",
        "5,000 CIFAR-10 images",
        "On 19 data sets",
        "beside Table 1",
        "In truth 20 % are wrong. The range holds it, but 29 % is too high",  # of the output
    ),
    *("36 short runs", "For 178 wines, of which 36 carry", "a 95 % interval", "for 15 epochs"),
    *("CIFAR-10N", "CIFAR-10", "EfficientNet-Lite0", "Apache-2.0"),
)


def words(text: str) -> str:
    return " ".join(text.split())


def prose() -> str:
    """The README without code, tables, links' targets and generated parts; the last are compared elsewhere."""
    text = re.sub(r"<!-- generated.*?<!-- end -->|```.*?```|`[^`\n]*`", "", README, flags=re.DOTALL)
    return words(re.sub(r"\]\([^)]*\)", "]", text))


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_in_its_line(claim):
    path, column, where = CLAIMS[claim]
    assert claim.format(value(path, column, **where)) in prose()


def test_no_number_is_without_a_line():
    text = prose()
    for claim, (path, column, where) in CLAIMS.items():
        text = text.replace(claim.format(value(path, column, **where)), "")
    for other in OTHERS:
        assert other in prose(), f"{other!r} is not in the README any more"
        text = text.replace(other, "")
    assert not re.findall(r"\S*\d\S*", text), "a number of the README that no CSV file holds"


def test_the_table_has_the_numbers_of_its_lines():
    """Beside benchmarks' files, which generate.py reads: the table is checked here without its code."""
    for model, name in (("mlp:depth=0", "a linear head"), ("mlp:depth=1", "an MLP head")):
        effect, early = ({"model": model}, {"recipe": "features", "model": model})
        file, other = "results/features_worst.csv", "results/early_stopping.csv"
        numbers = [
            *(value(file, "without", **effect), value(other, "early", **early), value(other, "oracle", **early)),
            *(value(file, "with_clip", **effect), value(other, "true_labels", **early)),
        ]
        shares = [value(file, column, **effect) for column in ("memorised_without", "memorised_with")]
        texts = [*(f"{number:.1f} %" for number in numbers), *(f"{share:.0f} %" for share in shares)]
        (line,) = (line for line in README.splitlines() if line.startswith(f"| {name} "))
        assert line.replace("**", "").replace("\u00a0", " ").strip("| ").split(" | ")[1:] == texts
        gain, error = value(file, "difference", **effect), value(file, "standard_error", **effect)
        assert ("**" in line) == (gain > 2 * error)


def test_the_line_of_code_gives_what_its_comment_says():
    import torch
    from torch import nn

    import logitclip as lc

    (clipped, plain) = re.findall(r"# ([\d.]+), where nn.CrossEntropyLoss\(\) has ([\d.]+)", README)[0]
    logits, label = torch.tensor([[9.0, 1.0, 0.0]]), torch.tensor([1])
    assert f"{lc.LogitClip('ce', temp=1.5)(logits, label).item():.2f}" == clipped
    assert f"{nn.CrossEntropyLoss()(logits, label).item():.1f}" == plain
