"""Five hundred random requests on a real (tiny, random) model, with a tenth of the KV memory they want at once."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import Qwen3Config

from engines import SMALL, engine_for, random_model, save, worker_for
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.sampling_params import SamplingParams

NUM_REQUESTS = 500
SHAPE = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257}
Request = tuple[list[int], SamplingParams]


def requests() -> list[Request]:
    """Prompts of 1 to 60 tokens, a third of them with a common beginning; answers of 1 to 80; greedy and seeded."""
    r = random.Random(1)
    common = [r.randrange(257) for _ in range(40)]
    made = []
    for i in range(NUM_REQUESTS):
        prompt = [r.randrange(257) for _ in range(r.randint(1, 20))]
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=r.choice((1, 20, 80)), ignore_eos=True)
        made.append((common + prompt if i % 3 == 0 else prompt, params))
    return made


def finish(engine: Engine, wanted: list[Request]) -> dict[str, tuple[int, ...]]:
    """Every request's tokens. Every step must advance or end something."""
    for i, (ids, params) in enumerate(wanted):
        engine.add(str(i), ids, params)
    tokens = {}
    while engine.has_unfinished():
        before = engine.stats()
        outputs = engine.step()
        after = engine.stats()
        assert after.scheduled_tokens > before.scheduled_tokens or any(o.finished for o in outputs)
        tokens |= {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
    return tokens


def test_all_complete_with_the_tokens_of_an_unpressed_run(tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE)), tmp_path)
    wanted = requests()
    free = engine_for(worker_for(folder, num_blocks=1024), max_num_seqs=64)
    expected = finish(free, wanted)
    assert free.stats().preemptions == 0
    demand = 64 * (60 + 80) // 16
    pressed = engine_for(worker_for(folder, num_blocks=demand // 10), max_num_seqs=64, num_blocks=demand // 10)
    assert finish(pressed, wanted) == expected
    stats = pressed.stats()
    assert stats.preemptions > 50
    assert stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == demand // 10
