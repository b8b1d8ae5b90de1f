"""From the columns of a table to the features of a network, with scikit-learn's transformers."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logitclip.data._columns import (
    Column,
    Columns,
    Dates,
    TextColumn,
    Unusable,
    as_text,
    is_numeric_text,
    read_dates,
    row_count,
)
from logitclip.registry import suggest
from logitclip.text import explain_missing, first_line

MAX_LEVELS = 64  # of a category; the rarest ones share one feature
MAX_TERMS = 2000  # of a text column
TEXT_WEIGHT = 8.0  # TF-IDF rows have norm 1, too small for SGD; chosen by noisy validation, see docs/own_data.md
WORDS = 3  # a column of text with more words on average is probably free text
FEW_WORDS = 5  # texts with fewer words on average are split into character n-grams
TERMS: tuple[dict[str, Any], ...] = (  # of short texts, and of others
    {"analyzer": "char_wb", "ngram_range": (2, 4)},
    {"token_pattern": r"\w+|[^\w\s]", "ngram_range": (1, 2)},
)
LARGEST_NUMBER = 1e150  # the squares of larger numbers overflow
TRUSTED = ("numpy.dtype",)  # what a saved preprocessor may hold beside scikit-learn's own transformers

CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # in days

ColumnKind = Literal["number", "category", "text", "date"]


@dataclass(frozen=True, eq=False)
class Preprocessor:
    """Features from columns. Every statistic comes from the columns given to `fit`.

    Numbers: missing values become the median, then each column is standardised. Dates: the day as a number, and where
    it is in its year, its week and its day, as sine and cosine. Categories: one-hot; values that occur once and values
    never seen share one feature. Text: TF-IDF of words and word pairs, or of character n-grams where
    texts are short.

    >>> columns = {"age": np.array([20.0, 40.0, np.nan]), "sex": TextColumn(np.array([0, 1, 1]), ["f", "m"])}
    >>> preprocessor = Preprocessor.fit(columns)
    >>> preprocessor.kinds
    {'age': 'number', 'sex': 'category'}
    >>> preprocessor.transform({"age": np.array([30.0]), "sex": TextColumn(np.array([0]), ["x"])})
    tensor([[0., 0., 1.]])
    """

    kinds: Mapping[str, ColumnKind] = field(default_factory=dict)  # the columns that are features
    dropped: Mapping[str, str] = field(default_factory=dict)  # the columns that are not, and why
    transformer: Any = None  # a fitted ColumnTransformer; None if no column is a feature

    @classmethod
    def fit(cls, columns: Columns, text: Collection[str] = ()) -> Preprocessor:
        """Learn medians, means, deviations, levels and terms.

        Args:
            columns: The columns of the training rows.
            text: The columns to use as free text.

        Raises:
            ValueError: If no column is usable.
        """
        kinds: dict[str, ColumnKind] = {}
        dropped: dict[str, str] = {}
        for name, column in columns.items():
            reason = _why_unusable(name, column, name in text)
            if reason is not None:
                dropped[name] = reason
            elif isinstance(column, TextColumn):
                kinds[name] = "text" if name in text else "category"
            else:
                kinds[name] = "text" if name in text else "date" if isinstance(column, Dates) else "number"
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in dropped.items())
        if not kinds:
            raise ValueError(f"No column is left as a feature: {reasons or 'there is none beside the label'}.")
        frame = _make_frame(columns, kinds)
        transformer = _make_transformer(frame, kinds)
        try:
            transformer.fit(frame)
        except ValueError as error:
            raise ValueError(f"The columns cannot be preprocessed: {error}") from error
        return cls(kinds, dropped, transformer)

    @classmethod
    def fit_beside(cls, columns: Columns, text: Collection[str]) -> Preprocessor:
        """Fit to the columns beside texts that an encoder sees; if none of them is usable, there are no features."""
        others = {name: column for name, column in columns.items() if name not in text}
        usable = any(_why_unusable("", column, free_text=False) is None for column in others.values())
        return cls.fit(others) if usable else cls()

    @property
    def text_columns(self) -> set[str]:
        """The columns that `read_table` should read as text, because they were text when this was fitted."""
        return {name for name, kind in self.kinds.items() if kind in ("category", "text")}

    def transform(self, columns: Columns) -> Tensor:
        """Return the features, float32 [N, D]. Columns unknown to `fit` are ignored.

        Raises:
            ValueError: If a column is missing, or holds text where `fit` saw numbers.
        """
        missing = [name for name in self.kinds if name not in columns]
        if missing:
            others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
            raise ValueError(f"There is no column {missing[0]!r}{others}. {suggest(missing[0], columns)}")
        if not self.kinds:
            return torch.empty(row_count(columns), 0)
        features = self.transformer.transform(_make_frame(columns, self.kinds))
        dense = features if isinstance(features, np.ndarray) else features.toarray()
        limit = float(np.finfo(np.float32).max)
        return torch.from_numpy(np.clip(dense, -limit, limit).astype(np.float32, copy=False))

    def unknown(self, columns: Columns) -> dict[str, list[str]]:
        """Return the categories that `fit` did not see, by column, sorted; `transform` treats them as rare ones."""
        named = [name for name, kind in self.kinds.items() if kind == "category"]
        known: Any = self.transformer.named_transformers_["categories"].categories_ if named else ()
        found = {}
        for name, seen in zip(named, known, strict=True):
            column = columns[name]
            new = set() if isinstance(column, Unusable) else {*as_text(column).values} - {*seen}
            if new:
                found[name] = sorted(new)
        return found

    def to_bytes(self) -> bytes:
        """Return the content of a skops file: JSON and arrays in a zip, no pickle."""
        state = {"version": 1, "kinds": self.kinds, "dropped": self.dropped, "transformer": self.transformer}
        return _skops().dumps(state, compression=zipfile.ZIP_DEFLATED)

    @classmethod
    def from_bytes(cls, content: bytes) -> Preprocessor:
        """Read what `to_bytes` made. Other transformers than those of `fit` are refused.

        Raises:
            ValueError: If the content is damaged, or not a preprocessor.
        """
        skops = _skops()
        try:
            state = skops.loads(content, trusted=list(TRUSTED))
            if not isinstance(state, dict) or state.get("version") != 1:
                raise ValueError("it is not a preprocessor saved by this version of logitclip")
            _check_transformer(state["transformer"])
            return cls(state["kinds"], state["dropped"], state["transformer"])
        except Exception as error:  # of many types: damaged zips, unknown types, other versions of scikit-learn
            raise ValueError(f"the preprocessing cannot be read: {first_line(error)}") from error


def _check_transformer(transformer: Any) -> None:
    """Refuse transformers that `fit` does not make: some of scikit-learn's open files or call functions by name."""
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    if type(transformer) is not ColumnTransformer:
        raise ValueError(f"a {type(transformer).__name__} is no transformer of `fit`")
    for step, unfitted, _ in (*transformer.transformers, *transformer.transformers_):
        fitted = transformer.named_transformers_.get(step, unfitted)
        for part in (unfitted, fitted):
            if isinstance(part, str) and part == "drop":  # what becomes of columns that are not named
                continue
            for inner in [inner for _, inner in part.steps] if type(part) is Pipeline else [part]:
                if type(inner) not in (SimpleImputer, StandardScaler, OneHotEncoder, TfidfVectorizer):
                    raise ValueError(f"a {type(inner).__name__} is no transformer of `fit`")
                if type(inner) is TfidfVectorizer:
                    _check_vectorizer(inner)


def _check_vectorizer(vectorizer: Any) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    chosen = {name: {units[name] for units in TERMS if name in units} for name in ("analyzer", "token_pattern")}
    free = ("ngram_range", "max_features", "sublinear_tf", "dtype")
    for name, default in TfidfVectorizer().get_params().items():
        value = getattr(vectorizer, name)
        if name not in free and value != default and value not in chosen.get(name, ()):
            raise ValueError(f"its TfidfVectorizer has {name}={value!r}, which `fit` never sets")


def _why_unusable(name: str, column: Column, free_text: bool) -> str | None:
    """Return why a column cannot be a feature, or None."""
    if isinstance(column, Unusable):
        return column.reason
    if isinstance(column, TextColumn):
        counts = np.bincount(column.codes + 1, minlength=len(column.values) + 1)
        missing, present = int(counts[0]), counts[1:][counts[1:] > 0]
        if not len(present):
            return "has no values"
        if free_text:
            return None
        if len(present) + (missing > 0) < 2:
            return "has the same value in every row"
        frequent = int(np.sort(present[present > 1])[::-1][:MAX_LEVELS].sum())
        if 2 * (frequent + missing) < len(column.codes):
            hint = f"; to use its words, give --text {name}" if mean_words(column) >= WORDS else ""
            return f"is text with {len(present):,} different values in {len(column.codes):,} rows{hint}"
        return None
    values = column.days if isinstance(column, Dates) else column
    present = values[np.isfinite(values)]
    if not len(present):
        return "has no values"
    if (present == present[0]).all():
        return "has the same value in every row"
    if isinstance(column, Dates):
        return None
    if len(column) == len(present) >= 20 and _numbers_rows(name, column):
        return "numbers the rows"
    return None


def _numbers_rows(name: str, column: np.ndarray) -> bool:
    """Return whether whole numbers, no two alike, are an id: in order, without large gaps, or by the column's name."""
    if not (column == np.round(column)).all() or len(np.unique(column)) < len(column):
        return False
    called = name.lower().replace(" ", "_").split("_")[-1] in ("id", "index", "row", "rownames", "key")
    return bool((np.diff(column) > 0).all()) or called or np.ptp(column) < 1.2 * len(column)


def mean_words(column: TextColumn) -> float:
    """Return the mean number of words of the first values."""
    return float(np.mean([len(value.split()) for value in column.values[:1000]])) if column.values else 0.0


def _make_transformer(frame: Any, kinds: Mapping[str, ColumnKind]) -> Any:
    _check_packages()
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    def keys_of(kind: ColumnKind) -> list[str]:
        return [_column_key(i) for i, found in enumerate(kinds.values()) if found == kind]

    numbers = [name for name in frame if name in keys_of("number") or name.partition(":")[0] in keys_of("date")]

    single: Any = np.float32  # scikit-learn's annotations know only float64
    # Dense features must fit in memory: at most a gigabyte for all rows.
    terms = max(128, min(MAX_TERMS, 250_000_000 // len(frame)))

    def vectorizer(name: str) -> Any:
        short = frame[name].str.split().str.len().mean() < FEW_WORDS
        return TfidfVectorizer(**TERMS[0 if short else 1], max_features=terms, sublinear_tf=True, dtype=single)

    return ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numbers),
            (
                "categories",
                OneHotEncoder(
                    min_frequency=2,
                    max_categories=MAX_LEVELS + 1,
                    handle_unknown="infrequent_if_exist",
                    sparse_output=False,
                    dtype=single,
                ),
                keys_of("category"),
            ),
            *((f"text {i}", vectorizer(name), name) for i, name in enumerate(keys_of("text"))),
        ],
        transformer_weights={f"text {i}": TEXT_WEIGHT for i in range(len(keys_of("text")))},
    )


def _make_frame(columns: Columns, kinds: Mapping[str, ColumnKind]) -> Any:
    """Return the columns as a data frame, each converted to the kind it has in `kinds`."""
    _check_packages()
    import pandas as pd

    found: dict[str, np.ndarray] = {}
    for i, (name, kind) in enumerate(kinds.items()):
        if kind == "date":
            found |= {f"{_column_key(i)}:{part}": values for part, values in _date_parts(name, columns[name]).items()}
        else:
            found[_column_key(i)] = _convert(name, columns[name], kind)
    return pd.DataFrame(found)


def _date_parts(name: str, column: Column) -> dict[str, np.ndarray]:
    """Return a date as numbers: the day, and the sine and cosine of each cycle."""
    if isinstance(column, np.ndarray) and np.isnan(column).all():
        column = Dates(column)
    dates = read_dates(column) if isinstance(column, TextColumn) else column
    if not isinstance(dates, Dates):
        raise ValueError(f"Column {name!r} held dates when the model was fitted, now it holds something else.")
    parts = {"days": dates.days}
    for cycle, length in CYCLES.items():
        angle = 2 * np.pi / length * dates.days
        parts |= {f"sine of {cycle}": np.sin(angle), f"cosine of {cycle}": np.cos(angle)}
    return parts


def _column_key(position: int) -> str:
    """Return the name of a column in the data frame: NumPy's strings cannot hold every name, such as a NUL."""
    return f"column {position}"


def _convert(name: str, column: Column, kind: ColumnKind) -> np.ndarray:
    if isinstance(column, Unusable):
        raise ValueError(f"Column {name!r} {column.reason}.")
    if kind == "number":
        if isinstance(column, Dates):
            raise ValueError(f"Column {name!r} held numbers when the model was fitted, now it holds dates.")
        if isinstance(column, TextColumn):
            wrong = [value for value in column.values if not is_numeric_text(value)]
            if wrong:
                raise ValueError(f"Column {name!r} held numbers when the model was fitted, now it holds {wrong[0]!r}.")
            column = np.array([*map(float, column.values), np.nan])[column.codes]
        return np.clip(np.where(np.isfinite(column), column, np.nan), -LARGEST_NUMBER, LARGEST_NUMBER)
    text = as_text(column)
    return np.array([*text.values, "" if kind == "text" else "<missing>"], dtype=object)[text.codes]


def _check_packages() -> None:
    with explain_missing("Tables need pandas and scikit-learn", "own-data"):
        import pandas  # noqa: F401
        import sklearn  # noqa: F401


def _skops() -> Any:  # its import takes a second, so it is not among the packages above
    with explain_missing("Saving the preprocessing of a table needs skops", "own-data"):
        import skops.io
    return skops.io
