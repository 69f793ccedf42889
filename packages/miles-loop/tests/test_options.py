"""Every value has a name, a type and a default; nothing unknown is ignored."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from miles_contracts import InvalidFieldError
from miles_loop import toml
from miles_loop.arguments import Flag, parse
from miles_loop.config import RunConfig
from miles_loop.options import build, find_option, merge, nest, options, parse_text, read_toml, type_name


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    """Inside."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size: Annotated[int, Field(ge=1)] = 3
    """How big."""
    limit: float | None = 1.0
    names: tuple[str, ...] = ("a",)
    free: dict[str, Any] = {}


class Outer(BaseModel):
    """Outside."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    colour: Colour = Colour.RED
    needed: str
    inner: Inner = Inner(size=5)
    path: Path | None = None
    on: bool = False


KNOWN = {option.path: option for option in options(Outer)}


def test_leaves_in_order_with_the_defaults_of_the_section_instance() -> None:
    assert list(KNOWN) == [
        *("colour", "needed", "inner.size", "inner.limit", "inner.names", "inner.free", "path", "on")
    ]
    assert KNOWN["inner.size"].default == 5
    assert KNOWN["inner.size"].description == "How big."
    assert KNOWN["needed"].default is ...


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("colour", "red | blue"),
        ("inner.size", "int"),
        ("inner.limit", "number or none"),
        ("inner.names", "list of str"),
        ("inner.free", "table"),
        ("path", "path or none"),
    ],
)
def test_types_in_words(path: str, expected: str) -> None:
    assert type_name(KNOWN[path].annotation) == expected


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("inner.limit", "none", None),
        ("inner.limit", "2.5", "2.5"),
        ("inner.names", "x, y", ["x", "y"]),
        ("inner.names", '["x,y"]', ["x,y"]),
        ("inner.names", "", []),
        ("inner.free.depth", "3", 3),
        ("inner.free.name", "word", "word"),
        ("inner.free.on", "true", True),
        ("inner.free", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_text_becomes_a_value(path: str, text: str, expected: object) -> None:
    assert parse_text(find_option(KNOWN.values(), path), path, text) == expected


def test_text_that_is_no_list_or_object_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="comma separated"):
        parse_text(KNOWN["inner.names"], "inner.names", "[1")
    with pytest.raises(InvalidFieldError, match="JSON object"):
        parse_text(KNOWN["inner.free"], "inner.free", "word")


def test_layers_are_merged_key_by_key_and_left_alone() -> None:
    low: dict[str, Any] = {"a": {"x": 1, "y": 2}, "b": 1}
    merged = merge(low, {"a": {"y": 3}}, {"b": {"z": 1}})
    assert merged == {"a": {"x": 1, "y": 3}, "b": {"z": 1}}
    assert low == {"a": {"x": 1, "y": 2}, "b": 1}


@pytest.mark.parametrize(
    ("layer", "field", "remedy"),
    [
        ({"needed": "x", "inner": {"sise": 1}}, "inner.sise", "did you mean 'inner.size'?"),
        ({"needed": "x", "colr": "red"}, "colr", "did you mean 'colour'?"),
        ({"needed": "x", "zzz": 1}, "zzz", "--help lists all"),
        ({"needed": "x", "inner": 3}, "inner", "this is a section; set its keys, for example inner.size"),
        ({}, "needed", "required; set --needed"),
        ({"needed": "x", "inner": {"size": 0}}, "inner.size", "greater than or equal to 1"),
        ({"needed": "x", "colour": "green"}, "colour", "expected: red | blue"),
        ({"needed": "x", "on": "perhaps"}, "on", "expected: bool"),
    ],
)
def test_a_layer_that_does_not_fit_names_field_and_remedy(layer: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        build(Outer, [layer])
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        build(Outer, [{"needed": "x", "inner": {"size": 0}, "on": "perhaps"}])
    assert "on: got 'perhaps'" in str(caught.value)


def test_none_is_written_where_it_is_not_the_default_and_read_back() -> None:
    built = build(Outer, [{"needed": "x", "inner": {"limit": None}}])
    text = toml.dumps(built)
    assert 'limit = "none"' in text
    assert "path" not in text
    assert build(Outer, [tomllib.loads(text)]) == built


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_what_is_written_as_toml_reads_back(value: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dumps(value)) == value


def test_toml_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(InvalidFieldError, match=r"a\.b: got 'object'"):
        toml.dumps({"a": {"b": object()}})


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\nseed =\n")
    with pytest.raises(InvalidFieldError, match="line 2"):
        read_toml(file)


FLAGS = (Flag("config", "FILE", ""), Flag("dry-run", "", ""))


def test_a_command_line_is_split_into_settings_flags_and_words() -> None:
    parsed = parse(
        ["word", "--steps=7", "--dry-run", "--config", "x.toml", "--checkpoint-every", "2", "--record.plot"], FLAGS
    )
    assert parsed.settings == {"steps": "7", "checkpoint": {"every": "2"}, "record": {"plot": True}}
    assert parsed.flags == {"dry-run": "true", "config": "x.toml"}
    assert parsed.words == ("word",)


def test_dashes_and_underscores_are_the_same() -> None:
    assert parse(["--pipeline_depth", "1"], FLAGS) == parse(["--pipeline-depth", "1"], FLAGS)
    assert parse(["--trainer.optimizer.weight-decay", "0.1"], FLAGS).settings == nest(
        "trainer.optimizer.weight_decay", "0.1"
    )


def test_engines_have_the_names_that_people_type() -> None:
    words = ["--rollout.engine", "sglang", "--rollout.engines", "http://a:1", "http://b:2", "--steps", "3"]
    assert parse(words, ()).settings == {
        "engine": {"kind": "sglang", "urls": ["http://a:1", "http://b:2"]},
        "steps": "3",
    }
    assert parse(["--rollout.engines=http://a:1,http://b:2"], ()).settings["engine"]["urls"] == [
        "http://a:1",
        "http://b:2",
    ]
    with pytest.raises(InvalidFieldError, match="given twice"):
        parse(["--rollout.engines", "http://a:1", "--engine.urls", "http://b:2"], ())


def test_negative_numbers_are_values() -> None:
    assert parse(["--rollout.sampling.top_k", "-1"], FLAGS).settings == nest("rollout.sampling.top_k", "-1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz", "3"], "did you mean 'steps'?"),
        (["--cofig", "x"], "did you mean 'config'?"),
        (["--trainer.optimiser.lr", "1"], "did you mean 'trainer.optimizer.lr'?"),
        (["--lr", "1"], "did you mean 'trainer.optimizer.lr'?"),
        (["--steps"], "needs a value: --steps VALUE"),
        (["--steps", "--seed", "1"], "needs a value"),
        (["--steps", "1", "--steps", "2"], "given twice"),
    ],
)
def test_a_bad_command_line_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message.replace("?", r"\?")):
        parse(argv, FLAGS)


def test_every_option_of_a_run_is_described() -> None:
    missing = [o.path for o in options(RunConfig) if not o.description and not o.path.startswith("trainer.")]
    assert missing == []
