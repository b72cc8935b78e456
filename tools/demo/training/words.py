"""The words, names, cities and countries that dialogues are made of, and what is held out of training."""

from __future__ import annotations

# ruff: noqa: SIM905  # lists of words are read and changed as text

HELD_OUT_WORDS = tuple(
    """
    kettle saddle orchid walrus goblet tundra saffron nickel bonfire pumpkin lobster quartz mitten canoe
    thimble parsley falafel magpie turnip zeppelin
    """.split()
)
"""Never in a training dialogue."""

WORDS = tuple(
    """
    apple river stone cloud table candle forest bridge garden window silver copper marble velvet cotton
    pepper ginger butter lemon cherry orange banana walnut almond carrot potato onion garlic tomato
    cabbage tiger lion eagle falcon rabbit turtle dolphin whale panther camel donkey horse zebra monkey
    badger beaver doctor farmer sailor baker painter teacher singer dancer writer soldier captain pilot
    driver miner tailor winter summer spring autumn morning evening midnight sunset shadow thunder
    lightning rainbow breeze storm hammer ladder bucket basket bottle pocket button ribbon blanket
    pillow mirror carpet curtain lantern engine castle village harbor island desert valley mountain
    canyon meadow jungle ocean lagoon glacier volcano cavern piano violin guitar trumpet drum flute
    organ cello banjo harp rhythm melody chorus echo whisper laughter paper pencil letter stamp ticket
    wallet jacket helmet glove scarf boot sandal hat belt cloak armor wheel anchor compass rocket
    satellite magnet crystal diamond emerald ruby pearl amber coral ivory bronze wisdom courage honor
    mercy patience hunger secret promise story riddle puzzle battle victory journey treasure spider
    beetle cricket hornet moth lizard gecko python cobra parrot pigeon sparrow raven heron pelican bread
    cheese honey sugar coffee cocoa noodle pasta soup salad waffle muffin cookie pudding biscuit
    dumpling market palace temple tower tunnel station museum library theater stadium factory kitchen
    cellar attic balcony purple yellow scarlet crimson golden azure indigo maroon olive turquoise violet
    magenta teal beige cobalt
    """.split()
)

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Belgium": "Brussels",
    "Ukraine": "Kyiv",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Nigeria": "Abuja",
    "Morocco": "Rabat",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Argentina": "Buenos Aires",
    "Brazil": "Brasilia",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Russia": "Moscow",
    "Nepal": "Kathmandu",
}
"""A country and its capital."""

CITIES = (
    *sorted(set(CAPITALS.values())),
    *"""
    London Boston Chicago Seattle Denver Toronto Montreal Sydney Melbourne Mumbai Shanghai Osaka Kyoto
    Seoul Manila Jakarta Munich Hamburg Cologne Milan Naples Venice Barcelona Seville Porto Lyon Geneva
    Zurich Prague Cracow Istanbul Dubai Casablanca Lagos Durban Bogota Quito Dallas Miami
    """.split(),
)

HELD_OUT_CITIES = ("Glasgow", "Bremen", "Turin", "Nagoya", "Phoenix", "Malmo", "Granada", "Calgary")
"""Never in a training dialogue."""

NAMES = tuple(
    """
    Ann Bob Carl Dora Emma Fred Gina Hans Ivan Julia Karl Lena Mark Nina Olga Paul Rosa Sam Tina Umar
    Vera Walt Yara Zoe Adam Bella Clara David Ella Felix Greta Hugo Iris Jonas Kim Laura Max Noah Omar
    Petra
    """.split()
)

DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
ORDINALS = tuple("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split())
NUMBERS = tuple("zero one two three four five six seven eight nine ten eleven twelve".split())
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear")
