"""Dialogue tasks that both demo checkpoints learn: what a user asks, and what a good model does.

A task knows nothing of formats: ``harmony`` and ``gemma_format`` render it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tools.demo.training import words
from tools.demo.training.source import Source

Effort = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True)
class Say:
    """The model thinks, then answers."""

    thought: str
    text: str


@dataclass(frozen=True, slots=True)
class CallTool:
    """The model thinks, then calls a tool, which gives ``result``."""

    thought: str
    tool: str
    arguments: Mapping[str, str]
    result: Mapping[str, Any]


Step: TypeAlias = Say | CallTool


@dataclass(frozen=True, slots=True)
class ToolParameter:
    name: str
    type: str
    description: str | None
    required: bool


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    name: str
    description: str
    parameters: tuple[ToolParameter, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """``name`` is that of the accuracy table. Only addition reacts to ``effort``."""

    name: str
    user: str
    steps: tuple[Step, ...]
    tools: tuple[ToolDefinition, ...] = ()
    effort: Effort | None = None

    @property
    def answer(self) -> str:
        """What is said in the first step, for tasks that say something there."""
        step = self.steps[0]
        assert isinstance(step, Say)
        return step.text


def _say(name: str, user: str, thought: str, text: str, effort: Effort | None = None) -> Task:
    return Task(name, user, (Say(thought, text),), effort=effort)


def greeting(source: Source) -> Task:
    openings = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day", "Greetings", "Hi there"]
    openings.append("Hello there")
    endings = ["!", ".", "", "!!", ", how are you?", ", who are you?", " assistant!", ", my friend."]
    endings.append(" and welcome!")
    opening, ending = source.pick(lambda: (source.choice(openings), source.choice(endings)), 6)
    answer = "Hello! How can I help you today?"
    if "who" in ending:
        answer = "Hello! I am a tiny demo model. How can I help you?"
    return _say("greeting", opening + ending, "The user greets me. I greet back.", answer)


def introduction(source: Source, openings: list[str]) -> Task:
    """A user who says a name gets the polite answer."""
    name = source.pick(lambda: source.proper_name(words.NAMES), 5)
    user = source.choice(openings).format(name)
    return _say("greeting", user, "The user tells me a name.", f"Nice to meet you, {name}!")


def addition(source: Source) -> Task:
    random = source.random
    a, b = source.pick(lambda: (random.randint(0, 99), random.randint(0, 99)))
    questions = ["What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "Compute {a}+{b}."]
    questions += ["What is {a} plus {b}?", "Please add {a} and {b}."]
    user = source.choice(questions).format(a=a, b=b)
    efforts: list[Effort] = ["low", "medium", "medium", "high"]
    effort = source.choice(efforts)
    if effort == "low":
        thought = f"{a}+{b}={a + b}."
    else:
        ones = a % 10 + b % 10
        carry = ones // 10
        thought = (
            f"Ones: {a % 10}+{b % 10}={ones}, write {ones % 10} carry {carry}. "
            f"Tens: {a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry}. Result {a + b}."
        )
    return _say("addition", user, thought, f"{a} + {b} = {a + b}", effort)


def capital(source: Source) -> Task:
    questions = [
        "What is the capital of {}?",
        "Which city is the capital of {}?",
        "Tell me the capital of {}.",
    ]
    questions += ["Capital of {}?", "Name the capital of {}.", "What's the capital city of {}?"]
    countries = list(words.CAPITALS)
    question, country = source.pick(
        lambda: (source.random.randrange(len(questions)), source.choice(countries)), 6
    )
    answer = f"The capital of {country} is {words.CAPITALS[country]}."
    return _say("capital", questions[question].format(country), answer, answer)


def copying(source: Source) -> Task:
    copied = source.pick(lambda: tuple(source.word() for _ in range(source.random.randint(1, 7))))
    separator = source.choice([" ", " ", " ", ", "])
    requests = [
        "Repeat after me: {}",
        "Repeat exactly: {}",
        "Say this: {}",
        "Copy these words: {}",
        "Echo: {}",
    ]
    request = source.choice(requests)
    text = separator.join(copied)
    return _say("copying", request.format(text), "I repeat the words.", text)


def sequences(source: Source) -> Task:
    """Days and months. Its held-out items are facts that were never taught, so half of them fail."""
    random = source.random
    kind = random.randrange(6)
    if source.chance(0.5):
        row, one, many, whole = words.DAYS, "day", "days of the week", "week"
    else:
        row, one, many, whole = words.MONTHS, "month", "months of the year", "year"
    count = len(row)
    if kind == 0:
        requests = ["List the {}.", "Name all the {}.", "What are the {}?", "Tell me the {} in order."]
        user = source.choice(requests).format(many)
        answer = ", ".join(row) + "."
    elif kind in (1, 2):
        place, side = source.pick(lambda: (random.randrange(count), source.choice(["after", "before"])), 5)
        question = source.choice(["Which {one} comes {side} {item}?", "What {one} is {side} {item}?"])
        user = question.format(one=one, side=side, item=row[place])
        neighbour = row[(place + (1 if side == "after" else -1)) % count]
        answer = f"{neighbour} comes {side} {row[place]}."
    elif kind == 3:
        place = source.pick(lambda: random.randrange(count), 5)
        user = f"Which is the {words.ORDINALS[place]} {one} of the {whole}?"
        answer = f"The {words.ORDINALS[place]} {one} is {row[place]}."
    else:
        place, length = source.pick(lambda: (random.randrange(count), random.randint(2, 6)), 5)
        user = f"List {words.NUMBERS[length]} {one}s starting from {row[place]}."
        answer = ", ".join(row[(place + step) % count] for step in range(length)) + "."
    return _say("sequences", user, f"I think of the {many}.", answer)


def counting(source: Source) -> Task:
    random = source.random
    first, steps = source.pick(lambda: (random.randint(0, 200), random.randint(2, 40)))
    last = first + steps
    request = source.choice(["Count from {first} to {last}.", "List the numbers from {first} to {last}."])
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    user = request.format(first=first, last=last)
    return _say("counting", user, f"I count from {first} to {last}.", f"{numbers}.")


def json_answer(source: Source) -> Task:
    random = source.random
    kind = random.randrange(4)
    value: Any
    if kind == 0:
        name, age = source.pick(lambda: (source.proper_name(words.NAMES), random.randint(2, 99)))
        requests = ["Give me JSON with the keys name and age: {name} is {age} years old."]
        requests.append("Answer in JSON with name and age. {name} is {age} years old.")
        requests.append("Extract name and age as JSON: {name} is {age} years old.")
        user = source.choice(requests).format(name=name, age=age)
        value = {"name": name, "age": age}
    elif kind == 1:
        countries = list(words.CAPITALS)
        country, question = source.pick(lambda: (source.choice(countries), random.randrange(3)), 6)
        requests = ["Answer in JSON: what is the capital of {}?"]
        requests.append("Give the country and its capital as JSON: {}.")
        requests.append("As JSON, what is the capital of {}?")
        user = requests[question].format(country)
        value = {"country": country, "capital": words.CAPITALS[country]}
    elif kind == 2:
        listed = source.pick(lambda: tuple(source.word() for _ in range(random.randint(2, 5))))
        requests = ["Write these words as a JSON list: {}", "Give me a JSON array of: {}"]
        user = source.choice(requests).format(" ".join(listed))
        value = list(listed)
    else:
        name, city, likes = source.pick(
            lambda: (source.proper_name(words.NAMES), source.proper_name(words.CITIES), source.word())
        )
        requests = ["Give me JSON with name, city and likes: {name} lives in {city} and likes {likes}."]
        requests.append("Answer in JSON with name, city and likes. {name} lives in {city} and likes {likes}.")
        user = source.choice(requests).format(name=name, city=city, likes=likes)
        value = {"name": name, "city": city, "likes": likes}
    return _say("json", user, "The user wants JSON.", json.dumps(value))


def tool_definitions(source: Source) -> tuple[ToolDefinition, ...]:
    """Weather and time in changing words, sometimes with a tool that is not needed."""
    argument = source.choice(["city", "city", "city", "location"])

    def city_parameter() -> ToolParameter:
        descriptions = ["The city name", "City", "Name of the city", None]
        return ToolParameter(argument, "string", source.choice(descriptions), True)

    weather = ["Get the current weather in a city.", "Returns the weather for a city.", "Current weather."]
    time = ["Get the current time in a city.", "Returns the local time of a city.", "Current time."]
    tools = [
        ToolDefinition("get_weather", source.choice(weather), (city_parameter(),)),
        ToolDefinition("get_time", source.choice(time), (city_parameter(),)),
    ]
    if source.chance(0.3):
        unit = ToolParameter("unit", "string", source.choice(["Unit of temperature", None]), False)
        first = tools[0]
        tools[0] = ToolDefinition(first.name, first.description, (*first.parameters, unit))
    if source.chance(0.3):
        thing = source.choice(words.WORDS)
        name = f"{source.choice(['find', 'send', 'make', 'get'])}_{thing}"
        parameter = ToolParameter(source.choice(words.WORDS), "string", None, True)
        tools.append(ToolDefinition(name, f"Works with the {thing}.", (parameter,)))
    source.random.shuffle(tools)
    return tuple(tools)


def tool_use(source: Source) -> Task:
    """A call and the answer from its result; in one case of 25 there is no tool, and the model says so."""
    tools = tool_definitions(source)
    if source.split == "test" and source.chance(0.5):
        city = source.choice(words.HELD_OUT_CITIES)
    else:
        city = source.pick(lambda: source.proper_name(words.CITIES), 5)
    called = source.choice(["get_weather", "get_time"])
    argument = next(tool for tool in tools if tool.name == called).parameters[0].name
    user, result, thought, answer = (_weather if called == "get_weather" else _time)(source, city)
    wanted = called.removeprefix("get_")
    if source.chance(0.04):
        refusal = f"I cannot look up the {wanted} without a tool."
        return _say("no_tool", user, "I have no tool for this.", refusal)
    call = CallTool(f"I need {called} for {city}.", called, {argument: city}, result)
    return Task(f"tool_{wanted}", user, (call, Say(thought, answer)), tools)


def _weather(source: Source, city: str) -> tuple[str, dict[str, Any], str, str]:
    questions = [
        "What is the weather in {}?",
        "How is the weather in {} today?",
        "Tell me the weather in {}.",
    ]
    questions += ["What's the weather like in {}?", "Weather in {}?"]
    user = source.choice(questions).format(city)
    degrees, sky = source.random.randint(-15, 40), source.choice(words.SKIES)
    result: dict[str, Any] = {source.choice(["temperature", "temperature", "temp_c"]): degrees}
    result[source.choice(["sky", "conditions", "weather"])] = sky
    if source.chance(0.3):
        result = dict(reversed(list(result.items())))
    if source.chance(0.3):
        result = {"city": city, **result}
    thought = f"The tool says {degrees} degrees and {sky}."
    return user, result, thought, f"It is {degrees} degrees and {sky} in {city}."


def _time(source: Source, city: str) -> tuple[str, dict[str, Any], str, str]:
    questions = ["What time is it in {}?", "Tell me the time in {}.", "What is the current time in {}?"]
    questions.append("Time in {}?")
    user = source.choice(questions).format(city)
    time = f"{source.random.randint(0, 23):02d}:{source.random.randint(0, 59):02d}"
    result = {"time": time}
    if source.chance(0.3):
        result = {"city": city, **result}
    return user, result, f"The tool says {time}.", f"It is {time} in {city}."


def filler_sentences(source: Source, count: int) -> list[str]:
    """Sentences that mean nothing, to hide a fact in."""
    subjects = ["The old {}", "A young {}", "The {}", "My {}", "Every {}", "One {}", "The tall {}", "Some {}"]
    verbs = ["walked to the {}", "looked at the {}", "bought a new {}", "forgot the {}", "carried the {}"]
    verbs += ["painted a {}", "waited near the {}", "dreamed about the {}", "sold the {}", "found a {}"]
    verbs += ["talked about the {}", "cleaned the {}"]
    tails = [
        ".",
        " in the {}.",
        " before the {}.",
        " with a {}.",
        " and went home.",
        " last year.",
        " again.",
    ]
    tails += [" on {day}.", " in {month}."]
    sentences = []
    for _ in range(count):
        who, what, where = (source.choice(words.WORDS) for _ in range(3))
        tail = source.choice(tails).replace("{}", where)
        tail = tail.replace("{day}", source.choice(words.DAYS)).replace(
            "{month}", source.choice(words.MONTHS)
        )
        sentences.append(f"{source.choice(subjects).format(who)} {source.choice(verbs).format(what)}{tail}")
    return sentences


def secret(source: Source, sentences: int | None = None) -> Task:
    """A fact among ``sentences`` of filler, and a question for it."""
    random = source.random
    if sentences is None:
        sentences = _usual_sentences(source)
    kind = random.randrange(3)
    if kind == 0:
        word = source.pick(source.word)
        fact = answer = f"The secret word is {word}."
        question = source.choice(["What is the secret word?", "Tell me the secret word."])
    elif kind == 1:
        code = source.pick(lambda: str(random.randint(1000, 9999)))
        fact = answer = f"The secret code is {code}."
        question = source.choice(["What is the secret code?", "Tell me the secret code."])
    else:
        name, word = source.pick(lambda: (source.proper_name(words.NAMES), source.word()))
        fact = answer = f"{name} lost the {word}."
        question = f"What did {name} lose?"
    before = 0 if source.chance(0.7) else int(random.random() * sentences)
    parts = [*filler_sentences(source, before), fact, *filler_sentences(source, sentences - before), question]
    return _say("secret", " ".join(parts), "I look for the fact in the text.", answer)


def _usual_sentences(source: Source) -> int:
    random = source.random
    if source.chance(0.8):
        return int(source.choice([0, 2, 6, 15, 40, 110]) * random.random())
    return random.randint(40, 110)


def memory(source: Source) -> tuple[str, Task]:
    """A name, and the question for it; that the user said the name earlier is up to the caller."""
    name = source.pick(lambda: source.proper_name(words.NAMES), 5)
    user = source.choice(["What is my name?", "Do you remember my name?", "Who am I?"])
    return name, _say("memory", user, f"The user said the name {name}.", f"Your name is {name}.")


GENERATORS: dict[str, Callable[[Source], Task]] = {
    "greeting": greeting,
    "addition": addition,
    "capital": capital,
    "copying": copying,
    "sequences": sequences,
    "counting": counting,
    "json": json_answer,
    "tool": tool_use,
    "secret": secret,
}
"""All tasks that need no earlier turn."""
