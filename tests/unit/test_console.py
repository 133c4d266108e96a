"""What a terminal shows."""

import pytest

from hftune.tracking.console import one_line


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("", 10, ""),
        ("a title", 10, "a title"),
        ("two\nlines  and\ttabs", 40, "two lines and tabs"),
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghijk", 10, "abcdefghi…"),
        ("北京大学的", 10, "北京大学的"),
        ("北京大学的报告", 10, "北京大学…"),
        ("a北京大学的", 10, "a北京大学…"),
    ],
)
def test_texts_are_fitted_into_columns_of_which_chinese_characters_take_two(text, width, shown):
    assert one_line(text, width) == shown
