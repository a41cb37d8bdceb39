"""Values of arguments and results, and how people say them.

A kind is a name such as `place` or `money`; `Values.make(kind)` gives the JSON value and the words
that stand for it in the user's text. They differ only where people do not write the value itself
(`12 times 3` for `12 * 3`, `dollars` for `USD`).
"""

from __future__ import annotations

from typing import Any

from training.dialogues.lexicon import Lexicon, Rng

Said = tuple[Any, str]

_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "0123456789"
_MARKS = "!#$%&()*+,-./:;<=>?@[]^_`{|}~\\\"'"
_EXTENSIONS = "txt csv md py json pdf log html yaml toml xml js ts go rs c png jpg sh ini".split()
_TOP_DOMAINS = "com com com org net io de fr co.uk dev edu".split()
_DIRECTORIES = "src tmp home data docs etc var usr lib logs tests build config app assets".split()
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = (
    "January February March April May June July August September October November December".split()
)
_CURRENCIES = "USD EUR GBP JPY CHF CAD AUD CNY INR SEK NOK DKK PLN CZK BRL MXN KRW SGD ZAR".split()
_SAID_CURRENCY = {
    "dollars": "USD", "US dollars": "USD", "euros": "EUR", "euro": "EUR", "pounds": "GBP",
    "yen": "JPY", "francs": "CHF", "rupees": "INR",
}  # fmt: skip
_LANGUAGES = (
    "French German Spanish Italian Portuguese Dutch Swedish Norwegian Danish Finnish Polish Czech "
    "Russian Greek Turkish Arabic Hebrew Hindi Chinese Japanese Korean Thai Vietnamese Latin "
    "English Irish Welsh Romanian Hungarian Ukrainian"
).split()
_UNITS = (
    "km miles meters feet inches cm mm kg pounds grams ounces liters gallons hours minutes "
    "seconds days celsius fahrenheit kelvin yards tons"
).split()
_COUNTRIES = (
    "France Germany Spain Italy Portugal Norway Sweden Denmark Finland Poland Austria Switzerland "
    "Ireland England Scotland Greece Turkey Egypt Morocco Kenya Nigeria India China Japan Korea "
    "Thailand Vietnam Indonesia Australia Canada Mexico Brazil Argentina Chile Peru Colombia USA "
    "UK Texas California Florida Ohio Bavaria Ontario"
).split()
_SYMBOLS = (
    "AAPL MSFT GOOG AMZN TSLA NVDA META NFLX IBM INTC AMD ORCL SAP BMW KO PEP DIS NKE V MA".split()
)
_ROOMS = "kitchen bedroom bathroom office garage hall garden living_room basement attic".split()
_SKY = "sunny,cloudy,rainy,snowy,windy,foggy,clear,stormy,partly cloudy,light rain,fog".split(",")
_PLURALS = (
    "restaurants cafes museums hotels parks bars shops pharmacies hospitals banks cinemas "
    "bakeries gyms schools libraries theaters beaches bookstores"
).split()
_SHIP_STATES = ["shipped", "delivered", "processing", "in transit", "cancelled", "on its way"]
_TZ_OF = {
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
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "x": "*"}
_COMMANDS = (
    "ls|ls -la|pwd|whoami|git status|git log|df -h|ps aux|date|uname -a|python --version|make test|"
    "npm install|pip list|docker ps|cat {p}|rm {p}|mkdir {w}|cd {d}|python {w}.py|echo {w}|"
    "grep {w} {p}|git commit -m {w}|git checkout {w}|touch {p}|tail -n {n} {p}|head -{n} {p}|"
    "find . -name {w}|kill {n}|ping {w}.com|curl https://{w}.org|chmod +x {w}.sh|pytest -q|"
    "cargo build|node {w}.js|wc -l {p}|ls {d}|cp {p} {d}|mv {p} {d}|./{w}|docker run {w}|man {w}"
).split("|")
_QUERIES = (
    "{w}|{w} {w}|{w} {w} {w}|best {w} in {c}|{c} {w}|{w} tutorial|history of {w}|latest {w} news|"
    "how to {v} a {w}|{person}|{person} {w}|{w} price|{w} vs {w}|cheap {w} near {c}|python {w}|"
    "{w} documentation|who invented the {w}|{w} recipes|{c} restaurants|{w} {y}|why is {w} {w}|"
    "the {w} of {c}|what is {w}|{w} for beginners|population of {c}|open source {w}"
).split("|")
_TOPICS = "{w}|{w} {w}|the {w}|{c}|{person}|history of {c}|{w} in {c}|the {w} of {w}".split("|")
_SENTENCES = (
    "the {w} is {w}|I will be late|see you at {t}|meet {name} at {t}|call {name}|lunch at {t}|"
    "buy {w} and {w}|the {w} is ready|please send the {w}|thanks for the {w}|hello|hello world|"
    "hi {name}|good morning|happy birthday|we need {n} {w}|{w} {w}|{w} {w} {w}|{w} {w} {w} {w}|"
    "the {w} of {c} is {w}|can we meet on {day}?|how are you?|I am in {c}|{n} {w} for {name}|"
    "the meeting is at {t}|do not forget the {w}|where is the {w}?|ok|yes|no|it works!|"
    "dinner on {day}|the code is {k}|I like {w}|{name} and {name} are here|my {w} is {w}|{w}|"
    "the {w} failed with {n} errors|please {v} the {w}|we {v} the {w} on {day}|see {u}|let's {v}|"
    "I can't {v} it|{w}, {w} and {w}|{name}'s {w}|the price is {m}|{w}: {w}"
).split("|")
_TASKS = (
    "buy {w}|call {name}|{v} the {w}|send the {w} to {name}|pick up the {w}|water the {w}|"
    "pay the {w}|meet {name}|write to {name}|{v} {w}|clean the {w}|go to {c}|take the {w}|"
    "feed the {w}|book the {w}|finish the {w}|read {w}|check the {w}|walk the {w}|{v} {n} {w}"
).split("|")
_TITLES = (
    "{W}|{W} {w}|{W} {W}|{w} {w}|The {W}|{w} with {name}|{name}'s {w}|{w}|team {w}|{W} of {c}|"
    "{W} review|lunch with {name}|{W} and {W}|{c} {w}|{w} meeting|{W} {n}|{w} update"
).split("|")
_SCENES = (
    "a {w}|a {w} on a {w}|a {w} {w}|a red {w}|the {w} of {c}|{c} at night|two {w} and a {w}|"
    "a {w} in the {w}|a {w} with a {w}"
).split("|")
_SQL = (
    "SELECT * FROM {i}|SELECT {i} FROM {i}|SELECT COUNT(*) FROM {i}|SELECT {i}, {i} FROM {i}|"
    "SELECT * FROM {i} WHERE {i} = {n}|SELECT {i} FROM {i} WHERE {i} > {n}|SHOW TABLES|"
    "DELETE FROM {i} WHERE id = {n}|SELECT * FROM {i} LIMIT {n}|SELECT * FROM {i} ORDER BY {i}"
).split("|")
_PYCODE = (
    "print({n})|print({n} + {n})|{n} * {n}|print('{w}')|len('{w}')|sum([{n}, {n}])|import {i}|"
    "{i} = {n}|print({i})|max({n}, {n})|{i}({n})|for i in range({n}): print(i)"
).split("|")
_ACCENTED = (
    "éèêëàâäáãåçñöôóòõøüûúùïîíìßæœÉÄÖÜÑłśżčřšžğıąęёйцукенгшщзхъфывапролджэячсмитьбюαβγδελπσω"
)


class Values:
    """Draws values of one dialogue.

    Args:
        rng: source of all randomness.
        lex: word pools of the split.
    """

    def __init__(self, rng: Rng, lex: Lexicon) -> None:
        self.r, self.lex = rng, lex

    def make(self, kind: str) -> Said:
        """A JSON value of the kind and the words a user says for it."""
        made = getattr(self, kind)()
        if isinstance(made, tuple):
            return made
        if made is True or made is False:
            return made, "true" if made else "false"
        return made, str(made)

    def fill(self, pattern: str) -> str:
        """Replace the {letter} slots of a pattern, each by a fresh draw."""
        if "{" not in pattern:
            return pattern
        out, rest = [], pattern
        while True:
            head, brace, tail = rest.partition("{")
            out.append(head)
            if not brace:
                return "".join(out)
            slot, _, rest = tail.partition("}")
            out.append(str(getattr(self, _SLOTS[slot])()))

    # ---- words
    def word(self) -> str:
        return self.lex.word(self.r)

    def capital(self) -> str:
        word = self.word()
        return word[0].upper() + word[1:]

    def verb(self) -> str:
        return self.r.pick(self.lex.verbs)

    def identifier(self) -> str:
        r = self.r
        a, x = self.word(), r.random()
        if x < 0.4:
            return a
        if x < 0.75:
            return f"{a}_{self.word()}"
        return a + self.capital()

    def phrase(self) -> str:
        return " ".join(self.word() for _ in range(self.r.pick((1, 2, 2, 2, 3, 3, 4, 6))))

    def exotic(self) -> str:
        """A word outside ASCII, copied byte by byte."""
        r, x = self.r, self.r.random()
        if x < 0.4:
            w = self.word()
            at = r.whole(0, len(w))
            return w[:at] + r.pick(_ACCENTED) + w[at:]
        if x < 0.5:
            return "".join(r.pick(_ACCENTED) for _ in range(r.whole(2, 6)))
        if x < 0.6:
            return "".join(chr(r.whole(0x4E00, 0x9FA5)) for _ in range(r.whole(1, 4)))
        if x < 0.68:
            return chr(r.whole(0x1F300, 0x1F64F))
        return "".join(
            chr(r.pick((r.whole(0xA1, 0x377), r.whole(0x386, 0x7FF), r.whole(0x900, 0xD7A3),
                        r.whole(0xE000, 0xFFEF), r.whole(0x10000, 0x10FFFF))))
            for _ in range(r.whole(1, 5))
        )  # fmt: skip

    def tangle(self) -> str:
        """Characters in no order, as in passwords and patterns; no blank at either end."""
        r = self.r
        marks = "".join(
            r.pick(_MARKS) if r.chance(0.7) else r.pick(_UPPER) for _ in range(r.whole(1, 4))
        )
        return r.pick((f"{self.word()}{marks}{self.word()}", marks, f"{marks}{self.word()}"))

    def pieces(self) -> str:
        """Tokens of the vocabulary as words, all equally likely."""
        pool = self.lex.pieces
        if not pool:
            return self.phrase()
        words = [self.r.pick(pool) for _ in range(self.r.whole(2, 6))]
        return self.r.pick((" ", " ", " ", "-", "_", ".")).join(words)

    # ---- people, places
    def given(self) -> str:
        if self.r.chance(0.15):
            return self.capitalised_coin()
        return self.r.pick(self.lex.names)

    def capitalised_coin(self) -> str:
        word = self.word() if self.lex.held else self.lex.coin(self.r)
        return word[0].upper() + word[1:]

    def person(self) -> str:
        if self.r.chance(0.55):
            return self.given()
        last = self.r.pick(self.lex.surnames) if self.r.chance(0.85) else self.capitalised_coin()
        return f"{self.given()} {last}"

    def city(self) -> str:
        return self.r.pick(self.lex.cities) if self.r.chance(0.75) else self.capitalised_coin()

    def place(self) -> str:
        r, x = self.r, self.r.random()
        if x < 0.55:
            return self.city()
        if x < 0.78:
            return r.pick(self.lex.places) if self.lex.places else f"{self.city()} {self.city()}"
        if x < 0.86:
            return f"{self.capitalised_coin()} {self.capitalised_coin()}"
        if x < 0.91:
            return f"{self.city()}, {r.pick(_UPPER)}{r.pick(_UPPER)}"
        if x < 0.96:
            region = self.city() if self.lex.held or r.chance(0.4) else r.pick(_COUNTRIES)
            return f"{self.city()}, {region}"
        if x < 0.98:
            return self.city().lower()
        return self.exotic()

    def tz(self) -> Said:
        if self.r.chance(0.45):
            said = self.r.pick(tuple(_TZ_OF))
            return _TZ_OF[said], said
        if self.r.chance(0.5):
            zone = self.r.pick(tuple(_TZ_OF.values()))
            return zone, zone
        zone = f"{self.r.pick(('Europe', 'Asia', 'America', 'Africa'))}/{self.city()}"
        return zone, zone

    def room(self) -> Said:
        room = self.r.pick(_ROOMS) if self.r.chance(0.7) else self.word()
        room = room.replace("_", " ")
        return room, room

    def email(self) -> str:
        r = self.r
        if r.chance(0.5):
            user = self.given().lower()
        else:
            user = f"{self.given().lower()}{r.pick(('.', '_', ''))}{self.word()}"
        if r.chance(0.1):
            user += str(r.whole(1, 99))
        host = (
            self.word()
            if self.lex.held or r.chance(0.85)
            else r.pick(("example", "mail", "test", "company"))
        )
        return f"{user}@{host}.{r.pick(_TOP_DOMAINS)}"

    def phone(self) -> str:
        r = self.r
        return r.pick(("+", "")) + "-".join(
            "".join(r.pick(_DIGITS) for _ in range(n)) for n in r.pick(((3, 4), (2, 3, 4), (7,)))
        )

    # ---- numbers
    def integer(self) -> int:
        r, x = self.r, self.r.random()
        if x < 0.3:
            v = r.whole(0, 20)
        elif x < 0.75:
            v = r.whole(10, 999)
        elif x < 0.97:
            v = r.whole(1000, 9_999_999)
        else:
            v = r.whole(10**9, 10**15)
        return -v if v and r.chance(0.05) else v

    def number(self) -> int | float:
        r = self.r
        if r.chance(0.25):
            return self.integer()
        places = r.pick((1, 1, 2, 2, 3))
        v = float(f"{r.random() * r.pick((1, 10, 100, 1000)):.{places}f}")
        if v == int(v):
            v += 0.5
        return -v if r.chance(0.06) else v

    def calc_num(self) -> int | float:
        r, x = self.r, self.r.random()
        if x < 0.5:
            return r.whole(0, 99)
        if x < 0.8:
            return r.whole(100, 9999)
        return self.number()

    def money(self) -> int | float:
        r = self.r
        if r.chance(0.65):
            return r.pick((r.whole(1, 99), r.whole(1, 100) * 10, r.whole(1, 9999)))
        return r.whole(1, 900) + r.whole(1, 9) / 10 if r.chance(0.5) else self._cents()

    def _cents(self) -> float:
        return float(f"{self.r.whole(0, 900)}.{self.r.whole(0, 9)}{self.r.whole(1, 9)}")

    def int_small(self) -> Said:
        v = self.r.whole(1, 12)
        return v, _NUMBER_WORDS[v] if self.r.chance(0.2) else str(v)

    def int_minutes(self) -> Said:
        v = self.r.pick((1, 2, 3, 5, 10, 15, 20, 25, 30, 45, 60, 90, self.r.whole(1, 120)))
        return v, _NUMBER_WORDS[v] if v < 13 and self.r.chance(0.25) else str(v)

    def small(self) -> int:
        return self.r.whole(0, 60)

    def temp_num(self) -> int | float:
        return self.r.whole(5, 90) if self.r.chance(0.8) else self.r.whole(15, 25) + 0.5

    def deg(self) -> int | float:
        r = self.r
        return r.whole(-15, 39) if r.chance(0.7) else r.whole(-9, 38) + r.whole(1, 9) / 10

    def height(self) -> float:
        return float(f"1.{self.r.whole(4, 9)}{self.r.whole(1, 9)}")

    def percent(self) -> int | str:
        v = self.r.whole(1, 100)
        return v if self.r.chance(0.7) else f"{v}%"

    def zero(self) -> int:
        return 0 if self.r.chance(0.7) else self.r.whole(1, 255)

    def bool(self) -> bool:
        return self.r.chance(0.5)

    def expression(self) -> Said:
        r = self.r
        terms = [str(self.calc_num()) for _ in range(r.pick((2, 2, 2, 3, 3, 4)))]
        terms = [t if t[0] != "-" else t[1:] for t in terms]
        if len(terms) == 2 and r.chance(0.35):
            word = r.pick(tuple(_OPERATORS))
            return f"{terms[0]} {_OPERATORS[word]} {terms[1]}", f"{terms[0]} {word} {terms[1]}"
        gap = " " if r.chance(0.5) else ""
        text = terms[0]
        for i, term in enumerate(terms[1:]):
            text += f"{gap}{r.pick('++--**/^%')}{gap}{term}"
            if i == 0 and len(terms) > 2 and r.chance(0.3):
                text = f"({text})"
        if r.chance(0.06):
            text = f"{r.pick(('sqrt', 'sin', 'log', 'abs'))}({text})"
        return text, text

    # ---- times
    def date(self) -> str:
        r = self.r
        return f"{r.whole(2019, 2032)}-{r.whole(1, 12):02d}-{r.whole(1, 28):02d}"

    def date_said(self) -> str:
        r, x = self.r, self.r.random()
        if x < 0.55:
            return self.date()
        if x < 0.7:
            return r.pick(_WEEKDAYS) if r.chance(0.8) else r.pick(_WEEKDAYS).lower()
        if x < 0.8:
            return r.pick(("tomorrow", "today", "next week", "next Monday", "tonight"))
        day, month = r.whole(1, 28), r.pick(_MONTHS)
        return r.pick((f"{month} {day}", f"{day} {month}", f"{day}.{r.whole(1, 12)}.2027"))

    def time(self) -> str:
        r, x = self.r, self.r.random()
        if x < 0.6:
            return f"{r.whole(0, 23):02d}:{r.pick((0, 15, 30, 45, r.whole(0, 59))):02d}"
        if x < 0.75:
            return f"{r.whole(1, 12)}{r.pick(('am', 'pm'))}"
        if x < 0.88:
            return f"{r.whole(1, 12)} {r.pick(('am', 'pm', 'AM', 'PM'))}"
        if x < 0.96:
            return f"{r.whole(1, 12)}:{r.pick((0, 15, 30, 45)):02d} {r.pick(('am', 'pm', 'PM'))}"
        return r.pick(("noon", "midnight"))

    def clock(self) -> str:
        return f"{self.r.whole(0, 23):02d}:{self.r.whole(0, 59):02d}"

    def datetime(self) -> str:
        return f"{self.date()}{self.r.pick('T ')}{self.clock()}:00"

    def weekday(self) -> str:
        return self.r.pick(_WEEKDAYS)

    def year(self) -> int:
        return self.r.whole(1900, 2030)

    # ---- codes, files, addresses
    def code(self) -> str:
        r = self.r
        alphabet = r.pick((_UPPER + _DIGITS, _UPPER + _DIGITS, _DIGITS + "abcdef", _DIGITS))
        text = "".join(r.pick(alphabet) for _ in range(r.whole(3, 8)))
        if text.isdigit() and r.chance(0.8):
            text = r.pick(_UPPER) + text
        x = r.random()
        if x < 0.55:
            return text
        if x < 0.85:
            return f"{r.pick(('ID', 'A', 'X', 'SKU', 'REF', 'ORD', 'INV', 'TX'))}-{text}"
        return f"{self.word()}{r.pick('-_')}{text}"

    def id(self) -> str:
        r = self.r
        return str(r.whole(100, 999999)) if r.chance(0.4) else self.code()

    def user_id(self) -> int | str:
        return self.r.whole(1, 99999) if self.r.chance(0.5) else self.id()

    def filename(self) -> str:
        r = self.r
        stem = self.identifier()
        if not self.lex.held and r.chance(0.15):
            stem = r.pick(("README", "notes", "main", "index", "test", "data", "report", "config"))
        return f"{stem}.{r.pick(_EXTENSIONS)}"

    def path(self) -> str:
        r = self.r
        if r.chance(0.4):
            return self.filename()
        folders = [
            r.pick(_DIRECTORIES) if not self.lex.held and r.chance(0.5) else self.word()
            for _ in range(r.whole(1, 3))
        ]
        return r.pick(("/", "/", "", "./", "~/", "../")) + "/".join([*folders, self.filename()])

    def dirpath(self) -> str:
        r = self.r
        folders = [
            r.pick(_DIRECTORIES) if not self.lex.held and r.chance(0.5) else self.word()
            for _ in range(r.whole(1, 3))
        ]
        start = r.pick(("/", "/", "", "./", "~/", "../"))
        if r.chance(0.06):
            return r.pick((".", "..", "/", "~"))
        return start + "/".join(folders) + ("/" if r.chance(0.15) else "")

    def url(self) -> str:
        r = self.r
        host = f"{r.pick(('', '', 'www.', 'api.', 'docs.'))}{self.word()}.{r.pick(_TOP_DOMAINS)}"
        tail = r.pick(
            ("", "", "/" + self.word(), f"/{self.word()}/{self.word()}", "/" + self.code())
        )
        if r.chance(0.12):
            tail += f"?{self.word()}={self.word()}"
        return r.pick(("https://", "https://", "http://", "")) + host + tail

    def version(self) -> str:
        r = self.r
        return f"{r.pick(('', 'v'))}{r.whole(0, 20)}.{r.whole(0, 30)}" + (
            f".{r.whole(0, 30)}" if r.chance(0.6) else ""
        )

    def command(self) -> str:
        if self.lex.held:
            return self.phrase()
        pattern = self.r.pick(_COMMANDS)
        if self.r.chance(0.2):
            pattern = f"{{w}} {self.r.pick(('-', '--'))}{{w}} {{p}}"
        return self.fill(pattern)

    def pycode(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_PYCODE))

    def sql(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_SQL))

    # ---- catalogue words
    def currency(self) -> Said:
        r = self.r
        if r.chance(0.2):
            said = r.pick(tuple(_SAID_CURRENCY))
            return _SAID_CURRENCY[said], said
        code = self.curr()
        return code, code

    def curr(self) -> str:
        r = self.r
        return r.pick(_CURRENCIES) if r.chance(0.8) else "".join(r.pick(_UPPER) for _ in range(3))

    def unit(self) -> str:
        return self.r.pick(_UNITS) if self.r.chance(0.85) else self.word()

    def degunit(self) -> str:
        return self.r.pick(("celsius", "fahrenheit", "C", "F"))

    def language(self) -> str:
        return self.r.pick(_LANGUAGES) if self.r.chance(0.85) else self.capitalised_coin()

    def symbol(self) -> str:
        r = self.r
        if r.chance(0.5):
            return r.pick(_SYMBOLS)
        return "".join(r.pick(_UPPER) for _ in range(r.whole(1, 5)))

    def sky(self) -> str:
        return self.r.pick(_SKY)

    def plural(self) -> str:
        return self.r.pick(_PLURALS) if self.r.chance(0.7) else self.phrase()

    def shipstate(self) -> str:
        return self.r.pick(_SHIP_STATES)

    def status(self) -> str:
        if self.lex.held:
            return self.word()
        return self.r.pick(("sent", "ok", "success", "done", "created", "delivered", "queued"))

    # ---- texts
    def query(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_QUERIES))

    def topic(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_TOPICS))

    def text(self) -> str:
        if self.lex.held:
            return self.phrase()
        text = self.fill(self.r.pick(_SENTENCES))
        if self.r.chance(0.25):
            text = text[0].upper() + text[1:]
        return text

    def sentence(self) -> str:
        if self.lex.held:
            return f"{self.capital()} {self.phrase()}."
        text = self.fill(self.r.pick(_SENTENCES))
        text = text[0].upper() + text[1:]
        return text if text[-1] in "?!." else text + "."

    def task(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_TASKS))

    def title(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_TITLES))

    def titles(self) -> list[str]:
        return [self.title() for _ in range(self.r.whole(1, 3))]

    def paths(self) -> list[str]:
        return [self.path() for _ in range(self.r.whole(1, 3))]

    def scene(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(_SCENES))


_SLOTS = {
    "w": "word", "W": "capital", "v": "verb", "c": "city", "name": "given", "person": "person",
    "n": "small", "t": "time", "day": "weekday", "k": "code", "u": "url", "m": "money", "y": "year",
    "p": "path", "d": "dirpath", "i": "identifier", "date": "date", "clock": "clock",
}  # fmt: skip
