"""instructor: a model whose check refuses the first call, so that a second is asked for."""

import instructor
import openai
from pydantic import BaseModel, field_validator
from tool import KEY, MODEL, PROMPT, PROTOCOL, URL, VARIANT, lookup, say


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int
    answer: str

    @field_validator("answer")
    @classmethod
    def no_guess(cls, answer: str, info: object) -> str:
        """Refuse a guess with the tool's result, which the second request then carries."""
        if answer == "a guess":
            raise ValueError(f"the answer is known: {lookup(**info.data)}")
        return answer


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode[VARIANT]
)
options = {"model": MODEL, "response_model": Weather, "max_retries": 2}
if PROTOCOL == "responses":
    weather = client.responses.create(input=PROMPT, **options)
else:
    weather = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], **options
    )
say(weather.answer)
