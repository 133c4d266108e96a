"""Generators of the texts that the demo recipes train on, without files or network and with the same rows on every machine.

Use: ``task.dataset=hftune.data.demo:reviews`` (reviews with a grade) or ``hftune.data.demo:articles`` (Chinese, with titles).
"""

# ruff: noqa: RUF001  (the full-width comma of Chinese)

from __future__ import annotations

import random
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from hftune.data.demo_rows import distinct_rows

NUM_REVIEWS = {"train": 4000, "eval": 800}

# Opinions on an aspect, from terrible (-2) to excellent (+2). No single word gives a grade away: "good" is +1 alone, -1 after
# "not" and +2 after "really", and opinions on other aspects of the same review may differ.
WORDS = {
    "good": ["good", "nice", "pleasant", "tasty", "friendly", "fresh", "fair", "solid"],
    "great": ["amazing", "wonderful", "superb", "outstanding", "fantastic", "delightful"],
    "bad": ["bad", "slow", "bland", "noisy", "rude", "dirty", "overpriced", "stale"],
    "awful": ["awful", "terrible", "disgusting", "horrible", "dreadful", "appalling"],
}
STRENGTH = {  # opinion -> expressions, as (words before, kind of word)
    2: [("really", "good"), ("so very", "good"), ("", "great"), ("truly", "great"), ("far from", "awful")],
    1: [("", "good"), ("quite", "good"), ("not", "bad"), ("hardly", "bad"), ("never", "bad")],
    -1: [("", "bad"), ("a bit", "bad"), ("not", "good"), ("hardly", "good"), ("never", "good")],
    -2: [("really", "bad"), ("so very", "bad"), ("", "awful"), ("truly", "awful"), ("far from", "great")],
}
ASPECTS = ["the food", "the service", "our waiter", "the room", "the price", "the coffee", "the music", "the view", "dessert"]
NEUTRAL = [
    "we came on a {day} with {people}",
    "it is the place on the corner near the {place}",
    "my {relative} had the {dish} and i had the {dish}",
    "we waited until {hour} for a table by the {place}",
    "they also sell {dish} to take home",
    "parking is behind the {place}",
    "i had read about it in the paper last {day}",
]
FILL = {
    "day": ["monday", "tuesday", "friday", "sunday", "rainy evening", "holiday"],
    "people": ["two friends", "my parents", "the whole office", "nobody else", "three kids"],
    "place": ["station", "bridge", "library", "old market", "window", "river", "theatre"],
    "relative": ["wife", "brother", "boss", "neighbour", "daughter"],
    "dish": ["soup", "noodles", "steak", "salad", "fish", "curry", "pancakes", "pie"],
    "hour": ["six", "seven", "half past eight", "nine", "almost ten"],
}


def reviews(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield restaurant reviews of 5 to 400 words with a grade from 0 to 4, like Yelp's stars minus one.

    The grade is the rounded mean of the opinions in the review, so a model must read all of it, negations included.
    Lengths have a long tail (median about 45 words). "train" and "eval" have no text in common.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_REVIEWS.
    """
    yield from distinct_rows(_review, NUM_REVIEWS, split, count, seed, key=itemgetter("text"))


def _review(rng: random.Random) -> dict[str, Any]:
    grade = rng.randrange(5)
    num_words = min(380, max(5, round(rng.lognormvariate(3.2, 0.9))))
    opinions: list[int] = []
    sentences: list[str] = []
    while not opinions or sum(len(sentence.split()) for sentence in sentences) < num_words:
        if opinions and rng.random() < 0.4:
            sentences.append(_neutral(rng))
        else:
            opinions.append(_opinion(rng, opinions, grade))
            sentences.append(_sentence(rng, opinions[-1]))
    if len(opinions) > 1:
        rng.shuffle(sentences)
    return {"text": ". ".join(sentences) + ".", "label": _grade(opinions)}


def _opinion(rng: random.Random, opinions: list[int], grade: int) -> int:
    """Choose an opinion that keeps the mean near the grade, but sometimes disagrees with it."""
    wanted = (grade - 2) * (len(opinions) + 1) - sum(opinions)
    near = max(-2, min(2, wanted + rng.choice([-1, 0, 0, 1])))
    return near or rng.choice([-1, 1])


def _grade(opinions: list[int]) -> int:
    return max(0, min(4, round(sum(opinions) / len(opinions)) + 2))


def _sentence(rng: random.Random, opinion: int) -> str:
    before, kind = rng.choice(STRENGTH[opinion])
    verb = rng.choice(["was", "is", "seemed", "turned out"])
    return " ".join(word for word in (rng.choice(ASPECTS), verb, before, rng.choice(WORDS[kind])) if word)


def _neutral(rng: random.Random) -> str:
    sentence = rng.choice(NEUTRAL)
    while "{" in sentence:
        name = sentence[sentence.index("{") + 1 : sentence.index("}")]
        sentence = sentence.replace(f"{{{name}}}", rng.choice(FILL[name]), 1)
    return sentence


NUM_ARTICLES = {"train": 3000, "eval": 300}

# Kinds of news: the title, and, for each of its gaps, sentences that state the fact. Only the words around a fact distinguish
# it from similar ones in FILLER.
NEWS: list[tuple[str, dict[str, list[str]]]] = [
    (
        "{firm}发布{product}，首批{stock}万台",
        {
            "firm": ["{firm}在总部召开了新品发布会", "新品发布会由{firm}的总裁亲自主持"],
            "product": ["摆在展台中央的样机名叫{product}", "工程师给这款新机取名为{product}"],
            "stock": ["工厂已经备好货{stock}万台", "仓库里装箱的一共{stock}万台"],
        },
    ),
    (
        "{firm}推迟交付{product}至{month}月",
        {
            "firm": ["{firm}昨晚向客户公开道歉", "为拖延而道歉的是{firm}"],
            "product": ["客户迟迟收不到的是{product}", "生产线上还没装好的型号是{product}"],
            "month": ["最早要到{month}月才能交货", "新的交货日期定在{month}月"],
        },
    ),
    (
        "{firm}因{fault}召回{product}",
        {
            "firm": ["监管部门约谈了{firm}的负责人", "{firm}承诺为车主免费检修"],
            "fault": ["用户的投诉集中在{fault}", "检测报告写明的缺陷是{fault}"],
            "product": ["要送回工厂的型号是{product}", "门店已经下架了{product}"],
        },
    ),
    (
        "{team}队{score}战胜{rival}队",
        {
            "team": ["{team}队的球员赛后绕场庆祝", "赢下三分的{team}队升到榜首"],
            "score": ["终场的比分是{score}", "裁判吹哨时记分牌停在{score}"],
            "rival": ["{rival}队的教练承认输得不冤", "输球的{rival}队跌到榜尾"],
        },
    ),
    (
        "{firm}进军{city}，开出{shops}家门店",
        {
            "firm": ["新招牌上写着{firm}四个大字", "首次跨省经营的{firm}信心十足"],
            "city": ["店面都选在{city}的闹市", "{city}的顾客一早就来排队"],
            "shops": ["同一天剪彩的有{shops}家门店", "首期计划是{shops}家门店"],
        },
    ),
    (
        "{city}大学研制出{device}，{gain}",
        {
            "city": ["论文的作者都来自{city}大学", "{city}大学的实验室为此忙了三年"],
            "device": ["课题组做成的样品是一种{device}", "登上封面的成果是{device}"],
            "gain": ["测试表明它能让{gain}", "与旧办法相比，{gain}"],
        },
    ),
    (
        "{firm}获{fund}{sum}亿元投资",
        {
            "firm": ["拿到这笔钱的是{firm}", "{firm}将用这笔钱扩建厂房"],
            "fund": ["掏钱的一方是{fund}", "{fund}的合伙人签了合同"],
            "sum": ["合同上的金额是{sum}亿元", "打到账上的一共{sum}亿元"],
        },
    ),
    (
        "{city}地铁{line}号线{month}月开通",
        {
            "city": ["{city}的轨道集团已经验收完毕", "{city}市民为这条地铁等了五年"],
            "line": ["新线路的编号是{line}号线", "站台上挂出了{line}号线的牌子"],
            "month": ["首班车将在{month}月发出", "试乘之后，{month}月正式载客"],
        },
    ),
    (
        "{name}出任{firm}{post}",
        {
            "name": ["接过聘书的是{name}", "{name}在就职演讲中感谢了同事"],
            "firm": ["{firm}的董事会投了赞成票", "任命书由{firm}人事部签发"],
            "post": ["空缺了半年的职位是{post}", "前一任{post}上月退休"],
        },
    ),
    (
        "{city}遭遇{weather}，{trains}趟列车停运",
        {
            "city": ["{city}的学校全部停课", "{city}市政府启动了应急预案"],
            "weather": ["气象台把{weather}的预警升为红色", "突如其来的{weather}持续了一夜"],
            "trains": ["车站公告取消了{trains}趟列车", "受阻的列车共有{trains}趟"],
        },
    ),
]
FILLER = [
    "{firm}没有回应记者的提问",
    "分析师认为{firm}短期内不会跟进",
    "去年{firm}也碰到过类似的情形",
    "有人把它同{product}放在一起比较",
    "隔壁店里的{product}仍然卖得不错",
    "来自{city}的一位读者说很关心此事",
    "{city}方面暂时没有消息",
    "记者在{city}见到了几位当事人",
    "{city}队的球迷也在网上议论",
    "{city}大学的一位教授持不同看法",
    "{fund}的报告对此只字未提",
    "专家{name}提醒大家保持冷静",
    "评论员{name}写了一篇长文",
    "旁人更关心的是{device}",
    "往年常见的{weather}这次没有出现",
    "上一次出现{fault}已是多年以前",
    "调查问卷收回了{number}份",
    "电话热线接到了{number}个来电",
    "类似的会议开过{number}次",
    "据统计，{month}月的数字并不理想",
    "当天天气晴朗",
    "细节还有待公布",
    "网友的看法并不一致",
    "消息传出后，街头巷尾都在谈论",
    "一位不愿透露姓名的员工说，这并不意外",
    "接下来的几周将是关键",
]
_CITIES = ["青岛", "大连", "成都", "西安", "长沙", "苏州", "厦门", "昆明", "兰州", "合肥", "南宁", "贵阳", "武汉", "郑州"]
_NAMES = ["王", "李", "张", "陈", "刘", "赵", "周", "孙"], ["明", "丽华", "建国", "晓东", "雪", "志强", "文静", "海"]
_FIRMS = ["华星", "蓝海", "远航", "云帆", "金桥", "天马", "东方", "北斗", "长风"], ["科技", "汽车", "电子", "重工", "医疗"]
_PRODUCTS = ["Nova", "Aria", "Lumo", "Orion", "Pixo", "Zeta", "Vega", "Tango"], ["2", "3", "5", "7", "9", "X", "S"]
_NUMBERS = [str(number) for number in range(2, 60)]
WHAT = {  # gap of a sentence or title -> its possible fillings
    "firm": [first + second for first in _FIRMS[0] for second in _FIRMS[1]],
    "product": [first + second for first in _PRODUCTS[0] for second in _PRODUCTS[1]],
    "name": [first + second for first in _NAMES[0] for second in _NAMES[1]],
    "fund": ["红杉资本", "春华基金", "高山资本", "明德基金", "磐石资本", "启明基金"],
    **dict.fromkeys(("city", "team", "rival"), _CITIES),
    "fault": ["电池过热", "刹车失灵", "屏幕闪烁", "车门漏水", "油管破裂", "气囊误爆"],
    "device": ["固态电池", "仿生手臂", "纸质芯片", "透明钢材", "无声电机", "微型雷达", "智能镜片", "折叠电缆", "海水燃料"],
    "gain": ["寿命翻倍", "成本减半", "能耗大降", "速度提升", "重量更轻", "精度翻倍", "噪声减半", "产量提升", "污染大降"],
    "post": ["总经理", "财务总监", "首席顾问", "技术总监", "董事长"],
    "weather": ["暴雨", "台风", "大雪", "沙尘暴", "冰雹", "浓雾"],
    "score": [f"{most}比{least}" for most in range(1, 6) for least in range(4) if least < most],
    "month": [str(month) for month in range(1, 13)],
    **dict.fromkeys(("stock", "shops", "sum", "line", "trains", "number"), _NUMBERS),
}


def articles(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield Chinese news of 60 to 800 characters ("content") with a title of 8 to 20 characters ("title").

    The title combines facts from three sentences anywhere in the article, among others on different firms, towns and numbers:
    no piece of the text is the title. Lengths have a long tail (median about 170 characters). "train" and "eval" have no
    article and no title in common.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_ARTICLES.
    """
    rng = random.Random(f"{seed} {split}")
    trained = articles("train", NUM_ARTICLES["train"], seed) if split == "eval" else ()
    seen = {text for row in trained for text in row.values()}
    for _ in range(NUM_ARTICLES[split] if count is None else count):
        row = _article(rng)
        while row["content"] in seen or row["title"] in seen:
            row = _article(rng)
        seen.add(row["content"])
        yield row


def _article(rng: random.Random) -> dict[str, Any]:
    num_characters = min(770, max(60, round(rng.lognormvariate(5.1, 0.6))))
    title, facts = rng.choice(NEWS)
    filled: dict[str, str] = {}  # gap of the title -> its filling
    for gap in facts:
        filled[gap] = _other(rng, gap, filled)
    sentences = [rng.choice(ways).format(**filled) for ways in facts.values()]
    filler: list[str] = []
    while sum(len(sentence) + 1 for sentence in sentences) < num_characters:
        filler = filler or rng.sample(FILLER, len(FILLER))
        sentence = filler.pop()
        sentences.append(sentence.format(**{gap: _other(rng, gap, filled) for gap in WHAT if f"{{{gap}}}" in sentence}))
    rng.shuffle(sentences)
    return {"content": "。".join(sentences) + "。", "title": title.format(**filled)}


def _other(rng: random.Random, gap: str, filled: dict[str, str]) -> str:
    """Choose a filling for a gap that the title does not use."""
    return rng.choice([what for what in WHAT[gap] if what not in filled.values()])
