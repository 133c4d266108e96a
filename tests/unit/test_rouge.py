"""ROUGE of Chinese titles: cases counted by hand, the scores of rouge_score itself, and what its own tokenizer gets wrong."""

# ruff: noqa: RUF001  (the full-width comma of Chinese)

from __future__ import annotations

import random
import time

import pytest
from rouge_score.rouge_scorer import RougeScorer

from hftune.metrics.rouge import CharTokenizer, WordTokenizer, exact_match, folded, lengths, rouge

TITLE = "苏州队4比2战胜昆明队"


def scores(said: str | list[str], true: str | list[str], suffix: str = "_char") -> dict[str, float]:
    """ROUGE of Chinese on characters or words."""
    found = rouge(*([texts] if isinstance(texts, str) else texts for texts in (said, true)), "zh")
    return {name: value for name, value in found.items() if name.endswith(suffix)}


def char(said: str, true: str) -> dict[str, float]:
    return scores(said, true)


def word(said: str, true: str) -> dict[str, float]:
    return scores(said, true, "_word")


def test_scores_on_characters_equal_those_counted_by_hand():
    # F1 is 2 * hits / (length of the one + length of the other). The reference has 7 characters, 6 pairs.
    #   中国队获胜: 4 of 5 characters, 2 of 4 pairs (中国, 国队), in order 中国队胜.
    #   胜中国队:   4 of 4 characters, 2 of 3 pairs, in order only 中国队.
    assert scores(["中国队获胜", "胜中国队"], ["中国队大胜日本"] * 2) == {
        "rouge_1_char": pytest.approx((8 / 12 + 8 / 11) / 2),
        "rouge_2_char": pytest.approx((4 / 10 + 4 / 9) / 2),
        "rouge_l_char": pytest.approx((8 / 12 + 6 / 11) / 2),
    }


def test_scores_on_words_equal_those_counted_by_hand():
    # 日本/中国队/获胜 against 中国队/大胜/日本: 2 words of 3 and 3, no pair in common, one word in order.
    assert word("日本中国队获胜", "中国队大胜日本") == {
        "rouge_1_word": pytest.approx(4 / 6),
        "rouge_2_word": 0.0,
        "rouge_l_word": pytest.approx(2 / 6),
    }


def test_scores_equal_rouge_score_on_characters():
    """Against rouge_score with a tokenizer written down here: list() is the character tokenizer of text without Latin words."""

    class Listed:
        def tokenize(self, text: str) -> list[str]:
            return list(text)

    draw = random.Random(0)
    said, true = (["".join(draw.choices("新产品发布推迟城市地铁", k=draw.randint(1, 25))) for _ in range(50)] for _ in "12")
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Listed())
    expected = [scorer.score(target, prediction) for prediction, target in zip(said, true, strict=True)]
    assert (
        rouge(said, true, "zh").items()
        >= {
            f"rouge_{name}_char": pytest.approx(sum(score[f"rouge{name.upper()}"].fmeasure for score in expected) / 50)
            for name in "12l"
        }.items()
    )


def test_equal_chinese_titles_score_one():
    assert char(TITLE, TITLE) == {"rouge_1_char": 1.0, "rouge_2_char": 1.0, "rouge_l_char": 1.0}
    assert word(TITLE, TITLE) == {"rouge_1_word": 1.0, "rouge_2_word": 1.0, "rouge_l_word": 1.0}


def test_other_titles_that_share_an_english_word_do_not_score_one():
    said, true = "华星发布Nova新机", "用户因漏水投诉Nova"
    assert RougeScorer(["rouge1"]).score(true, said)["rouge1"].fmeasure == 1.0  # what this module is for
    # Nova is the one hit of 7 and 8 characters.
    assert char(said, true)["rouge_1_char"] == pytest.approx(2 / 15)
    assert word(said, true)["rouge_1_word"] < 0.5


@pytest.mark.parametrize("said", ["", "  ", "，。！"])
@pytest.mark.parametrize("true", [TITLE, ""])
def test_a_prediction_without_a_token_scores_zero_even_against_an_empty_reference(said, true):
    assert set(char(said, true).values()) == {0.0}
    assert set(word(said, true).values()) == {0.0}
    assert exact_match([said], [true]) == 0.0


def test_the_order_of_words_counts_in_rouge_l_only():
    found = char("战胜昆明队苏州队4比2", TITLE)
    assert found["rouge_1_char"] == 1.0
    assert found["rouge_l_char"] < 0.7


def test_a_character_token_is_a_han_kana_or_hangul_character_or_a_run_of_the_rest():
    tokens = CharTokenizer().tokenize("GDP增长6.7%，史蒂夫・乔 Café_x スー 한국 々𠮷")
    assert tokens == [*["gdp", "增", "长", "6", "7", "史", "蒂", "夫", "乔", "café", "x"], *"スー한국々𠮷"]


def test_marks_continue_a_token_and_letters_of_scripts_without_spaces_are_single():
    tokens = CharTokenizer().tokenize
    assert tokens("किताब की, কলম शक्ति") == ["किताब", "की", "কলম", "शक्ति"]
    assert tokens("กินข้าว 25") == ["กิ", "น", "ข้", "า", "ว", "25"]
    assert tokens("ខ្មែរ မြန်မာ") == ["ខ្", "មែ", "រ", "မြ", "န်", "မာ"]
    assert tokens("1\ufe0f\u20e3 葛\U000e0100飾") == ["1", "葛", "飾"]  # how a character is drawn is no mark
    assert rouge(["कल"], ["काला"], "hi")["rouge_l"] == 0


def test_a_word_token_is_a_word_of_jieba_in_lower_case_without_punctuation():
    assert WordTokenizer().tokenize("苹果公司发布iPhone6，售价6.7千元。") == [
        *["苹果公司", "发布", "iphone6", "售价", "6", "7", "千元"]
    ]


@pytest.mark.parametrize("tokenizer", [CharTokenizer, WordTokenizer])
def test_full_width_forms_are_the_same_tokens_as_plain_ones(tokenizer):
    wide = "".join(chr(ord(character) + 0xFEE0) for character in "GDP24")
    assert tokenizer().tokenize(f"增长{wide}") == tokenizer().tokenize("增长GDP24")


def test_case_does_not_change_where_words_are_cut():
    assert word("买t恤和aa制", "买T恤和AA制")["rouge_l_word"] == 1.0


def test_exact_match_of_titles_ignores_case_white_space_and_full_width_but_not_punctuation():
    said = ["华星 发布 nova5", "华星发布\uff2eova5", "华星，发布Nova5", "华星发布"]
    assert exact_match([*map(folded, said)], [folded("华星发布Nova5")] * 4) == 0.5


def test_exact_match_ignores_nothing_but_white_space_around_a_text():
    said = ["now here", "the train to oxford", "deff(x):returnx", " right\n", ""]
    true = ["nowhere", "the train to Oxford", "def f(x):\n    return x", "right", ""]
    assert exact_match(said, true) == 0.2


def test_lengths_are_in_characters_and_blank_predictions_are_empty():
    assert lengths(["苏州队", "", " \n", "Nova5"]) == {"mean_length": (3 + 0 + 0 + 5) / 4, "empty_share": 0.5}


def test_two_thousand_pairs_of_25_characters_take_under_3_s():
    draw = random.Random(0)
    said, true = (["".join(draw.choices("新产品发布推迟城市地铁", k=25)) for _ in range(2000)] for _ in "12")
    WordTokenizer().tokenize(TITLE)  # the dictionary is loaded once a process
    start = time.process_time()  # of this process: others may be busy on the machine
    rouge(said, true, "zh")
    assert time.process_time() - start < 3  # measured: 0.9
