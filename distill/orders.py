"""The demo's own domain: seeded order texts in English, to be turned into one line of JSON each.

Train and test never share an order, whatever their seeds and counts: which of the two an order belongs to is decided by
a hash of its facts. Every third test order uses only names, items and cities that training never sees.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from distill.prompts import Prompt, prompt
from pairing.errors import InputError

SYSTEM = "Turn the order into JSON."
USER = "Order: {text}\nJSON:"
# Shown as turns of the chat. In the system message instead, a 135M target answers in one line for half of the orders
# only; with one example it copies that one's name and city too often (docs/notebook.md, issue 2).
EXAMPLES = (
    (
        "Hello, Tom from Zurich here. Two dozen red pens by Sunday please.",
        '{"name": "Tom", "city": "Zurich", "item": "red pens", "quantity": 24, "day": "Sunday"}',
    ),
    (
        "Can you ship 7 brass bells to Eva in Turin so that they arrive on Monday?",
        '{"name": "Eva", "city": "Turin", "item": "brass bells", "quantity": 7, "day": "Monday"}',
    ),
)
TEST_SHARE = 5  # one order in five is kept for the test split


def _pool(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


# What EXAMPLES name is in no pool, and UNSEEN shares no word with SEEN. The pools that train are wide on purpose: from
# a few dozen names a drafter learns the names; from many it learns to copy.
SEEN = {
    "name": _pool(
        "Anna, Ben, Carla, David, Elena, Frank, Grace, Henry, Iris, Jack, Karen, Liam, Maria, Noah, Olga, Paul, Rosa, "
        "Sam, Tina, Victor, Wendy, Peter, Julia, Martin, Sofia, Daniel, Laura, Simon, Clara, Oscar, Nina, Robert, "
        "Adam, Amy, Andrew, Arthur, Bella, Brian, Charles, Chloe, Colin, Daisy, Dennis, Edward, Elise, Eric, Fiona, "
        "Gavin, Gloria, Harold, Ivan, Jane, Jason, Joan, Keith, Kelly, Leo, Lily, Louis, Lucy, Mark, Mary, Megan, "
        "Nathan, Nora, Owen, Patrick, Philip, Rachel, Ralph, Rita, Roger, Ruth, Sean, Stella, Steven, Susan, Teresa, "
        "Thomas, Vera, Walter, Zoe, Ahmed, Aisha, Chen, Fatima, Hiro, Ines, Jamal, Kofi, Lena, Mei, Omar, Priya, Ravi, "
        "Sven, Yuki"
    ),
    "city": _pool(
        "Berlin, Paris, Madrid, Rome, Vienna, Oslo, Dublin, Lisbon, Prague, Warsaw, Boston, Denver, London, Chicago, "
        "Munich, Milan, Geneva, Seattle, Athens, Dallas, Hamburg, Toronto, Brussels, Helsinki, Amsterdam, Antwerp, "
        "Austin, Basel, Belfast, Bergen, Bristol, Cairo, Calgary, Cardiff, Cologne, Copenhagen, Delhi, Detroit, Dresden, "
        "Edinburgh, Florence, Frankfurt, Graz, Istanbul, Leeds, Leipzig, Lima, Liverpool, Manchester, Marseille, "
        "Melbourne, Miami, Montreal, Naples, Nice, Osaka, Ottawa, Palermo, Portland, Quebec, Riga, Rotterdam, Salzburg, "
        "Seville, Tokyo, Valencia, Vancouver, Venice, Verona, York"
    ),
    "item": _pool(
        "blue mugs, desk lamps, wool socks, garden chairs, water bottles, notebooks, phone cases, coffee filters, "
        "bath towels, picture frames, running shoes, kitchen knives, paper cups, office folders, leather belts, "
        "wooden spoons, black shirts, door mats, candles, tea pots, bed sheets, key rings, rain coats, screws, "
        "alarm clocks, apple boxes, baking trays, bicycle pumps, brown envelopes, camping stoves, cotton gloves, "
        "dinner plates, dog collars, drawing pads, ear plugs, fishing rods, glass jars, hair brushes, hand creams, "
        "hiking boots, ink cartridges, jeans, lunch boxes, mouse pads, nails, olive oils, orange crates, paint brushes, "
        "pencils, pink ribbons, plant pots, puzzle games, radios, rubber bands, school bags, shower curtains, silver "
        "rings, steel hooks, sun hats, tennis balls, toy trains, travel maps, umbrella stands, violin strings, wall "
        "mirrors, white candlesticks, wine openers, work trousers, writing desks, yoga blocks"
    ),
}
UNSEEN = {
    "name": _pool("Alice, George, Emma, Lucas, Helen, Felix, Monica, Bruno, Diana, Hugo, Sarah, Kevin"),
    "city": _pool("Stockholm, Budapest, Houston, Lyon, Krakow, Atlanta, Porto, Sydney, Phoenix, Glasgow"),
    "item": _pool(
        "green scarves, metal shelves, soup bowls, pillows, winter jackets, table cloths, hammers, laptop sleeves, "
        "flower vases, yellow parasols"
    ),
}
DAYS = _pool("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")

TEMPLATES = (
    "{hello}this is {name} from {city}. {please}send me {quantity} {item} by {day}{end}",
    "{hello}{name} here. I'd like to order {quantity} {item}, delivered to {city} on {day}{end}",
    "Order for {name}: {quantity} {item}, ship to {city}, needed {day}.",
    "{hello}could you deliver {quantity} {item} to {city} for {name}? {day} would be great.",
    "{name}, {city}: {quantity} {item} for {day}{end}",
    "{hello}I need {quantity} {item} in {city} by {day}. My name is {name}.",
    "By {day} I need {quantity} {item}{end} {name}, {city}",
    "{please}put {quantity} {item} on the list for {name} in {city}, to arrive on {day}.",
    "{hello}we are out of {item}. {please}bring {quantity} to {city} on {day}, and ask for {name}.",
    "{hello}my name is {name} and I live in {city}. Can I get {quantity} {item} before {day}?",
    "New order, {quantity} {item}. Customer: {name}. City: {city}. Day: {day}.",
    "{city} office, {name} speaking. {quantity_first} {item}, {day} at the latest{end}",
    "{name} wants {quantity} {item} sent to {city}. It has to be there on {day}.",
    "{hello}{please}book {quantity} {item} for {day}. Deliver to {name} in {city}.",
    "Can you ship {quantity} {item} to {name} in {city} so that they arrive on {day}?",
    "{hello}it's {name}. Same as last time, {quantity} {item}, but to {city} and on {day}{end}",
    "For {day}: {quantity} {item}. Address: {city}, name: {name}.",
    "{hello}{name} from {city} again. I would like {quantity} {item}, if {day} is possible.",
    "We need {item} in {city}, {quantity} of them, on {day}. Contact: {name}.",
    "{please}reserve {quantity} {item}. {name} will pick them up in {city} on {day}.",
    "{hello}I'm {name}. {please}deliver to {city} on {day}: {quantity} {item}.",
    "{quantity_first} {item} to {city}, {please_inside}by {day}. Thanks, {name}",
    "This {day} our shop in {city} needs {quantity} {item}. Regards, {name}",
    "{hello}a quick order from {city}: {quantity} {item}, {day}, on the name of {name}{end}",
)
HELLOS = ("", "", "Hello, ", "Hi, ", "Good morning, ", "Dear team, ", "Hey there, ")
PLEASES = ("please ", "please ", "kindly ", "could you ", "")
ENDS = (
    ".",
    ".",
    ", please.",
    ". Thank you!",
    ", thanks.",
    ". No hurry.",
    ". It is for a party.",
    ". Cash on delivery.",
)


@dataclass(frozen=True)
class Order:
    text: str
    facts: dict[str, Any]  # name, city, item, quantity (int), day
    seen: bool  # made from the pools that training uses


def orders(split: str, count: int, seed: int) -> list[Order]:
    """`count` different orders of `split` ("train" or "test"); the same on every machine.

    In "test", the orders at positions 2, 5, 8, … (a third) use the unseen pools. Raises InputError for another split.
    """
    if split not in ("train", "test"):
        raise InputError(f"orders has no split {split!r}: take train or test")
    rng = random.Random(f"draftsmith orders {split} {seed}")
    made: dict[str, Order] = {}
    while len(made) < count:
        seen = split == "train" or len(made) % 3 != 2
        pools = SEEN if seen else UNSEEN
        facts: dict[str, Any] = {key: rng.choice(pools[key]) for key in ("name", "city", "item")}
        facts |= {"quantity": rng.randint(2, 60), "day": rng.choice(DAYS)}
        text = _phrase(rng, facts)
        # whole facts are kept for one split, so a test order is not a reworded train order either
        if (split == "test") == _kept_for_test(facts) and text not in made:
            made[text] = Order(text, facts, seen)
    return list(made.values())


def make_orders(split: str, count: int, seed: int, system: str | None = None) -> list[Prompt]:
    """`orders` as chats: instruction, two answered examples, the order. tags: {"seen": …}.

    A `system` message of the user's own replaces instruction and examples.
    """
    if system is None:
        first = [{"role": "system", "content": SYSTEM}]
        for text, answer in EXAMPLES:
            first += [{"role": "user", "content": USER.format(text=text)}, {"role": "assistant", "content": answer}]
    else:
        first = [{"role": "system", "content": system}]
    return [
        prompt([*first, {"role": "user", "content": USER.format(text=order.text)}], {"seen": order.seen})
        for order in orders(split, count, seed)
    ]


def _kept_for_test(facts: dict[str, Any]) -> bool:
    key = "|".join(str(facts[k]) for k in ("name", "city", "item", "quantity", "day"))
    return hashlib.sha256(key.encode()).digest()[0] % TEST_SHARE == 0


def _phrase(rng: random.Random, facts: dict[str, Any]) -> str:
    quantity = _spoken(facts["quantity"]) if rng.random() < 0.3 else str(facts["quantity"])
    words = {
        "hello": rng.choice(HELLOS),
        "please": rng.choice(PLEASES),
        "please_inside": rng.choice(("", "please ", "if possible ")),
        "end": rng.choice(ENDS),
        "quantity": quantity,
        "quantity_first": quantity[0].upper() + quantity[1:],
    }
    template = rng.choice(TEMPLATES)
    text = template.format(**{**facts, **words})
    if words["please"] == "could you " and "{please}" in template:
        text = _as_question(text)
    return _sentence_case(text)


def _as_question(text: str) -> str:
    """The sentence that begins with "could you" ends with a question mark."""
    at = text.index("could you ")
    stop = text.find(". ", at)
    stop = len(text) - 1 if stop < 0 else stop
    return text[:stop] + "?" + text[stop + 1 :] if text[stop] == "." else text


def _sentence_case(text: str) -> str:
    """Capitals at the start and after a full stop, where an optional word was left out or put in."""
    out = text[0].upper() + text[1:]
    for i in range(2, len(out)):
        if out[i - 2 : i] in (". ", "? ", "! ") and out[i].islower():
            out = out[:i] + out[i].upper() + out[i + 1 :]
    return out


ONES = _pool(
    "zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, "
    "sixteen, seventeen, eighteen, nineteen"
)
TENS = _pool("-, -, twenty, thirty, forty, fifty, sixty")
DOZENS = {12: "a dozen", 24: "two dozen", 36: "three dozen", 48: "four dozen"}


def _spoken(number: int) -> str:
    if number in DOZENS:
        return DOZENS[number]
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + ("-" + ONES[number % 10] if number % 10 else "")
