"""The table of the device's ops."""

from popsim_torch import _native


def test_names_are_unique() -> None:
    names = [name for name, _ in _native.op_table()]
    assert len(names) == len(set(names))


def test_every_schema_starts_with_the_op_name() -> None:
    for name, schema in _native.op_table():
        assert schema.startswith(f"{name}("), (name, schema)


def test_every_schema_says_what_the_op_returns() -> None:
    for name, schema in _native.op_table():
        assert "->" in schema, (name, schema)


def test_onednn_is_in_this_build() -> None:
    assert _native.has_onednn()
