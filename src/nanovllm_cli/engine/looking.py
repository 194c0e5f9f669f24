"""How what towers compute of images, and of sounds alike, is divided among steps. An image takes up to a minute on a CPU, and
nobody else is to wait that long: so a stage of a tower, which is one of its layers, takes as much of a step's room as the tokens
of a prompt that have as many multiplications. Planned is only when an image is computed: a runner that meets tokens of one that
is not ready computes the rest of it.
"""

from __future__ import annotations

from nanovllm_cli.engine.plan import Look
from nanovllm_cli.engine.sequence import Sequence
from nanovllm_cli.hearing_spec import AnyEar
from nanovllm_cli.vision_spec import TowerSpec


class Looking:
    """tower: None where no request has images. token_work: multiplications for a token of a prompt."""

    def __init__(self, tower: TowerSpec | AnyEar | None = None, token_work: int = 1) -> None:
        self._tower = tower
        self._token_work = max(1, token_work)
        self._look: tuple[Sequence, Look] | None = None

    def __bool__(self) -> bool:
        """Whether somebody looks at an image in the step that is being planned."""
        return self._look is not None

    def take(self) -> tuple[Sequence, Look] | None:
        """Who does, and at what; the next step begins with nobody."""
        look, self._look = self._look, None
        return look

    def room(self, sequence: Sequence, limit: int, budget: int) -> tuple[int, int]:
        """How many of the sequence's next `limit` tokens go into a step with room for `budget`, and how much of that their images
        take. In front of the first image for which there is no room it ends; if nobody else looks at one in this step, stages of
        that are computed. One at least, where the sequence would do nothing else: so everybody's turn comes to an end."""
        request, start, taken = sequence.request, sequence.num_computed, 0
        ready: set[bytes] = set()  # in this step: pieces of a page are alike where they are blank
        for placed in request.images_within(start, start + limit):
            image, before = placed.image, max(0, placed.start - start)
            if before >= limit:
                break
            assert self._tower is not None
            left = 0 if image.digest in ready else request.stages_left.get(image.digest, self._tower.num_layers)
            price = -(-self._tower.layer_work(image) // self._token_work)
            room = budget - taken - before
            if left * price < max(room, 1):
                taken += left * price
                ready.add(image.digest)
                limit = min(limit, budget - taken)
                continue
            stages = min(left, max(0, room) // price or int(before == 0))
            if self._look is not None or not stages:
                return before, taken
            self._look = sequence, Look(sequence.seq_id, image, stages)
            return before, taken + stages * price
        return limit, taken
