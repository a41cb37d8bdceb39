"""Fixed words and sentence patterns that values are made of; `{slot}` stands for a fresh draw."""

from __future__ import annotations

UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
MARKS = "!#$%&()*+,-./:;<=>?@[]^_`{|}~\\\"'"
EXTENSIONS = "txt csv md py json pdf log html yaml toml xml js ts go rs c png jpg sh ini".split()
TOP_DOMAINS = "com com com org net io de fr co.uk dev edu".split()
DIRECTORIES = "src tmp home data docs etc var usr lib logs tests build config app assets".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
CURRENCIES = "USD EUR GBP JPY CHF CAD AUD CNY INR SEK NOK DKK PLN CZK BRL MXN KRW SGD ZAR".split()
SAID_CURRENCY = {
    "dollars": "USD", "US dollars": "USD", "euros": "EUR", "euro": "EUR", "pounds": "GBP",
    "yen": "JPY", "francs": "CHF", "rupees": "INR",
}  # fmt: skip
LANGUAGES = (
    "French German Spanish Italian Portuguese Dutch Swedish Norwegian Danish Finnish Polish Czech "
    "Russian Greek Turkish Arabic Hebrew Hindi Chinese Japanese Korean Thai Vietnamese Latin "
    "English Irish Welsh Romanian Hungarian Ukrainian"
).split()
UNITS = (
    "km miles meters feet inches cm mm kg pounds grams ounces liters gallons hours minutes "
    "seconds days celsius fahrenheit kelvin yards tons"
).split()
COUNTRIES = (
    "France Germany Spain Italy Portugal Norway Sweden Denmark Finland Poland Austria Switzerland "
    "Ireland England Scotland Greece Turkey Egypt Morocco Kenya Nigeria India China Japan Korea "
    "Thailand Vietnam Indonesia Australia Canada Mexico Brazil Argentina Chile Peru Colombia USA "
    "UK Texas California Florida Ohio Bavaria Ontario"
).split()
SAID_SYMBOL = {
    "Tesla": "TSLA", "Apple": "AAPL", "Microsoft": "MSFT", "Google": "GOOG", "Amazon": "AMZN",
    "Nvidia": "NVDA", "Netflix": "NFLX", "Intel": "INTC", "IBM": "IBM", "Meta": "META",
    "Oracle": "ORCL", "Disney": "DIS", "Nike": "NKE",
}  # fmt: skip
HERE = ("the current directory", "this directory", "the current folder", "this folder", "here")
OCCASIONS = (
    "dentist appointment|doctor appointment|team meeting|staff meeting|meeting with {name}|"
    "lunch with {name}|dinner with {name}|call with {name}|phone call|haircut|birthday party|"
    "job interview|{w} appointment|{w} meeting|{w} party|{w} class|{w} with {name}|{w} {w}|{w}|"
    "video call with {person}|{w} review|project meeting|yoga class|visit to {c}|trip to {c}"
).split("|")
FOODS = (
    "pizza|pizza|burger|salad|soup|pasta|cheese|mushrooms|onions|bacon|olives|coffee|tea|sandwich|"
    "sushi|rice|curry|steak|cake|ice cream|fries|chicken soup|tomato soup|lasagna|noodles|{w}|{w}|"
    "{w} pizza|{w} salad|{w} soup|{w} {w}|fish and chips|apple pie|pancakes|tacos|bread|eggs|ham"
).split("|")
SYMBOLS = (
    "AAPL MSFT GOOG AMZN TSLA NVDA META NFLX IBM INTC AMD ORCL SAP BMW KO PEP DIS NKE V MA".split()
)
ROOMS = "kitchen bedroom bathroom office garage hall garden living_room basement attic".split()
SKY = "sunny,cloudy,rainy,snowy,windy,foggy,clear,stormy,partly cloudy,light rain,fog".split(",")
PLURALS = (
    "restaurants cafes museums hotels parks bars shops pharmacies hospitals banks cinemas "
    "bakeries gyms schools libraries theaters beaches bookstores"
).split()
SHIP_STATES = ["shipped", "delivered", "processing", "in transit", "cancelled", "on its way"]
TZ_OF = {
    "London": "Europe/London", "Paris": "Europe/Paris", "Berlin": "Europe/Berlin",
    "Madrid": "Europe/Madrid", "Rome": "Europe/Rome", "Vienna": "Europe/Vienna",
    "Amsterdam": "Europe/Amsterdam", "Stockholm": "Europe/Stockholm", "Lisbon": "Europe/Lisbon",
    "Dublin": "Europe/Dublin", "Athens": "Europe/Athens", "Moscow": "Europe/Moscow",
    "Istanbul": "Europe/Istanbul", "Warsaw": "Europe/Warsaw", "Zurich": "Europe/Zurich",
    "Tokyo": "Asia/Tokyo", "Seoul": "Asia/Seoul", "Shanghai": "Asia/Shanghai",
    "Singapore": "Asia/Singapore", "Dubai": "Asia/Dubai", "Hong Kong": "Asia/Hong_Kong",
    "Bangkok": "Asia/Bangkok", "New York": "America/New_York", "Chicago": "America/Chicago",
    "Denver": "America/Denver", "Los Angeles": "America/Los_Angeles",
    "Toronto": "America/Toronto", "Sydney": "Australia/Sydney", "Cairo": "Africa/Cairo",
    "Nairobi": "Africa/Nairobi", "Lagos": "Africa/Lagos", "Auckland": "Pacific/Auckland",
}  # fmt: skip
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
OPERATORS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "x": "*"}
COMMANDS = (
    "ls|ls -la|pwd|whoami|git status|git log|df -h|ps aux|date|uname -a|python --version|make test|"
    "npm install|pip list|docker ps|cat {p}|rm {p}|mkdir {w}|cd {d}|python {w}.py|echo {w}|"
    "grep {w} {p}|git commit -m {w}|git checkout {w}|touch {p}|tail -n {n} {p}|head -{n} {p}|"
    "find . -name {w}|kill {n}|ping {w}.com|curl https://{w}.org|chmod +x {w}.sh|pytest -q|"
    "cargo build|node {w}.js|wc -l {p}|ls {d}|cp {p} {d}|mv {p} {d}|./{w}|docker run {w}|man {w}"
).split("|")
QUERIES = (
    "{w}|{w} {w}|{w} {w} {w}|best {w} in {c}|{c} {w}|{w} tutorial|history of {w}|latest {w} news|"
    "how to {v} a {w}|{person}|{person} {w}|{w} price|{w} vs {w}|cheap {w} near {c}|python {w}|"
    "{w} documentation|who invented the {w}|{w} recipes|{c} restaurants|{w} {y}|why is {w} {w}|"
    "the {w} of {c}|what is {w}|{w} for beginners|population of {c}|open source {w}"
).split("|")
TOPICS = "{w}|{w} {w}|the {w}|{c}|{person}|history of {c}|{w} in {c}|the {w} of {w}".split("|")
SENTENCES = (
    "the {w} is {w}|I will be late|see you at {t}|meet {name} at {t}|call {name}|lunch at {t}|"
    "buy {w} and {w}|the {w} is ready|please send the {w}|thanks for the {w}|hello|hello world|"
    "hi {name}|good morning|happy birthday|we need {n} {w}|{w} {w}|{w} {w} {w}|{w} {w} {w} {w}|"
    "the {w} of {c} is {w}|can we meet on {day}?|how are you?|I am in {c}|{n} {w} for {name}|"
    "the meeting is at {t}|do not forget the {w}|where is the {w}?|ok|yes|no|it works!|"
    "dinner on {day}|the code is {k}|I like {w}|{name} and {name} are here|my {w} is {w}|{w}|"
    "the {w} failed with {n} errors|please {v} the {w}|we {v} the {w} on {day}|see {u}|let's {v}|"
    "I can't {v} it|{w}, {w} and {w}|{name}'s {w}|the price is {m}|{w}: {w}"
).split("|")
TASKS = (
    "buy {w}|call {name}|{v} the {w}|send the {w} to {name}|pick up the {w}|water the {w}|"
    "pay the {w}|meet {name}|write to {name}|{v} {w}|clean the {w}|go to {c}|take the {w}|"
    "feed the {w}|book the {w}|finish the {w}|read {w}|check the {w}|walk the {w}|{v} {n} {w}"
).split("|")
TITLES = (
    "{W}|{W} {w}|{W} {W}|{w} {w}|The {W}|{w} with {name}|{name}'s {w}|{w}|team {w}|{W} of {c}|"
    "{W} review|lunch with {name}|{W} and {W}|{c} {w}|{w} meeting|{W} {n}|{w} update"
).split("|")
SCENES = (
    "a {w}|a {w} on a {w}|a {w} {w}|a red {w}|the {w} of {c}|{c} at night|two {w} and a {w}|"
    "a {w} in the {w}|a {w} with a {w}"
).split("|")
SQL = (
    "SELECT * FROM {i}|SELECT {i} FROM {i}|SELECT COUNT(*) FROM {i}|SELECT {i}, {i} FROM {i}|"
    "SELECT * FROM {i} WHERE {i} = {n}|SELECT {i} FROM {i} WHERE {i} > {n}|SHOW TABLES|"
    "DELETE FROM {i} WHERE id = {n}|SELECT * FROM {i} LIMIT {n}|SELECT * FROM {i} ORDER BY {i}"
).split("|")
PYCODE = (
    "print({n})|print({n} + {n})|{n} * {n}|print('{w}')|len('{w}')|sum([{n}, {n}])|import {i}|"
    "{i} = {n}|print({i})|max({n}, {n})|{i}({n})|for i in range({n}): print(i)"
).split("|")
ACCENTED = "éèêëàâäáãåçñöôóòõøüûúùïîíìßæœÉÄÖÜÑłśżčřšžğıąęёйцукенгшщзхъфывапролджэячсмитьбюαβγδελπσω"

# slot of a pattern -> method of Values
SLOTS = {
    "w": "word", "W": "capital", "v": "verb", "c": "city", "name": "given", "person": "person",
    "n": "small", "t": "time", "day": "weekday", "k": "code", "u": "url", "m": "money", "y": "year",
    "p": "path", "d": "dirpath", "i": "identifier", "date": "date", "clock": "clock",
}  # fmt: skip
