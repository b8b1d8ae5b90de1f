"""Preprocessing: from columns to features, saved and loaded."""

import io
import pickle
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip.data._columns import Dates, TextColumn, Unusable, from_numpy
from logitclip.data._preprocessing import LARGEST_NUMBER, MAX_LEVELS, Preprocessor

pytest.importorskip("skops")


def text(*values):
    return from_numpy(np.array(values))


def categories(prep):
    """Return the levels with their own feature, and the number of features."""
    encoder = prep.transformer.named_transformers_["categories"]
    return [str(level) for level in encoder.get_feature_names_out()]


def test_numbers_are_filled_with_the_median_and_standardised():
    values = np.array([1.0, 2.0, np.nan, 4.0, np.inf])
    prep = Preprocessor.fit({"a": values})
    filled = np.array([1.0, 2.0, 2.0, 4.0, 2.0])
    features = prep.transform({"a": values})
    assert features.dtype == torch.float32
    np.testing.assert_allclose(features[:, 0], (filled - filled.mean()) / filled.std(), rtol=1e-6)


def test_levels_others_and_missing_values():
    prep = Preprocessor.fit({"c": text("x", "x", "y", "y", "rare", "?", "?")})
    assert categories(prep) == ["column 0_<missing>", "column 0_x", "column 0_y", "column 0_infrequent_sklearn"]
    seen = prep.transform({"c": text("y", "x", "rare", "never seen", "", " x ")})
    assert seen.argmax(1).tolist() == [2, 1, 3, 3, 0, 1]
    assert seen.sum(1).tolist() == [1] * 6


def test_at_most_so_many_levels():
    values = [f"v{i:03}" for i in range(MAX_LEVELS + 6) for _ in range(2 if i < 6 else 3)]
    prep = Preprocessor.fit({"c": text(*values)})
    assert categories(prep)[:-1] == [f"column 0_v{i:03}" for i in range(6, MAX_LEVELS + 6)]


def test_useless_columns_are_dropped_and_named():
    n = 40
    columns = {
        "id": text(*(f"user {i}" for i in range(n))),
        "constant": np.full(n, 0.1),
        "same": text(*["x"] * n),
        "empty": np.full(n, np.nan),
        "blank": text(*[""] * n),
        "row": np.arange(n, dtype=float),
        "shuffled": np.random.default_rng(0).permutation(n) + 100.0,
        "user_id": np.random.default_rng(1).permutation(10 * n)[:n].astype(float),
        "when": Unusable(n, "is a date"),
        "kept": np.arange(n, dtype=float) % 7,
        "seldom": text(*["x"] * 3, *[""] * (n - 3)),
    }
    prep = Preprocessor.fit(columns)
    assert prep.kinds == {"kept": "number", "seldom": "category"}
    assert prep.dropped == {
        "id": "is text with 40 different values in 40 rows",
        "constant": "has the same value in every row",
        "same": "has the same value in every row",
        "empty": "has no values",
        "blank": "has no values",
        "row": "numbers the rows",
        "shuffled": "numbers the rows",
        "user_id": "numbers the rows",
        "when": "is a date",
    }
    with pytest.raises(ValueError, match="No column is left as a feature: 'a' has the same value in every row"):
        Preprocessor.fit({"a": np.ones(3)})
    with pytest.raises(ValueError, match="there is none beside the label"):
        Preprocessor.fit({})


def test_extreme_numbers():
    """Extreme floats, whose squares overflow or underflow, give finite features."""
    for unit in (1e-140, 1.0, 1e140):
        prep = Preprocessor.fit({"a": unit * np.array([1.0, 2.0, 3.0])})
        np.testing.assert_allclose(prep.transform({"a": unit * np.array([2.0, 3.0])})[:, 0], [0, 1.5**0.5], atol=1e-6)
        assert prep.transform({"a": np.array([1.7e308, -1.7e308, np.inf])}).isfinite().all()
    assert (
        Preprocessor.fit({"a": np.array([1e300, 2 * LARGEST_NUMBER, 0.0])})
        .transform({"a": np.zeros(1)})
        .isfinite()
        .all()
    )


def test_words_and_letters():
    long = [f"the quick brown fox number {word} jumps" for word in ("one", "two", "three")]
    prep = Preprocessor.fit({"t": text(*long)}, text=["t"])
    assert prep.kinds == {"t": "text"}
    words = prep.transform({"t": text("quick two", "nothing known here", "")})
    assert (words != 0).sum(1).tolist() == [2, 0, 0]
    short = Preprocessor.fit({"t": text("abcd", "bcde", "xyz")}, text=["t"])
    assert (short.transform({"t": text("bcd")}) != 0).sum() >= 3  # bc, cd, bcd


def test_other_files_later():
    prep = Preprocessor.fit({"n": np.array([1.0, 3.0, 1, 3]), "c": text("1", "1", "2", "2")})
    same = prep.transform({"n": np.array([3.0]), "c": text("2")})
    assert torch.equal(prep.transform({"new": text("?"), "c": np.array([2.0]), "n": text("3")}), same)
    assert prep.transform({"n": text("?"), "c": np.array([np.nan])}).tolist() == [[0.0, 0, 0]]
    with pytest.raises(ValueError, match=r"There is no column 'n' \(and 1 others\). Known: x."):
        prep.transform({"x": np.zeros(1)})
    with pytest.raises(ValueError, match=r"There is no column 'c'. Did you mean 'cc'?"):
        prep.transform({"n": np.zeros(1), "cc": text("1")})
    with pytest.raises(ValueError, match="Column 'n' held numbers when the model was fitted, now it holds 'many'"):
        prep.transform({"n": text("3", "many"), "c": text("1", "1")})
    with pytest.raises(ValueError, match="Column 'n' is a date"):
        prep.transform({"n": Unusable(1, "is a date"), "c": text("1")})


names = st.text(min_size=1, max_size=8)
numbers = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=6, max_size=6)
words = st.lists(st.sampled_from(["a", "b", "ü", "", "NA", "  c"]), min_size=6, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(names, numbers.map(np.array) | words.map(lambda w: text(*w)), max_size=5))
def test_saved_and_read_back_it_does_the_same(columns):
    columns = {**columns, "sure to stay": np.arange(6.0), "words": text(*["one", "two", "one", "two", "three"], "?")}
    prep = Preprocessor.fit(columns, text=["words"])
    features = prep.transform(columns)
    assert features.isfinite().all()
    again = Preprocessor.from_bytes(prep.to_bytes())
    assert (again.kinds, again.dropped) == (prep.kinds, prep.dropped)
    assert torch.equal(again.transform(columns), features)


def test_damaged_content_and_a_trap_are_refused():
    import skops.io

    content = Preprocessor.fit({"n": np.array([1.0, 3.0]), "c": text("x", "")}).to_bytes()
    assert zipfile.is_zipfile(io.BytesIO(content))
    trap = skops.io.dumps({"version": 1, "kinds": {}, "dropped": {}, "transformer": Trap()})
    for bad in (b"", content[:400], pickle.dumps(print), trap, skops.io.dumps([1])):
        with pytest.raises(ValueError, match="the preprocessing cannot be read: ") as error:
            Preprocessor.from_bytes(bad)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input": "filename"}, "has input='filename', which `fit` never sets"),
        ({"token_pattern": "(a+)+$"}, "has token_pattern="),
        ({"stop_words": "english"}, "has stop_words='english'"),
    ],
)
def test_transformers_that_fit_never_makes_are_refused(change, sentence, tmp_path):
    """With input="filename", a vectorizer would open the files that the texts name."""
    import skops.io

    prep = Preprocessor.fit({"words": text("one two three four five six", "seven", "one two")}, text=["words"])
    for fitted in (True, False):
        state = skops.io.loads(prep.to_bytes(), trusted=["numpy.dtype"])
        transformer = state["transformer"]
        (transformer.named_transformers_["text 0"] if fitted else transformer.transformers[-1][1]).set_params(**change)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            Preprocessor.from_bytes(skops.io.dumps(state))
    from sklearn.preprocessing import FunctionTransformer

    state["transformer"].transformers[0] = ("numbers", FunctionTransformer(np.sqrt), [])
    with pytest.raises(ValueError, match="a FunctionTransformer is no transformer of `fit`"):
        Preprocessor.from_bytes(skops.io.dumps(state))


class Trap:
    """A type that is not scikit-learn's."""


def test_a_row_may_be_as_wide_as_it_likes():
    columns = {f"c{i}": np.arange(5.0) + i for i in range(300)}
    assert Preprocessor.fit(columns).transform(columns).shape == (5, 300)


def test_without_skops_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skops.io", None)
    prep = Preprocessor.fit({"a": np.arange(3.0)})
    with pytest.raises(ImportError, match=r"skops: pip install 'logitclip\[own-data\]'"):
        prep.to_bytes()


def test_without_pandas_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install 'logitclip\[own-data\]'"):
        Preprocessor.fit({"a": np.arange(3.0)})


def test_features_are_made_without_skops_whose_import_takes_a_second():
    code = "import sys, numpy; from logitclip.data._preprocessing import Preprocessor\n"
    code += "Preprocessor.fit({'a': numpy.arange(3.0)}); raise SystemExit('skops' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_categories_are_named():
    columns = {"town": text("x", "x", "y", ""), "sex": text("f", "m", "f", "m"), "n": np.arange(4.0) ** 2}
    prep = Preprocessor.fit(columns)
    new = {"town": text("x", "paris", "", "bern"), "sex": text("m", "m", "f", "f"), "n": np.zeros(4)}
    assert prep.unknown(new) == {"town": ["bern", "paris"]}
    assert prep.unknown(columns) == {}
    assert Preprocessor.fit({"n": np.arange(4.0) ** 2}).unknown({"n": np.zeros(1)}) == {}


def test_dates_are_days_and_cycles():
    days = np.array([0.0, 7.0, 10.25, np.nan])
    prep = Preprocessor.fit({"when": Dates(days)})
    assert prep.kinds == {"when": "date"}
    scaler = prep.transformer.named_transformers_["numbers"][-1]
    found = prep.transform({"when": Dates(days)}).numpy() * scaler.scale_ + scaler.mean_
    filled = np.where(np.isnan(days), 7.0, days)
    expected = [filled]
    for length in (365.2425, 7.0, 1.0):
        for wave in (np.sin, np.cos):
            values = wave(2 * np.pi * days / length)
            expected.append(np.where(np.isnan(values), np.nanmedian(values), values))
    np.testing.assert_allclose(found, np.stack(expected, 1), atol=1e-5)
    same = Preprocessor.from_bytes(prep.to_bytes())
    as_words = TextColumn(np.array([0, -1]), ["1970-01-08"])
    assert torch.equal(same.transform({"when": as_words}), prep.transform({"when": Dates(days[[1, 3]])}))
    with pytest.raises(ValueError, match="Column 'when' held dates when the model was fitted"):
        prep.transform({"when": np.array([1.0])})
    with pytest.raises(ValueError, match="Column 'n' held numbers when the model was fitted, now it holds dates"):
        Preprocessor.fit({"n": np.array([1.0, 2.0])}).transform({"n": Dates(days)})
