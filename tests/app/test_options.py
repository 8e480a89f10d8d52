"""The settings of a chat: what the form shows comes back, what is wrong changes nothing."""

import json
from dataclasses import replace

import pytest

from app.chat import Chat
from app.engine.types import SamplingParams
from app.errors import UsageError
from app.ui.options import PRESETS, form, take


def _filled(chat):
    """The form's fields, as a browser sends them."""
    values = {name: getattr(chat.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    values |= {name: getattr(chat.sampling, name) for name in ("repetition_penalty", "seed", "max_new_tokens")}
    return {name: "" if value is None else str(value) for name, value in values.items()} | {"system": chat.system or ""}


@pytest.mark.parametrize(
    "sampling", [preset.sampling for preset in PRESETS] + [SamplingParams(0.3, 5, 0.9, 0.1, 1.2, 7, 99)]
)
def test_what_is_shown_comes_back(sampling):
    chat, other = Chat("Be brief.", sampling=sampling), Chat()
    take(other, json.dumps(_filled(chat)))
    assert other.sampling == sampling and other.system == "Be brief."


def test_the_preset_in_force_is_marked():
    for preset in PRESETS:
        shown = form(Chat(sampling=replace(preset.sampling, seed=3)))
        assert shown.count('aria-pressed="true"') == 1
        assert 'aria-pressed="true"' in shown[: shown.index(f"<b>{preset.name}</b>")].rsplit("<button", 1)[1]
    assert 'aria-pressed="true"' not in form(Chat(sampling=SamplingParams(temperature=0.123)))


def test_halves_of_characters_and_endless_nesting_do_no_harm():
    chat = Chat()
    take(chat, json.dumps({"system": "Half a bird: \ud83d"}))
    assert chat.system == "Half a bird: \ufffd"
    with pytest.raises(UsageError, match="did not arrive whole"):
        take(chat, "[" * 100_000)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("temperature", "-1", "Temperature is -1.0; it must be a number from 0 to 100."),
        ("temperature", "warm", "Temperature is 'warm'; it must be a number."),
        ("temperature", "nan", "Temperature is nan"),
        ("top_k", "2.5", "Top-k is '2.5'; it must be a whole number."),
        ("max_new_tokens", "0", "Longest answer is 0; it must be a whole number"),
        ("seed", "9" * 40, "Seed is 9"),
    ],
)
def test_a_wrong_value_is_told_and_nothing_changes(name, text, told):
    chat = Chat("Old.", sampling=SamplingParams(top_k=3))
    with pytest.raises(UsageError, match=told.replace(".", r"\.")):
        take(chat, json.dumps(_filled(chat) | {name: text, "system": "New."}))
    assert chat.sampling == SamplingParams(top_k=3) and chat.system == "Old."


@pytest.mark.parametrize(("name", "number"), [("temperature", "9" * 400), ("seed", "1e999")])
def test_a_number_beyond_any_other_is_told(name, number):
    with pytest.raises(UsageError, match="must be a"):
        take(Chat(), f'{{"{name}": {number}}}')


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_form_is_refused(text):
    with pytest.raises(UsageError):
        take(Chat(), text)


def test_the_system_prompt_is_fixed_by_the_first_question_and_escaped():
    chat = Chat("</textarea><script>")
    assert "<script>" not in form(chat) and "disabled" not in form(chat)
    chat.begin("?")
    assert "disabled" in form(chat)
    chat.head = None  # the first question is edited: the other branch has this prompt already
    assert "disabled" in form(chat)
    take(chat, json.dumps(_filled(chat) | {"system": "Another."}))
    assert chat.system == "</textarea><script>"
