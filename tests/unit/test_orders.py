"""The demo's order texts: never repeated, never shared between splits, the unseen third really unseen."""

import json
import re
import subprocess
import sys

import pytest

from distill.orders import SEEN, SYSTEM, TEMPLATES, UNSEEN, make_orders, orders
from distill.prompts import load_prompts
from pairing.errors import InputError
from tests.conftest import ROOT


def words(pool: dict[str, list[str]]) -> set[str]:
    return {word.lower() for entries in pool.values() for entry in entries for word in entry.split()}


def test_many_different_orders() -> None:
    made = orders("train", 3000, 0)
    assert len({o.text for o in made}) == 3000
    shapes = set()
    for o in made:
        text = o.text
        for value in o.facts.values():
            text = re.sub(re.escape(str(value)), "_", text, flags=re.IGNORECASE)
        shapes.add(re.sub(r"\d+", "_", text))
    assert len(TEMPLATES) >= 20
    assert len(shapes) > 300  # phrasings, apart from the facts in them


def test_each_fact_is_in_its_text() -> None:
    for o in orders("train", 300, 1) + orders("test", 300, 1):
        for key in ("name", "city", "day"):
            assert o.facts[key] in o.text
        assert o.facts["item"] in o.text.lower()
        digits = re.findall(r"\d+", o.text)
        assert digits in ([str(o.facts["quantity"])], [])
        assert "  " not in o.text
        assert "{" not in o.text


def test_some_quantities_are_words() -> None:
    share = sum(not re.search(r"\d", o.text) for o in orders("train", 1000, 0)) / 1000
    assert 0.2 < share < 0.4


@pytest.mark.parametrize(("train_seed", "test_seed"), [(0, 0), (0, 1), (5, 5)])
def test_train_and_test_share_no_order(train_seed: int, test_seed: int) -> None:
    train, test = orders("train", 4000, train_seed), orders("test", 900, test_seed)
    assert not {o.text for o in train} & {o.text for o in test}
    assert not {json.dumps(o.facts) for o in train} & {json.dumps(o.facts) for o in test}  # nor reworded ones


def test_a_third_of_the_test_orders_uses_only_what_training_never_saw() -> None:
    assert not words(SEEN) & words(UNSEEN)
    for count in (3, 60, 300):
        prompts = make_orders("test", count, 0)
        assert sum(p.tags == {"seen": False} for p in prompts) * 3 == count
    for o in orders("test", 300, 0):
        pool = SEEN if o.seen else UNSEEN
        assert all(o.facts[key] in pool[key] for key in pool)
    assert all(o.seen for o in orders("train", 300, 0))
    assert all(p.tags == {"seen": True} for p in make_orders("train", 30, 0))


def test_same_on_every_machine() -> None:
    """Pinned, and equal under another hash seed: nothing may depend on the order of sets or on hash()."""
    code = "from distill.orders import make_orders; print([p.id for p in make_orders('test', 20, 7)])"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == f"{[p.id for p in make_orders('test', 20, 7)]}\n"
    assert (
        orders("train", 1, 0)[0].text
        == "Can you ship 19 ear plugs to Stella in Palermo so that they arrive on Wednesday?"
    )


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert make_orders("test", 90, 3)[:30] == make_orders("test", 30, 3)


def test_chat_and_its_examples() -> None:
    one = make_orders("train", 1, 0)[0]
    assert [m["role"] for m in one.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert one.messages[0]["content"] == SYSTEM
    for message in one.messages[1::2]:
        assert message["content"].startswith("Order: ")
        assert message["content"].endswith("\nJSON:")
    for asked, answer in zip(one.messages[1::2], one.messages[2::2], strict=False):
        facts = json.loads(answer["content"])
        assert list(facts) == ["name", "city", "item", "quantity", "day"]
        assert all(str(facts[key]) in asked["content"] for key in ("name", "city", "item", "day"))
        assert not {facts["name"], facts["city"], facts["item"]} & {v for p in (SEEN, UNSEEN) for k in p for v in p[k]}
    other = load_prompts("orders", "train", 1, 0, system="Answer in French.")[0]
    assert other.messages == [{"role": "system", "content": "Answer in French."}, one.messages[-1]]
    assert other.id != one.id


def test_bad_requests() -> None:
    with pytest.raises(InputError, match=r"no split 'validation': take train or test"):
        make_orders("validation", 3, 0)
    with pytest.raises(InputError, match=r"orders: the generator has no end: give limit="):
        load_prompts("orders", "train")
