"""System texts, small talk and questions that no tool answers."""

from __future__ import annotations

from training.dialogues.lexicon import Rng
from training.dialogues.tools import capital
from training.dialogues.values import Values

HELLO, WELCOME, BYE = "Hello! How can I help you?", "You are welcome!", "Goodbye!"
IDENTITY = "I am a tiny test model."
ABILITY = "I can call the tools that you declare."
FINE, JOKE, GREAT = "I am fine, thank you.", "I know no jokes, but I can call tools.", "Great."
HELP = "Tell me which tool to call and with which values."
NO_TOOL = "I have no tool for that."
ASK_BACK, THINK_ASK_BACK = "Please tell me the {}.", "The {} is missing."
THINK_CHAT, THINK_NO_TOOL = "No tool is needed.", "No declared tool fits."

SMALL_TALK: tuple[tuple[str, str], ...] = tuple(
    (said, answer)
    for answer, sayings in (
        (HELLO, "hi|hello|hey|hi there|hello there|hey there|good morning|good evening|good day|"
                "good afternoon|greetings|howdy|hiya|yo|hello bot|hi assistant|hello again|morning"),
        (WELCOME, "thanks|thank you|thanks a lot|thank you very much|many thanks|thx|cheers|"
                  "thanks for your help|great, thanks|perfect, thank you|thank you so much|ty"),
        (BYE, "bye|goodbye|bye bye|see you|see you later|good night|farewell|that's all, bye|cya"),
        (IDENTITY, "who are you|what are you|what is your name|what's your name|are you a robot|"
                   "are you human|which model are you|introduce yourself|who made you|are you an AI|"
                   "tell me about yourself|are you real"),
        (FINE, "how are you|how are you doing|how are you today|how is it going|how do you do|"
               "are you ok|how do you feel|hi, how are you|hello, how are you today|what's up"),
        (ABILITY, "what can you do|what are you able to do|what do you do|how can you help me|"
                  "what are your skills|which things can you do|what can I ask you"),
        (JOKE, "tell me something funny|say something funny|entertain me|sing a song|be funny"),
        (GREAT, "ok|okay|great|nice|cool|perfect|good|fine|alright|understood|got it|well done|"
                "good job|that works|awesome|very good|yes|sounds good"),
        (HELP, "help|help me|I need help|can you help me|please help|I don't know what to do|"
               "how does this work|what should I do|I have a problem|could you help me"),
    )
    for said in sayings.split("|")
)  # fmt: skip
# Questions and wishes for which a handful of declared tools is of no use.
_UNSERVED = (
    "what is the capital of {c}", "who is {person}", "who wrote {W}", "who invented the {w}",
    "why is the {w} {w}", "what is a {w}", "explain {w}", "what is the meaning of life",
    "how do I {v} a {w}", "write a poem about {w}", "write a poem", "tell me a story",
    "tell me a story about a {w}", "when was {person} born", "how old is {person}",
    "how tall is {person}", "what is the difference between {w} and {w}", "do you like {w}",
    "is {w} better than {w}", "who won the {w} in {y}", "what is the largest {w}",
    "why do people {v}", "how many {w} are in a {w}", "what color is the {w}", "do you know {person}",
    "recommend a {w}", "what happened in {y}", "give me a recipe for {w}", "what should I eat",
    "who was the president in {y}", "can you dance", "write an essay on {w}", "I am bored",
    "what do you think about {w}", "is there life on Mars", "how far away is the moon",
    "who is the king of {c}", "summarize the history of {c}", "give me advice about {w}",
    "what is your favorite {w}", "I feel sad", "where does {w} come from", "who painted the {W}",
    "how does a {w} work", "what language do they speak in {c}", "should I {v} the {w}",
)  # fmt: skip
_SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.",
    "Be brief.", "Answer briefly.", "Be concise.", "You are a bot for {w}.", "Today is {date}.",
    "Current date: {date}.", "You are an agent that uses tools.", "Use the tools when needed.",
    "You are {name}, an assistant of {W}.", "The user's name is {person}.", "The user is in {c}.",
    "Always be polite.", "Do not make up values.", "Answer in English.", "You work for {W} {W}.",
    "Think step by step.", "You have access to tools.", "Only use the tools that are declared.",
    "The current time is {clock}.", "Never {v} the {w}.", "You help people {v} their {w}.",
    "Call a function if one fits.", "If no tool fits, say so.", "Keep answers short.",
    "Working directory: {d}", "The {w} is {w}.", "Platform: {w}", "User id: {k}", "Version {n}.",
    "You are a customer support agent for {W}.", "Follow the instructions of the user.",
    "Do not reveal the {w}.", "When in doubt, {v} the {w}.", "Prices are in {W}.", "Locale: {w}",
    "You are a helpful assistant with access to the following functions. Use them if required.",
    "You are a weather bot.", "You are a coding assistant.", "You are a travel agent.",
)  # fmt: skip
_PROSE = (
    "The {w} of the {w} is {w}.", "Users may {v} the {w} once a day.", "Check the {w} before you {v}.",
    "Each {w} has {n} {w}.", "Our office is in {c}.", "Ask {person} about the {w}.",
    "- Always {v} the {w}.", "- Never {v} a {w} without the {w}.", "- The {w} must be {w}.",
    "If the {w} is {w}, {v} it.", "{W} and {W} are the same.", "Contact: {name} ({c}).",
    "The {w} closes at {t}.", "Version {n} of the {w} came in {y}.", "See {u} for more.",
    "All {w} are {w} unless the {w} is {w}.", "Please {v} every {w}.", "\n# {W}", "1. {v} the {w}",
    "The file {p} holds the {w}.", "Respond with {w} and {w}.", "Our {w} costs {m}.",
)  # fmt: skip
_ECHO = ("say {}", "repeat after me: {}", "please say {}", "echo {}", "repeat: {}", "say: {}",
         "just say {}", "repeat {}", "write {}", "answer with {}")  # fmt: skip


def system_text(r: Rng, v: Values, long: bool) -> str:
    """A system prompt: one to four sentences, or a page of rules when `long`."""
    v_fill = v.fill
    lines = [v_fill(r.pick(_SYSTEM)) for _ in range(r.pick((1, 1, 1, 2, 2, 3)))]
    if long:
        lines += [v_fill(r.pick(_PROSE)) for _ in range(r.whole(4, 22))]
    return r.pick((" ", " ", "\n")).join(dict.fromkeys(lines))


def small_talk(r: Rng) -> tuple[str, str]:
    """(what the user says, the answer)."""
    said, answer = r.pick(SMALL_TALK)
    if r.chance(0.6):
        said = capital(said)
    if answer in (IDENTITY, FINE, ABILITY) or said.lower().startswith(("can ", "could ", "how ")):
        return said + r.pick(("?", "?", "")), answer
    return said + r.pick(("", "", "!", ".")), answer


def unserved(r: Rng, v: Values) -> str:
    """A question or wish that needs a tool or knowledge which is not there."""
    said = v.fill(r.pick(_UNSERVED))
    if r.chance(0.7):
        said = capital(said)
    question = said.lower().startswith(("wh", "how", "is ", "do ", "can ", "should "))
    return said + r.pick(("?", "?", "") if question else ("", ".", "!"))


def echo(r: Rng, v: Values) -> tuple[str, str]:
    """(a request to repeat something, that something)."""
    text = getattr(
        v,
        r.pick(("phrase", "phrase", "word", "title", "exotic", "code", "person", "text", "pieces")),
    )()
    said = r.pick(_ECHO).replace("{}", f'"{text}"' if r.chance(0.4) else text)
    return capital(said) if r.chance(0.5) else said, text
