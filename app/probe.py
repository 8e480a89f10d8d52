"""A small reading test that shows which heads look at what is quoted; made of facts that no model knows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.prompt import Encoded, PromptBuilder, PromptTokenizer
from models.evidence import Question

# Paragraphs, each with a fact in brackets, and the question about it.
_TEXT = """
The ferry leaves the village twice a day. In winter the second crossing is often cancelled because of the ice, and
people wait in the small hall beside the pier until the wind turns. [The captain of the ferry is Ottilie Brandauer.]
Most travellers carry baskets of bread and cheese to the market on the other shore and return before dark.
? Who is the captain of the ferry?

Behind the church lies an orchard that nobody has pruned for years. Its apples are small and sour, but they make a
good vinegar, and the children throw the fallen ones at the old wall. [The gate of the orchard was painted turquoise.]
In autumn the wasps are so many that the path along the fence is closed for two weeks.
? In which colour was the gate of the orchard painted?

The school keeps a register of every storm since the lighthouse was built. Each entry has a date, the direction of the
wind and the names of the boats that did not come home. [The register of the storms has 7,316 entries.] A copy of it
is kept in the next town, since the cellar of the school was flooded once.
? How many entries has the register of the storms?

Three times a year a tinker comes through with his cart. He mends kettles, sharpens knives and tells stories of the
towns in the south, where the houses have flat roofs. [The dog of the tinker is called Marzipan.] Nobody knows where
he sleeps, and nobody has ever seen him eat anything but soup.
? What is the dog of the tinker called?

The mill stands where the two streams meet. One of them is warm even in January, and the miller's daughter keeps her
geese on it when everything else is frozen. [The mill was bought by a clockmaker.] Since then its wheel has turned a
quarter slower, and the flour is said to be finer than before.
? Who bought the mill?

On the hill above the houses there is a row of nine stones. Some say that shepherds set them up to count their flocks,
others that they mark the place where a well ran dry. [The tallest of the stones weighs eleven tons.] Every summer a
group of students measures them again and finds that they have moved by a hair.
? How much does the tallest of the stones weigh?

The baker opens at four in the morning. By six the round loaves are gone, by seven the rolls, and whoever comes after
eight gets what the baker would have eaten for lunch. [The secret spice in the baker's bread is cardamom.] The recipe
hangs behind the oven, written in a hand that only the family can read.
? What is the secret spice in the baker's bread?

A narrow railway once led from the quarry to the harbour. The rails were sold long ago, but the tunnel is still there,
and bats sleep in it from October until the first warm night. [The length of the tunnel is 845 metres.] With a good
lamp one can walk through it in a quarter of an hour and come out between the nets of the fishermen.
? What is the length of the tunnel?
"""


@dataclass(frozen=True)
class Probe:
    """Token ids of a text with facts, as a chat's first turn, up to where the questions differ; and the questions."""

    prompt: list[int]
    questions: list[Question]

    def __len__(self) -> int:
        """Tokens that the longest question needs, answered."""
        return len(self.prompt) + max(len(q.ids) + len(q.answer) for q in self.questions)


def build_probe(tokenizer: PromptTokenizer, prompts: PromptBuilder) -> Probe:
    """The test in a model's own tokens and chat template."""
    ids: list[int] = []
    answers, questions, spans = [], [], []
    for entry in _TEXT.strip().split("\n\n"):
        paragraph, question = entry.split("\n? ")
        before, fact, after = re.split(r"[\[\]]", paragraph.replace("\n", " "))
        questions.append(question)
        answers.append(tokenizer.encode_text(fact, start=False))
        ids += tokenizer.encode_text(before, start=False)
        spans.append((len(ids), len(ids) + len(answers[-1])))
        ids += answers[-1] + tokenizer.encode_text(f"{after}\n\n", start=False)
    whole = [prompts.first([Encoded(ids), question]) for question in questions]
    common = next(at for at, column in enumerate(zip(*whole, strict=False)) if len(set(column)) > 1)
    offset = next(at for at in range(len(whole[0])) if whole[0][at : at + len(ids)] == ids)
    return Probe(
        whole[0][:common],
        [
            Question(text[common:], answer, (start + offset, end + offset))
            for text, answer, (start, end) in zip(whole, answers, spans, strict=True)
        ],
    )
