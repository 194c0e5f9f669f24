"""Images computed a few layers a step: others go on meanwhile, and nothing of what comes out depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engines import engine_for, greedy, run
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.looking import Looking
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import Look, Plan, StepOutput
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.engine.sight import MOST_BEGUN, Sight
from nanovllm_cli.engine.stepper import Stepper
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.models.tower import Stages, Tower, tower_shapes
from nanovllm_cli.models.tower_layers import next_stage
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Image, ImageTokens, PlacedImage, TokenIds, TowerSpec, VisionSpec
from test_vision import SHORT, an_image, opened, prompt_with

TOWER = TowerSpec(
    patch_size=4, merge=2, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=40, out_size=48, activation="gelu_tanh",
    norm="layer", eps=1e-6, projector="merger", projector_eps=1e-6, theta=1e4,
)  # fmt: skip
SENSES = Senses(VisionSpec(TOWER, SizeRule("area", 8), ImageTokens("<i>", "<i>"), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))


class Model:
    """One that sees, with a record of its engine's plans. layers: of its tower."""

    def __init__(self, name: str, folder: Path) -> None:
        _, self.worker, self.vision, self.token = opened(name, folder)
        assert self.worker.sight is not None
        self.sight: Sight = self.worker.sight
        self.layers = self.vision.tower.num_layers
        self.plans: list[Plan] = []
        execute = self.worker.execute

        def recorded(plan: Plan) -> StepOutput:
            self.plans.append(plan)
            return execute(plan)

        self.worker.execute = recorded  # type: ignore[method-assign]

    def prompt(self, *parts: int | Image) -> TokenIds:
        return prompt_with(self.vision, list(parts), self.token)

    def image(self, rows: int = 4, columns: int = 4) -> Image:
        return an_image(self.vision, rows, columns)

    def forget(self) -> None:
        self.sight._kept.clear()
        self.sight._begun.clear()
        self.sight.num_computed = 0
        self.plans.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3-vl", tmp_path_factory.mktemp("model"))


def ids(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def drained(engine: Engine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
    return last


def test_others_draw_a_token_in_every_step_of_an_image(model: Model) -> None:
    model.forget()
    text, seen = model.prompt(5), model.prompt(6, model.image(), 7)
    expected = [ids(*run(engine_for(model.worker), [(prompt, greedy(12))])) for prompt in (text, seen)]
    model.forget()
    engine = engine_for(model.worker, token_work=1, max_num_batched_tokens=32)
    engine.add("text", text, greedy(12))
    engine.step()
    engine.add("image", seen, greedy(12))
    last: dict[str, RequestOutput] = {}
    lengths = []
    while engine.has_unfinished():
        for output in engine.step():
            last[output.request_id] = output
        lengths.append(len(ids(last["text"])))
    assert lengths[:11] == list(range(2, 13))
    assert [ids(last["text"]), ids(last["image"])] == expected
    looks = [plan.look.num_stages for plan in model.plans if plan.look is not None]
    assert looks == [1] * model.layers
    assert model.sight.num_computed == 1
    assert all(len(plan.scheduled) == 1 for plan in model.plans[2 : 2 + model.layers])


def test_an_image_for_which_a_step_has_room_takes_no_step_of_its_own(model: Model) -> None:
    model.forget()
    engine = engine_for(model.worker, token_work=10**9)
    run(engine, [(model.prompt(6, model.image(), model.image(), 7), greedy(1))])
    assert [(plan.look, len(plan.scheduled)) for plan in model.plans] == [(None, 1)]
    assert model.sight.num_computed == 2


def test_layers_take_room_as_tokens_do(model: Model) -> None:
    """A price of seven tokens a layer, in steps of sixteen: two layers; the last one with two tokens before the image."""
    image = model.image()
    work = -(-model.vision.tower.layer_work(image) // 7)
    model.forget()
    run(engine_for(model.worker, token_work=work, max_num_batched_tokens=16), [(model.prompt(2, image, 3), greedy(1))])
    assert model.layers == 3
    (first, second, *_) = model.plans
    assert first.look is not None
    assert (len(first.scheduled[0].token_ids), first.look.num_stages) == (2, 2)
    assert second.look is None
    assert len(second.scheduled[0].token_ids) == 16 - 7


@pytest.mark.parametrize("budget", [1, 2, 3, 16])
def test_a_layer_dearer_than_a_step_is_computed_all_the_same(model: Model, budget: int) -> None:
    model.forget()
    prompt, texts = model.prompt(1, model.image(), 1), [model.prompt(3) for _ in range(3)]
    requests = [(each, greedy(9)) for each in (*texts, prompt)]
    expected = [ids(*run(engine_for(model.worker), [request])) for request in requests]
    model.forget()
    engine = engine_for(model.worker, token_work=1, max_num_batched_tokens=budget)
    assert [ids(output) for output in run(engine, requests)] == expected
    assert model.sight.num_computed == 1


@pytest.mark.parametrize("name", SHORT)
def test_random_requests_give_what_each_gives_alone(name: str, tmp_path: Path) -> None:
    """With little memory, so that they are preempted, requests that leave, the same images again, and any price."""
    model, rng = Model(name, tmp_path), random.Random(5)
    images = [model.image(*rng.choice([(2, 3), (4, 4), (1, 5)]))
              if model.vision.size.kind not in ("square", "tiles") else model.image(4, 4) for _ in range(4)]  # fmt: skip
    parts = [rng.choices([*images, rng.randint(1, 9), rng.randint(1, 9)], k=rng.randint(1, 4)) for _ in range(10)]
    prompts = [model.prompt(*each, 2) for each in parts]
    alone = [ids(*run(engine_for(model.worker), [(prompt, greedy(24))])) for prompt in prompts]
    preemptions = 0
    for trial in range(4):
        if trial % 2:
            model.forget()
        engine = engine_for(
            model.worker, token_work=rng.choice([1, 10**4, 10**5, 10**6]), num_blocks=rng.choice([7, 9]),
            max_num_seqs=rng.choice([2, 4, 8]), max_num_batched_tokens=rng.choice([3, 17, 64]),
        )  # fmt: skip
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, greedy(24))
        left = {str(number) for number in rng.sample(range(10), 2)}
        for _ in range(rng.randrange(8)):
            engine.step()
        for gone in left:
            engine.abort(gone)
        last = drained(engine)
        for number, expected in enumerate(alone):
            if str(number) not in left and str(number) in last and last[str(number)].finished:
                assert ids(last[str(number)]) == expected
        stats = engine.stats()
        preemptions += stats.preemptions
        assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
        assert len(model.sight._begun) <= MOST_BEGUN
    assert preemptions


def test_an_image_that_two_want_is_computed_once(model: Model) -> None:
    model.forget()
    image = model.image()
    engine = engine_for(model.worker, token_work=1, enable_prefix_caching=False)
    run(engine, [(model.prompt(3, image, 2), greedy(2)), (model.prompt(4, image, 5), greedy(2))])
    assert model.sight.num_computed == 1
    looks = [plan.look.num_stages for plan in model.plans if plan.look is not None]
    assert len(looks) == model.layers + 1  # the second finds it in its first step


def test_who_is_more_urgent_looks_first_and_nothing_that_waits_is_computed_again(model: Model) -> None:
    model.forget()
    computed = layers_computed(model.sight)
    slow, urgent = model.prompt(3, model.image(), 2), model.prompt(4, model.image(2, 4), 5)
    engine = engine_for(model.worker, token_work=1, policy="priority")
    engine.add("slow", slow, greedy(2), priority=5)
    engine.step()
    engine.add("urgent", urgent, greedy(2), priority=0)
    order = [output.request_id for _ in range(20) for output in engine.step() if output.finished]
    assert order == ["urgent", "slow"]
    assert len(computed) == 2 * model.layers


def layers_computed(sight: Sight) -> list[int]:
    told: list[int] = []
    sight.told = lambda: told.append(1)
    return told


def test_of_many_that_are_begun_the_oldest_begin_anew(model: Model) -> None:
    model.forget()
    computed = layers_computed(model.sight)
    prompts = [model.prompt(3, model.image(), 2) for _ in range(MOST_BEGUN + 1)]
    expected = [ids(*run(engine_for(model.worker), [(prompt, greedy(3))])) for prompt in prompts]
    model.forget()
    computed.clear()
    engine = engine_for(model.worker, token_work=1, policy="priority")
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(3), priority=MOST_BEGUN - number)
        engine.step()
    last = drained(engine)
    assert [ids(last[str(number)]) for number in range(len(prompts))] == expected
    assert len(computed) == (MOST_BEGUN + 1) * model.layers + 1


def failing(monkeypatch: pytest.MonkeyPatch, which: range, error: Callable[[], BaseException]) -> list[int]:
    """These of the layers that are computed from now on fail. Counts them."""
    count: list[int] = []
    layer = Tower._layer

    def fails(self: Tower, *args: object) -> None:
        count.append(1)
        if len(count) in which:
            raise error()
        layer(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Tower, "_layer", fails)
    return count


def test_a_layer_that_fails_ends_the_request_that_wants_it_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.forget()
    text = model.prompt(5)
    expected = ids(*run(engine_for(model.worker), [(text, greedy(12))]))
    failing(monkeypatch, range(2, 4), lambda: ValueError("broken"))  # in a step with the other, and when it is tried alone
    engine = engine_for(model.worker, token_work=1, max_num_batched_tokens=64)
    image = model.image()
    engine.add("text", text, greedy(12))
    engine.add("bad", model.prompt(3, image, 2), greedy(2))
    last = drained(engine)
    assert ids(last["text"]) == expected
    assert last["bad"].outputs[0].finish_reason == "error"
    assert "ValueError" in (last["bad"].outputs[0].error or "")
    assert engine.stats().used_blocks == 0
    (again,) = run(engine, [(model.prompt(3, image, 2), greedy(2))])  # which tries it again, from the beginning
    assert again.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("finished", "copies"), [([7], []), ([], [(1, 2)]), ([], [])])
def test_where_nobody_but_a_look_is_in_a_step_that_fails_the_rest_of_it_is_done(
    finished: list[int], copies: list[tuple[int, int]]
) -> None:
    """Nobody else would forget who has finished, or copy the state that another sequence is going on from."""
    done: list[Plan] = []

    class Fails:
        def execute(self, plan: Plan) -> StepOutput:
            if plan.look is not None:
                raise ValueError("broken")
            done.append(plan)
            return StepOutput([], {})

    fails: Any = Fails()
    look = Look(3, Image.of(4, 4, bytes(48)), 1)
    output, failures = Stepper(fails, fails, None)._execute(Plan([], [], finished, [], copies, look))
    assert output == StepOutput([], {})
    assert failures == {3: "an internal error (ValueError)"}
    assert done == ([Plan([], [], finished, [], copies)] if finished or copies else [])


def test_a_state_that_is_found_is_copied_though_another_ones_image_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("qwen3.5", tmp_path)
    begins, image, bad = model.prompt(128), model.image(), model.image()
    found = TokenIds([*begins, *model.prompt(image), 9, 9], [model.vision.placed(image, 128)])
    price = -(-model.vision.tower.layer_work(image) // 150)
    expected = ids(*run(engine_for(model.worker), [(found, greedy(8))]))
    engine = engine_for(model.worker, token_work=price, max_num_batched_tokens=256)
    run(engine, [([*begins, 5], greedy(1))])
    run(engine, [(model.prompt(30), greedy(1)) for _ in range(4)])  # whose states are in the place of its own
    model.forget()
    stages, tries = Tower.stages, []

    def fails(self: Tower, given: Image) -> Stages:
        """Behind a layer, so that a step with the next one is the first of the other request, and when it is tried alone."""
        if given == bad:
            tries.append(1)
            if len(tries) == 1:
                yield
            raise ValueError("broken")
        return (yield from stages(self, given))

    monkeypatch.setattr(Tower, "stages", fails)
    engine.add("bad", model.prompt(bad, 2), greedy(2))
    engine.add("good", found, greedy(8))
    last = drained(engine)
    assert last["bad"].outputs[0].finish_reason == "error"
    assert last["good"].metrics.num_cached_tokens == 128
    assert model.plans[1].look is not None
    assert (model.plans[1].scheduled, len(model.plans[1].state_copies)) == ([], 1)
    assert ids(last["good"]) == expected


def test_an_image_behind_the_end_of_a_chunk_takes_no_room(tmp_path: Path) -> None:
    """A prompt of a model with states is cut where they are copied."""
    model = Model("qwen3.5", tmp_path)
    image = model.image()
    price = -(-model.vision.tower.layer_work(image) // 50)
    engine = engine_for(model.worker, token_work=price, max_num_batched_tokens=400)
    run(engine, [(model.prompt(140, image, 2), greedy(1)), (model.prompt(300), greedy(1))])
    first = model.plans[0]
    assert [len(share.token_ids) for share in first.scheduled] == [128, 128]
    assert (first.look, sum(len(share.token_ids) for share in first.scheduled)) == (None, 256)


def test_what_is_begun_is_never_more_than_memory_was_left_for(model: Model) -> None:
    """Two images that wait, with one that is computed at once, would be three."""
    model.forget()
    waiting = [model.image() for _ in range(MOST_BEGUN)]
    with torch.inference_mode():
        for image in waiting:
            assert model.sight.look(Look(1, image, 1)) == model.layers - 1
        held: list[int] = []
        model.sight.told = lambda: held.append(len(model.sight._begun))
        assert model.sight.look(Look(1, model.image(), model.layers)) == 0
    assert max(held) == MOST_BEGUN - 1
    assert list(model.sight._begun) == [waiting[-1].digest]


def test_what_ctrl_c_breaks_off_is_computed_from_the_beginning(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.forget()
    prompt = model.prompt(3, model.image(), 2)
    expected = ids(*run(engine_for(model.worker), [(prompt, greedy(4))]))
    model.forget()
    count = failing(monkeypatch, range(2, 3), KeyboardInterrupt)
    engine = engine_for(model.worker, token_work=1)
    engine.add("it", prompt, greedy(4))
    for _ in range(2):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert ids(drained(engine)["it"]) == expected
    assert len(count) == 2 + model.layers


def test_a_request_that_leaves_while_it_looks_leaves_nothing_that_counts(model: Model) -> None:
    model.forget()
    engine = engine_for(model.worker, token_work=1)
    for number in range(5):
        engine.add(str(number), model.prompt(3, model.image(), 2), greedy(2))
        for _ in range(2):
            engine.step()
        engine.abort(str(number))
    assert not engine.has_unfinished()
    assert engine.stats().used_blocks == 0
    assert len(model.sight._begun) == MOST_BEGUN


def test_a_chunk_ends_before_an_image_that_is_not_ready() -> None:
    image = Image.of(32, 32, bytes(3 * 32 * 32))
    price = 5
    looking = Looking(SENSES, -(-TOWER.layer_work(image) // price))

    def sequence(start: int, left: int | None = None) -> Sequence:
        request = Request("it", tuple(range(60)), greedy(1), 61, (), 0.0, images=(PlacedImage(image, 10, 4, 4),))
        if left is not None:
            request.stages_left[image.digest] = left
        found = Sequence(1, request, 0, 0, list(range(60)))
        found.num_computed = start
        return found

    def looked() -> int:
        found = looking.take()
        return 0 if found is None else found[1].num_stages

    assert (looking.room(sequence(0), 8, 8), looked()) == ((8, 0), 0)  # which does not come to it
    assert (looking.room(sequence(0), 20, 20), looked()) == ((10, 10), 2)
    assert (looking.room(sequence(0), 20, 25), looked()) == ((10, 15), 3)  # all of it, and no room for its tokens
    assert (looking.room(sequence(0), 20, 26), looked()) == ((11, 15), 0)  # all of it, and its first token
    assert (looking.room(sequence(0), 20, 12), looked()) == ((10, 0), 0)  # tokens in front of it are enough for a step
    assert (looking.room(sequence(10), 3, 3), looked()) == ((0, 5), 1)
    assert (looking.room(sequence(15, left=1), 20, 20), looked()) == ((15, 5), 0)
    assert (looking.room(sequence(15, left=0), 20, 20), looked()) == ((20, 0), 0)
    assert looking.room(sequence(10), 3, 3) == (0, 5)
    assert looking.room(sequence(10), 3, 30) == (3, 15)  # needs none
    assert looking.room(sequence(10), 3, 3) == (0, 0)  # somebody else looks
    assert looked() == 1


def test_of_images_that_are_alike_the_first_takes_room() -> None:
    image, other = Image.of(32, 32, bytes(3 * 32 * 32)), Image.of(32, 32, bytes([1]) * 3 * 32 * 32)
    looking = Looking(SENSES, -(-TOWER.layer_work(image) // 5))

    def room(*images: Image) -> tuple[int, int]:
        placed = tuple([PlacedImage(each, 16 * place, 4, 4) for place, each in enumerate(images)])
        request = Request("it", tuple(range(60)), greedy(1), 61, (), 0.0, images=placed)
        return looking.room(Sequence(1, request, 0, 0, list(range(60))), 50, 80)

    assert room(image, image, image) == (50, 15)
    assert room(image, other, image) == (50, 30)


def test_images_among_some_tokens_are_found_by_halving() -> None:
    """Against a look at each. A prompt may have hundreds of pieces, and every token that is drawn asks. Some are of a sound,
    whose rotary positions are those of a text."""
    rng, images, start = random.Random(1), [], 0
    for _ in range(40):
        start += rng.choice([0, 0, 1, 9])
        rows, columns = rng.randint(1, 3), rng.randint(1, 4)
        images.append(PlacedImage(Image.of(1, 1, bytes(3)), start, rows, columns, has_grid=len(images) % 3 > 0))
        start = images[-1].end
    request = Request("it", tuple(range(start + 9)), greedy(1), start + 10, (), 0.0, images=tuple(images))
    for begin in range(start + 9):
        assert request.shift(begin) == sum(each.extent - each.num_tokens for each in images if each.end <= begin)
        for end in range(begin + 1, start + 9, 7):
            among = range(begin, end)
            expected = [image for image in images if any(place in among for place in range(image.start, image.end))]
            assert list(request.images_within(begin, end)) == expected


def test_who_is_preempted_looks_again_as_what_was_made_may_be_gone() -> None:
    request = Request("it", (1, 2), greedy(1), 3, (), 0.0)
    request.stages_left[b"image"] = 0
    request.begin_again()
    assert not request.stages_left


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layers_work_is_what_torch_counts(window: int, gated: bool) -> None:
    """Of the rest of a tower, one with a layer less has as much. In float16, which torch computes on a CPU as elsewhere."""
    image = Image.of(48, 32, bytes(range(256)) * 18)

    def spec(layers: int) -> TowerSpec:
        return replace(TOWER, num_layers=layers, window=window, full=(1,) if window else (), gated=gated)

    def counted(layers: int) -> int:
        tensors = {name: torch.randn(shape) * 0.1 for name, shape in tower_shapes(spec(layers)).items()}
        made = {name: each if "norm." in name else each.half() for name, each in tensors.items()}
        tower = Tower(spec(layers), made, ((0.5,) * 3, (0.5,) * 3))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            tower(image)
        return int(counter.get_total_flops())

    def told(layers: int) -> int:
        return spec(layers).layer_work(image) * layers

    assert 2 * (told(4) - told(3)) == pytest.approx(counted(4) - counted(3), rel=0.02)


def test_stages_are_layers_and_give_what_one_call_does(model: Model) -> None:
    tower, image = model.sight._organs[0].tower(), model.image()
    with torch.inference_mode():
        whole, stages = tower(image), tower.stages(image)
        made = [next_stage(stages) for _ in range(model.layers)]
    assert made[:-1] == [None] * (model.layers - 1)
    assert made[-1] is not None
    assert torch.equal(made[-1].rows, whole.rows)
    assert all(torch.equal(a, b) for a, b in zip(made[-1].deep, whole.deep, strict=True))
