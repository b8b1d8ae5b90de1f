"""Spec strings: their meaning, their canonical spelling, and the errors for invalid ones."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip.clip import CLIPS
from logitclip.registry import Registry, UnknownName, suggest


def make() -> Registry:
    registry = Registry("thing", injected=("secret",))

    @registry.register
    def plain() -> None:
        """No knobs."""

    @registry.register
    def many(
        positional: int,
        *,
        number: float = 0.5,
        count: int = 3,
        flag: bool = False,
        word: str = "a",
        path: str | None = None,
        maybe: float | None = None,
        kind: Literal["red", "green"] = "red",
        secret: int = 0,
    ) -> dict[str, Any]:
        """Every type of knob.

        More about it.
        """
        return {"positional": positional, "number": number, "count": count, "flag": flag, "word": word}

    @registry.register
    def needy(*, name: str, size: int = 1) -> str:
        """Needs a name."""
        return f"{name}{size}"

    return registry


things = make()


def test_a_spec_is_a_name_and_knobs() -> None:
    assert things.parse("plain") == ("plain", {})
    assert things.parse("many:number=0.25,count=7") == ("many", {"number": 0.25, "count": 7})
    assert things.parse(" many : number = 1 , count = 2 ") == ("many", {"number": 1.0, "count": 2})
    assert things.parse("many:") == ("many", {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("number=1e-3", 1e-3),
        ("number=2", 2.0),
        ("number=inf", math.inf),
        ("number=-4", -4.0),
        ("count=12", 12),
        ("flag=true", True),
        ("flag=False", False),
        ("word=5", "5"),
        ("word=none", "none"),
        ("word=a=b", "a=b"),
        ("path=none", None),
        ("path=None", None),
        ("path=a/b,c.txt", "a/b,c.txt"),
        ("maybe=none", None),
        ("maybe=0.1", 0.1),
        ("kind=green", "green"),
    ],
)
def test_values_are_read_by_their_annotation(text: str, value: Any) -> None:
    (got,) = things.parse(f"many:{text}")[1].values()
    assert got == value
    assert type(got) is type(value)


def test_only_a_comma_before_a_key_separates() -> None:
    assert things.parse("many:path=x,y,word=b,count=2")[1] == {"path": "x,y", "word": "b", "count": 2}
    assert things.parse("many:word=C:\\data,v2")[1] == {"word": "C:\\data,v2"}


def test_a_bare_first_value_is_the_first_knob() -> None:
    assert things.parse("many:0.125") == ("many", {"number": 0.125})
    assert things.parse("needy:resnet18,size=3") == ("needy", {"name": "resnet18", "size": 3})


def test_a_bare_value_that_may_be_two_knobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"In the clip 'norm:1\.5', '1\.5' needs its knob: tau, delta, temp, p\."):
        CLIPS.parse("norm:1.5")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("manny", "Unknown thing 'manny'. Did you mean 'many'?"),
        (
            "needy = 0.5",
            "In the thing 'needy = 0.5', a colon follows the name: write needy:name=0.5 or needy:size=0.5.",
        ),
        ("/a=b/plain.csv", "Unknown thing '/a=b/plain.csv'."),
        ("zzz", "Unknown thing 'zzz'. Known: many, needy, plain."),
        ("", "Unknown thing ''."),
        ("Many", "Unknown thing 'Many'. Did you mean 'many'?"),
        ("many:numbr=1", "The thing 'many' has no knob 'numbr'. Did you mean 'number'?"),
        ("many:secret=1", "The thing 'many' has no knob 'secret'."),
        ("many:positional=1", "The thing 'many' has no knob 'positional'."),
        ("plain:a=1", "The thing 'plain' has no knob 'a'. It takes none."),
        ("plain:1", "'1' is not of the form key=value"),
        ("many:number=1,number=2", "The knob 'number' is given twice"),
        ("many:number=abc", "number of the thing 'many' must be a number, got 'abc'."),
        ("many:number=nan", "number of the thing 'many' must be a number, got 'nan'."),
        ("many:number=none", "number of the thing 'many' must be a number, got 'none'."),
        ("many:number=", "number of the thing 'many' must be a number, got ''."),
        ("many:maybe=x", "maybe of the thing 'many' must be a number or none, got 'x'."),
        ("many:count=1.5", "count of the thing 'many' must be an integer, got '1.5'."),
        ("many:flag=1", "flag of the thing 'many' must be true or false, got '1'."),
        ("many:kind=blue", "kind of the thing 'many' is one of red, green; got 'blue'."),
        ("needy", "The thing 'needy' needs 'name': write 'needy:name=...'."),
        ("needy:size=2", "The thing 'needy' needs 'name'"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        things.parse(spec)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", [None, 3, ["many"]])
def test_a_spec_is_a_string(spec: Any) -> None:
    with pytest.raises(TypeError, match="named by a spec string such as 'name:key=value'"):
        things.parse(spec)


def test_keywords_follow_the_same_rules() -> None:
    assert things.parse("many:count=2", number=0.1, path=None)[1] == {"count": 2, "number": 0.1, "path": None}
    assert things.parse("many", count=2, flag=True, kind="green")[1] == {"count": 2, "flag": True, "kind": "green"}
    assert things.parse("many", number="0.5")[1] == {"number": 0.5}
    marker = object()
    assert things.parse("many", word=marker)[1]["word"] is marker
    for wrong, sentence in (
        ({"kind": "blue"}, "kind .* is one of red, green"),
        ({"count": 2.5}, "count .* must be an integer, got '2.5'"),
        ({"number": math.nan}, "number .* must be a number, got 'nan'"),
        ({"flag": 1}, "flag .* must be true or false"),
        ({"numbr": 1}, "Did you mean 'number'"),
        ({"secret": 1}, "no knob 'secret'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            things.parse("many", **wrong)
    with pytest.raises(ValueError, match="given twice"):
        things.parse("many:number=1", number=2)


def test_build_binds_the_knobs() -> None:
    assert things.build("many:number=2,flag=true", count=9)(1) == {
        "positional": 1,
        "number": 2.0,
        "count": 9,
        "flag": True,
        "word": "a",
    }


@pytest.mark.parametrize(
    ("spec", "short"),
    [
        ("many:count=3,number=0.5", "many"),
        ("many:count=4,number=0.250", "many:number=0.25,count=4"),
        ("many:1", "many:number=1"),
        (" many : flag = TRUE ", "many:flag=true"),
        ("many:maybe=none", "many"),
        ("many:maybe=1e-05", "many:maybe=1e-05"),
        ("many:number=0.30000000000000004", "many:number=0.30000000000000004"),
        ("many:number=inf", "many:number=inf"),
        ("needy:x,size=1", "needy:name=x"),
        ("plain", "plain"),
    ],
)
def test_canonical_has_one_spelling_per_meaning(spec: str, short: str) -> None:
    assert things.canonical(spec) == short
    assert things.canonical(short) == short


def test_canonical_leaves_out_defaults() -> None:
    full = "many:number=0.5,count=4,flag=false,word=a,path=none,maybe=none,kind=red"
    assert things.canonical(full) == "many:count=4"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "number": st.floats(allow_nan=False),
            "count": st.integers(),
            "flag": st.booleans(),
            "maybe": st.none() | st.floats(allow_nan=False),
            "kind": st.sampled_from(["red", "green"]),
        },
    )
)
def test_canonical_keeps_every_value(knobs: dict[str, Any]) -> None:
    written = "many:" + ",".join(f"{key}={value}" for key, value in knobs.items())
    canonical = things.canonical(written)
    assert things.canonical(canonical) == canonical
    defaults = {key: knob.default for key, knob in things.knobs("many").items()}
    assert defaults | things.parse(canonical)[1] == defaults | knobs


def test_a_revision_is_0_unless_it_is_given() -> None:
    registry = Registry("thing")
    registry.register(lambda: None, "old")
    registry.register(lambda: None, "new", revision=2)
    assert [registry.revision(spec) for spec in ("old", "new:x=1", "unknown")] == [0, 2, 0]


def test_a_class_is_known_by_its_constructor() -> None:
    registry = Registry("method")

    @registry.register
    class method:
        """A class."""

        size: str = "not a knob"

        def __init__(self, job: str, *, rho: float = 0.05) -> None:
            self.job, self.rho = job, rho

    assert registry.parse("method:rho=1") == ("method", {"rho": 1.0})
    assert registry.build("method:rho=1")("job").rho == 1.0


def test_listing() -> None:
    assert list(things) == ["many", "needy", "plain"]
    assert "many" in things
    assert "other" not in things
    assert things.describe("needy") == ("needy:name=...,size=1", "Needs a name.")
    assert things.describe("many")[1] == "Every type of knob."
    assert things.describe("plain") == ("plain", "No knobs.")


def test_a_name_is_registered_once() -> None:
    registry = make()
    with pytest.raises(ValueError, match="The thing 'plain' is registered already"):
        registry.register(lambda: None, name="plain")


def test_a_package_is_imported_when_names_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from logitclip.registry import Registry\nTHINGS = Registry('thing', package=__name__)\n", encoding="utf-8"
    )
    (package / "new_file.py").write_text(
        "from package_of_things import THINGS\n@THINGS.register\ndef new_thing(): pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    things = importlib.import_module("package_of_things").THINGS
    assert "package_of_things.new_file" not in sys.modules
    assert list(things) == ["new_thing"]


def test_a_missing_package_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_ours"):
        list(Registry("thing", package="no_such_package_of_ours"))


def test_suggest() -> None:
    assert suggest("simmetric", ["symmetric", "pair"]) == "Did you mean 'symmetric'?"
    assert suggest("x", ["pair", "asymmetric"]) == "Known: asymmetric, pair."
    assert suggest("Generalized_Cross-Entropy", ["ce", "gce"]) == "Did you mean 'gce'?"
    assert suggest("x", []) == "It takes none."
    assert suggest("PAIR", ["pair", "Age"]) == "Did you mean 'pair'?"
    assert suggest("age", ["pair", "Age"]) == "Did you mean 'Age'?"


def test_an_unknown_name_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(UnknownName("loss", "gcee", ["ce", "gce"])))
    assert str(error) == "Unknown loss 'gcee'. Did you mean 'gce'?"
