"""How the next token is chosen, and when an answer has begun to repeat itself."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from app.engine.types import SamplingParams
from models.errors import BadLogits

NOT_FINITE = -1  # in place of a token
_LONGEST, _SPAN, _REPEATS = 4096, 256, 6  # of a loop, see LoopDetector
_RUN = 32  # tokens in a row that are the same as before by a loop, hardly by chance


def check_sampling(params: SamplingParams) -> None:
    """Raise ValueError naming the first parameter that is out of its range."""
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 100.0),
    ):
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.")
    for name, least, most in (("top_k", 0, 2**31), ("max_new_tokens", 1, 2**40), ("seed", 0, 2**63 - 1)):
        value = getattr(params, name)
        if value is None and name != "top_k":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
    stops: object = params.stop  # whatever a front end put there
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop is {stops!r}; it must be a list of strings that are not empty.")


class Sampler:
    """Chooses the tokens of one answer on the device that the logits are on, without waiting for it.

    Order: repetition penalty over the answer, temperature, top-k, top-p, min-p, then one draw. Temperature 0 takes the
    largest logit. The best token always stays, so top_p 0 is greedy too. The same seed gives the same answer.
    """

    def __init__(self, params: SamplingParams) -> None:
        check_sampling(params)
        self._params = params
        self._seen: Tensor | None = None  # bool [vocab]: tokens of the answer so far
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> Tensor:
        """The next token of the answer, int64 [1], from fp32 logits [vocab]; NOT_FINITE when one of them is not."""
        token = self._choose(self._penalised(logits)).masked_fill(~logits.isfinite().all(), NOT_FINITE).view(1)
        if self._seen is not None:
            self._seen.index_fill_(0, token.clamp_min(0), True)
        return token

    def _penalised(self, logits: Tensor) -> Tensor:
        penalty = self._params.repetition_penalty
        if penalty == 1.0:
            return logits
        if self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _choose(self, logits: Tensor) -> Tensor:
        params = self._params
        if params.temperature == 0.0:
            return logits.argmax()
        if 0 < params.top_k < logits.numel():
            values, ids = logits.topk(params.top_k)
        else:
            values, ids = logits.sort(descending=True, stable=True)
        # float64, and relative to the best: no temperature can overflow.
        probabilities = ((values.double() - values[0].double()) / params.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities
        keep = (before < params.top_p) & (probabilities >= params.min_p * probabilities[0])
        keep[:1] = True  # a place alone would be copied from the host, and waited for
        upto = (probabilities * keep).cumsum(0)
        point = upto[-1:] * float(torch.rand((), generator=self._random, dtype=torch.float64))
        # What is kept is a front of the list. Its end bounds the draw: rounding must not reach a token that was cut.
        place = torch.minimum(torch.searchsorted(upto, point, right=True), keep.sum() - 1)
        return ids.gather(0, place)


def check_token(token: int, number: int) -> None:
    """Raise BadLogits when the answer's token of this number could not be chosen."""
    if token == NOT_FINITE:
        raise BadLogits(
            f"The model gave logits that are not finite at answer token {number}; the answer was stopped. "
            "Other weights or cache settings (--weights bf16, --kv bf16) may help."
        )


class LoopDetector:
    """Finds an answer that repeats one passage, a word or pages of up to `_LONGEST` tokens, over and over.

    A loop is reported when the repeats cover `_SPAN` tokens and at least `_REPEATS` periods; tables and lists repeat
    far less than that. The period is the distance to where the last `_RUN` tokens stood before.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: OrderedDict[int, int] = OrderedDict()  # where each of the newest runs of tokens ended last
        self._period = self._same = 0  # tokens that were those of a period before

    def push(self, token_id: int) -> bool:
        """Take the next token; true when the answer is in a loop."""
        ids, ends = self._ids, self._ends
        ids.append(token_id)
        if self._period and ids[-1 - self._period] == token_id:
            self._same += 1
        else:
            self._period = self._same = 0
        if len(ids) < _RUN:
            return False
        run = hash(tuple(ids[-_RUN:]))
        before = ends.pop(run, None)
        ends[run] = len(ids)
        if len(ends) > _LONGEST:
            ends.popitem(last=False)
        if not self._period and before is not None and len(ids) - before <= _LONGEST:
            self._period, self._same = len(ids) - before, _RUN
        need = max(_SPAN, _REPEATS * self._period) - self._period
        return bool(self._period) and self._same >= need
