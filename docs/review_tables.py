"""The tables of review.md, made from results/review_*.csv. `python docs/generate.py` writes them into the page."""

from __future__ import annotations

from evidence_tables import RESULTS, read

SETS = {
    "labelme": "LabelMe, crowd",
    "hausa_news": "Hausa, word lists",
    "trec": "TREC, rules",
    "sentiment_crowd": "Sentiment, crowd",
    "agnews_rules": "AG News, rules",
    "cifar10n_aggre": "CIFAR-10N, vote",
    "cifar10n_random1": "CIFAR-10N, one",
    "cifar10n_worse": "CIFAR-10N, worst",
}


def table(name: str) -> str:
    return {"audits": audits, "curves": curves}[name]()


def audits() -> str:
    """Coverage of the interval of the noise rate, and its width over that of a plain random sample."""
    rows = [row for row in read(RESULTS / "review_audit.csv") if row["share"] == "wrong"]
    lines = ["| | wrong | 50 answers | 100 answers | 200 answers | MOVER, 50 answers |", "|---|--:|--:|--:|--:|--:|"]
    for name, title in SETS.items():
        of = {row["answers"]: row for row in rows if row["set"] == name}
        cells = [f"{of[n]['coverage']:.1f} %, {of[n]['width_over_random']:.2f}" for n in (50, 100, 200)]
        cells.append(f"{of[50]['coverage_mover']:.1f} %, {of[50]['mover_over_random']:.2f}")
        lines.append(f"| {title} | {of[50]['truth']:.1f} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves() -> str:
    """Wrong labels found after a fifth of the rows were reviewed, and the accuracy after it."""
    rows = [row for row in read(RESULTS / "review_curves.csv") if row["reviewed"] == 20]
    lines = ["| | before | random | cleanlab | logitclip | logitclip, reviewer wrong in 10 % |", "|---|" + "--:|" * 5]
    for name, title in SETS.items():
        of = {(row["ranking"], row["reviewer"]): row for row in rows if row["set"] == name}
        places = [(ranking, "right") for ranking in ("random", "cleanlab", "logitclip")]
        places.append(("logitclip", "wrong in 10 %"))
        cells = [f"{of[place]['found']:.1f} %, {of[place]['accuracy']:.1f}" for place in places]
        lines.append(f"| {title} | {of[places[0]]['accuracy_before']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)
