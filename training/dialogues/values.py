"""Values of arguments and results, and how people say them.

A kind is a name such as `place` or `money`; `Values.make(kind)` gives the JSON value and the words
that stand for it in the user's text. They differ only where people do not write the value itself
(`12 times 3` for `12 * 3`, `dollars` for `USD`).
"""

from __future__ import annotations

from typing import Any

from training.dialogues import pools
from training.dialogues.lexicon import Lexicon, Rng

Said = tuple[Any, str]


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
            out.append(str(getattr(self, pools.SLOTS[slot])()))

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
            return w[:at] + r.pick(pools.ACCENTED) + w[at:]
        if x < 0.5:
            return "".join(r.pick(pools.ACCENTED) for _ in range(r.whole(2, 6)))
        if x < 0.6:
            return "".join(chr(r.whole(0x4E00, 0x9FA5)) for _ in range(r.whole(1, 4)))
        if x < 0.66:
            return chr(r.whole(0x1F300, 0x1F64F))
        return "".join(
            chr(r.pick((r.whole(0xA1, 0x377), r.whole(0x386, 0x7FF), r.whole(0x900, 0xD7A3),
                        r.whole(0xE000, 0xFFEF), r.whole(0x10000, 0x10FFFF))))
            for _ in range(r.whole(1, 8))
        )  # fmt: skip

    def tangle(self) -> str:
        """Characters in no order, as in passwords and patterns; no blank at either end."""
        r = self.r
        marks = "".join(
            r.pick(pools.MARKS) if r.chance(0.7) else r.pick(pools.UPPER)
            for _ in range(r.whole(1, 4))
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
            return f"{self.city()}, {r.pick(pools.UPPER)}{r.pick(pools.UPPER)}"
        if x < 0.96:
            region = self.city() if self.lex.held or r.chance(0.4) else r.pick(pools.COUNTRIES)
            return f"{self.city()}, {region}"
        if x < 0.98:
            return self.city().lower()
        return self.exotic()

    def tz(self) -> Said:
        if self.r.chance(0.45):
            said = self.r.pick(tuple(pools.TZ_OF))
            return pools.TZ_OF[said], said
        if self.r.chance(0.5):
            zone = self.r.pick(tuple(pools.TZ_OF.values()))
            return zone, zone
        zone = f"{self.r.pick(('Europe', 'Asia', 'America', 'Africa'))}/{self.city()}"
        return zone, zone

    def room(self) -> Said:
        room = self.r.pick(pools.ROOMS) if self.r.chance(0.7) else self.word()
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
        return f"{user}@{host}.{r.pick(pools.TOP_DOMAINS)}"

    def phone(self) -> str:
        r = self.r
        return r.pick(("+", "")) + "-".join(
            "".join(r.pick(pools.DIGITS) for _ in range(n))
            for n in r.pick(((3, 4), (2, 3, 4), (7,)))
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
        return v, pools.NUMBER_WORDS[v] if self.r.chance(0.2) else str(v)

    def int_minutes(self) -> Said:
        v = self.r.pick((1, 2, 3, 5, 10, 15, 20, 25, 30, 45, 60, 90, self.r.whole(1, 120)))
        return v, pools.NUMBER_WORDS[v] if v < 13 and self.r.chance(0.25) else str(v)

    def integer_percent(self) -> int:
        return self.r.pick((5, 10, 15, 18, 20, 25, 50, 6, 8, 12, self.r.whole(1, 100)))

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
        if r.chance(0.1):
            return self._worded(terms[0], terms[1])
        if len(terms) == 2 and r.chance(0.35):
            word = r.pick(tuple(pools.OPERATORS))
            return f"{terms[0]} {pools.OPERATORS[word]} {terms[1]}", f"{terms[0]} {word} {terms[1]}"
        gap = " " if r.chance(0.5) else ""
        text = terms[0]
        for i, term in enumerate(terms[1:]):
            text += f"{gap}{r.pick('++--**/^%')}{gap}{term}"
            if i == 0 and len(terms) > 2 and r.chance(0.3):
                text = f"({text})"
        if r.chance(0.06):
            text = f"{r.pick(('sqrt', 'sin', 'log', 'abs'))}({text})"
        return text, text

    def _worded(self, a: str, b: str) -> Said:
        """An expression that people say in words."""
        whole, small = str(self.r.whole(1, 99)), str(self.r.whole(2, 12))
        return self.r.pick((
            (f"sqrt({a})", f"the square root of {a}"), (f"sqrt({a})", f"square root of {a}"),
            (f"{a} ** 2", f"{a} squared"), (f"{a} ** {small}", f"{a} to the power of {small}"),
            (f"0.{int(whole):02d} * {b}", f"{whole}% of {b}"),
            (f"0.{int(whole):02d} * {b}", f"{whole} percent of {b}"),
            (f"{a} * {b}", f"{a} multiplied by {b}"), (f"{a} / {b}", f"{a} over {b}"),
        ))  # fmt: skip

    # ---- times
    def date(self) -> str:
        r = self.r
        return f"{r.whole(2019, 2032)}-{r.whole(1, 12):02d}-{r.whole(1, 28):02d}"

    def date_said(self) -> str:
        r, x = self.r, self.r.random()
        if x < 0.55:
            return self.date()
        if x < 0.7:
            return r.pick(pools.WEEKDAYS) if r.chance(0.8) else r.pick(pools.WEEKDAYS).lower()
        if x < 0.8:
            return r.pick(("tomorrow", "today", "next week", "next Monday", "tonight"))
        day, month = r.whole(1, 28), r.pick(pools.MONTHS)
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
        return self.r.pick(pools.WEEKDAYS)

    def year(self) -> int:
        return self.r.whole(1900, 2030)

    # ---- codes, files, addresses
    def code(self) -> str:
        r = self.r
        alphabet = r.pick(
            (
                pools.UPPER + pools.DIGITS,
                pools.UPPER + pools.DIGITS,
                pools.DIGITS + "abcdef",
                pools.DIGITS,
            )
        )
        text = "".join(r.pick(alphabet) for _ in range(r.whole(3, 8)))
        if text.isdigit() and r.chance(0.8):
            text = r.pick(pools.UPPER) + text
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
        return f"{stem}.{r.pick(pools.EXTENSIONS)}"

    def path(self) -> str:
        r = self.r
        if r.chance(0.4):
            return self.filename()
        folders = [
            r.pick(pools.DIRECTORIES) if not self.lex.held and r.chance(0.5) else self.word()
            for _ in range(r.whole(1, 3))
        ]
        return r.pick(("/", "/", "", "./", "~/", "../")) + "/".join([*folders, self.filename()])

    def dirpath(self) -> str:
        r = self.r
        folders = [
            r.pick(pools.DIRECTORIES) if not self.lex.held and r.chance(0.5) else self.word()
            for _ in range(r.whole(1, 3))
        ]
        start = r.pick(("/", "/", "", "./", "~/", "../"))
        if r.chance(0.06):
            return r.pick((".", "..", "/", "~"))
        return start + "/".join(folders) + ("/" if r.chance(0.15) else "")

    def url(self) -> str:
        r = self.r
        host = (
            f"{r.pick(('', '', 'www.', 'api.', 'docs.'))}{self.word()}.{r.pick(pools.TOP_DOMAINS)}"
        )
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
        pattern = self.r.pick(pools.COMMANDS)
        if self.r.chance(0.2):
            pattern = f"{{w}} {self.r.pick(('-', '--'))}{{w}} {{p}}"
        return self.fill(pattern)

    def pycode(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.PYCODE))

    def sql(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.SQL))

    # ---- catalogue words
    def currency(self) -> Said:
        r = self.r
        if r.chance(0.2):
            said = r.pick(tuple(pools.SAID_CURRENCY))
            return pools.SAID_CURRENCY[said], said
        code = self.curr()
        return code, code

    def curr(self) -> str:
        r = self.r
        return (
            r.pick(pools.CURRENCIES)
            if r.chance(0.8)
            else "".join(r.pick(pools.UPPER) for _ in range(3))
        )

    def unit(self) -> str:
        return self.r.pick(pools.UNITS) if self.r.chance(0.85) else self.word()

    def degunit(self) -> str:
        return self.r.pick(("celsius", "fahrenheit", "C", "F"))

    def language(self) -> str:
        return self.r.pick(pools.LANGUAGES) if self.r.chance(0.85) else self.capitalised_coin()

    def symbol(self) -> Said:
        r, x = self.r, self.r.random()
        if x < 0.2:
            said = r.pick(tuple(pools.SAID_SYMBOL))
            return pools.SAID_SYMBOL[said], said
        if x < 0.55:
            symbol = r.pick(pools.SYMBOLS)
        else:
            symbol = "".join(r.pick(pools.UPPER) for _ in range(r.whole(1, 5)))
        return symbol, symbol

    def occasion(self) -> str:
        return self.fill(self.r.pick(pools.OCCASIONS))

    def food(self) -> str:
        return self.fill(self.r.pick(pools.FOODS))

    def sky(self) -> str:
        return self.r.pick(pools.SKY)

    def plural(self) -> str:
        return self.r.pick(pools.PLURALS) if self.r.chance(0.7) else self.phrase()

    def shipstate(self) -> str:
        return self.r.pick(pools.SHIP_STATES)

    def status(self) -> str:
        if self.lex.held:
            return self.word()
        return self.r.pick(("sent", "ok", "success", "done", "created", "delivered", "queued"))

    # ---- texts
    def query(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.QUERIES))

    def topic(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.TOPICS))

    def text(self) -> str:
        if self.r.chance(0.2):
            return self.sentence() if self.r.chance(0.7) else f"{self.sentence()} {self.sentence()}"
        if self.lex.held:
            return self.phrase()
        text = self.fill(self.r.pick(pools.SENTENCES))
        if self.r.chance(0.25):
            text = text[0].upper() + text[1:]
        return text

    def sentence(self) -> str:
        if self.lex.held:
            return f"{self.capital()} {self.phrase()}."
        text = self.fill(self.r.pick(pools.SENTENCES))
        text = text[0].upper() + text[1:]
        return text if text[-1] in "?!." else text + "."

    def task(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.TASKS))

    def title(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.TITLES))

    def titles(self) -> list[str]:
        return [self.title() for _ in range(self.r.whole(1, 3))]

    def paths(self) -> list[str]:
        return [self.path() for _ in range(self.r.whole(1, 3))]

    def scene(self) -> str:
        if self.lex.held:
            return self.phrase()
        return self.fill(self.r.pick(pools.SCENES))
